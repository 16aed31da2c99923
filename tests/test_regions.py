"""recompute_grad and custom_gradient beyond the table: same bits, less memory, errors."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError

LAYERS = 6
B, D, H = mm.Dimension("b", 16), mm.Dimension("d", 8), mm.Dimension("h", 32)
HIDDEN_BYTES = {"": 2048, "b:r": 1024, "h:r": 1024, "b:r;h:c": 352, "d:r": 2048, "b:c+r": 384}
"""Layout -> bytes of the largest block of the [b, h] activations of one layer."""
X = np.random.default_rng(0).normal(size=(16, 8))


def layer(x: mm.Tensor) -> mm.Tensor:
    types = mm.VariableDType("float64", "float32")
    w, v = mm.get_variable("w", [D, H], types), mm.get_variable("v", [H, D])
    hidden = mm.dropout(mm.gelu(mm.einsum([x, w], [B, H])), True, rate=0.25)
    return x + mm.einsum([hidden, v], [B, D])


def stack(recompute: bool, layers: int = LAYERS) -> tuple[mm.Graph, list[mm.Tensor]]:
    """A graph with its loss and the gradients of all variables and of the input."""
    with mm.Graph() as graph:
        x = first = mm.placeholder("x", [B, D])
        for n in range(layers):
            with mm.scope(f"layer_{n}"):
                x = mm.recompute_grad(layer, [x]) if recompute else layer(x)
        loss = mm.reduce_mean(mm.square(x))
        reads = [t for v in graph.variables.values() for t in v._reads.values()]
        grads = mm.gradients(loss, [*reads, first])
    assert None not in grads
    return graph, [loss, *(g for g in grads if g is not None)]


def results(graph: mm.Graph, fetches: list[mm.Tensor], layout: str, optimize: bool = True):
    mesh = mm.SimulatedMesh("r:2;c:3")
    step = mm.compile(graph, mesh, layout, fetches=fetches, kernels="numpy", seed=5, optimize=optimize)
    values = [step(x=X)[t] for t in fetches for _ in range(2)]  # two steps: other dropout masks
    arrays = [np.asarray(v.numpy() if isinstance(v, mm.ShardedArray) else v) for v in values]
    return step, arrays


@pytest.mark.parametrize("layout", HIDDEN_BYTES)
def test_recomputing_changes_memory_and_no_bit(layout: str):
    kept, with_all = results(*stack(False), layout)
    again, with_some = results(*stack(True), layout)
    assert all(np.array_equal(a, b) for a, b in zip(with_all, with_some, strict=True))
    saved = kept.cost.memory["arena"] - again.cost.memory["arena"]
    # Each layer keeps more than one of these; what is cheap is computed again in any case.
    assert saved > (LAYERS - 2) * HIDDEN_BYTES[layout]
    assert again.cost.flops > 1.1 * kept.cost.flops
    assert list(again.program.variables) == list(kept.program.variables)


def test_variables_stored_in_blocks_are_gathered_again_and_not_kept():
    plans = []
    for recompute in (False, True):
        graph, fetches = stack(recompute)
        options = {"fetches": fetches, "storage": "h:r", "seed": 5}
        plans.append(mm.plan(graph, "r:2", "b:r", **options))
        step = mm.compile(graph, mm.SimulatedMesh("r:2"), "b:r", kernels="numpy", **options)
        plans.append([np.asarray(step(x=X)[t]) for t in fetches[:1]])
    kept, first, again, second = plans
    assert np.array_equal(first, second)
    gathers = [p.program.counts()["all_gather"] for p in (kept, again)]
    assert gathers == [2 * LAYERS, 4 * LAYERS]
    weights = (LAYERS - 2) * (D.size * H.size * (4 + 4))  # as computed with: float32
    assert kept.cost.memory["arena"] - again.cost.memory["arena"] > weights


def test_memory_grows_by_the_input_of_each_layer_only():
    sizes = [
        mm.plan(graph, "r:1", "", fetches=fetches[:1] + fetches[-1:]).cost.memory["arena"]
        for graph, fetches in (stack(True, 6), stack(True, 12))
    ]
    one_input = B.size * D.size * 4
    assert sizes[1] - sizes[0] <= 7 * one_input  # six inputs, and the alignment of masks


def test_lowered_programs_agree_too():
    _, optimized = results(*stack(True, 2), "b:r;h:c")
    _, lowered = results(*stack(True, 2), "b:r;h:c", optimize=False)
    for a, b in zip(optimized, lowered, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_program_text_is_the_same_for_each_graph():
    plans = [
        mm.plan(graph, "r:2", "b:r", fetches=fetches).program.text() for graph, fetches in (stack(True), stack(True))
    ]
    assert plans[0] == plans[1]
    assert "barrier=recompute" in plans[0]


def test_custom_gradient_refuses_what_would_lose_a_gradient():
    with mm.Graph():
        x, other = mm.placeholder("x", [B]), mm.placeholder("other", [B])
        ones = mm.ones([B])
        mm.custom_gradient(lambda t: t * ones, lambda xs, ys, dys: dys, [x])  # a constant: fine
        with pytest.raises(ShapeError, match=r"uses <Tensor other .* not among its inputs"):
            mm.custom_gradient(lambda t: t * other, lambda xs, ys, dys: dys, [x])
        with pytest.raises(ShapeError, match=r"uses <Tensor w .* not among its inputs"):
            mm.custom_gradient(lambda t: t * mm.get_variable("w", [B]), lambda xs, ys, dys: dys, [x])
        stopped = mm.stop_gradient(other)
        mm.custom_gradient(lambda t: t * stopped, lambda xs, ys, dys: dys, [x])


def test_custom_gradient_checks_what_the_rule_returns():
    with mm.Graph():
        x, y = mm.placeholder("x", [B]), mm.placeholder("y", [B, D])
        short = mm.custom_gradient(lambda a, b: b * a, lambda xs, ys, dys: dys, [x, y])
        with pytest.raises(ShapeError, match="returned 1 gradients for 2 inputs"):
            mm.gradients(short, [x])
        wide = mm.custom_gradient(lambda a: mm.broadcast(a, [B, D]), lambda xs, ys, dys: dys, [x])
        with pytest.raises(ShapeError, match="the gradient of <Tensor x "):
            mm.gradients(wide, [x])
        with pytest.raises(ShapeError, match="the function returned None"):
            mm.recompute_grad(lambda t: None, [x])
