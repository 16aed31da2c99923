"""Loops: the same results as without, in every layout; memory linear in the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import LayoutError, ProgramError
from meshmpi.kernels.native import available
from meshmpi.loops import LoopDim, iterations
from meshmpi.passes import blocks
from meshmpi.passes.loops import form_loops
from meshmpi.passes.pipeline import PASSES, optimize
from meshmpi.program import Instruction, Program
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.launch import launch
from meshmpi.typerules import verify
from tests.layouts import legal_layouts

SHAPE = mm.MeshShape("rows:2;cols:3")
BATCH, LENGTH, HEADS, D = 3, 21, 5, 4
SIZES = {"batch": BATCH, "length": LENGTH, "memory": LENGTH, "heads": HEADS, "d": D}
CACHE = 4000
Model = Callable[[], list[mm.Tensor]]
MODELS: dict[str, tuple[Model, bool]] = {}


def model(causal: bool):
    """Registers fetches (the first a loss), and whether what is behind a row is skipped."""

    def register(f: Model) -> Model:
        MODELS[f.__name__] = f, causal
        return f

    return register


def _x(name: str, dims: str, dtype: str = "float64") -> mm.Tensor:
    return mm.placeholder(name, [mm.Dimension(d, SIZES[d]) for d in dims.split()], dtype)


def _qkv() -> tuple[mm.Tensor, mm.Tensor, mm.Tensor]:
    return (
        _x("q", "batch length heads d"), _x("k", "batch memory heads d"),
        _x("v", "batch memory heads d"),
    )  # fmt: skip


def _causal(rows: str = "length", columns: str = "memory") -> mm.Tensor:
    a, b = (mm.range(mm.Dimension(n, SIZES[n])) for n in (rows, columns))
    return mm.greater_equal(a, b, output_shape=mm.Shape([*a.shape, *b.shape]))


def _attention(
    q: mm.Tensor, k: mm.Tensor, v: mm.Tensor, mask: mm.Tensor | None = None, fill: float = -1e9,
    bias: mm.Tensor | None = None, rate: float = 0.0,
) -> mm.Tensor:  # fmt: skip
    shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "heads", "length", "memory")])
    scores = mm.einsum([q, k], shape) * 0.5
    if bias is not None:
        scores = mm.add(scores, bias, output_shape=shape)
    if mask is not None:
        scores = mm.where(mask, scores, fill, output_shape=shape)
    weights = mm.softmax(scores, "memory")
    weights = mm.dropout(weights, rate > 0, rate=rate)
    return mm.einsum([weights, v], q.shape)


def _with_gradients(y: mm.Tensor, *xs: mm.Tensor) -> list[mm.Tensor]:
    loss = mm.reduce_sum(mm.square(mm.tanh(y)))
    return [loss, *mm.gradients([loss], list(xs))]


@model(causal=False)
def whole():
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v), q, k, v)


@model(causal=True)
def masked():
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v, _causal()), q, k, v)


@model(causal=True)
def masked_with_infinity_and_padding():
    """Some rows see nothing at all."""
    q, k, v = _qkv()
    seen = mm.not_equal(_x("ids", "batch memory", "int32"), 0)
    shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "length", "memory")])
    mask = mm.logical_and(_causal(), seen, output_shape=shape)
    return _with_gradients(_attention(q, k, v, mask, -math.inf), q, k, v)


@model(causal=False)
def masked_with_padding():
    """A row that sees nothing has equal weights everywhere, so nothing may be skipped."""
    q, k, v = _qkv()
    seen = mm.not_equal(_x("ids", "batch memory", "int32"), 0)
    shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "length", "memory")])
    mask = mm.logical_and(_causal(), seen, output_shape=shape)
    return _with_gradients(_attention(q, k, v, mask), q, k, v)


@model(causal=False)
def later_only():
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v, mm.logical_not(_causal())), q, k, v)


@model(causal=False)
def strictly_earlier():
    q, k, v = _qkv()
    a, b = mm.range(q.shape.dim("length")), mm.range(k.shape.dim("memory"))
    mask = mm.greater(a, b, output_shape=mm.Shape([*a.shape, *b.shape]))
    return _with_gradients(_attention(q, k, v, mask), q, k, v)


@model(causal=True)
def dropped_out():
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v, _causal(), rate=0.4), q, k, v)


@model(causal=False)
def biased():
    """The gradient of the bias is a sum over batch of a wide value."""
    q, k, v = _qkv()
    bias = _x("bias", "heads length memory")
    return _with_gradients(_attention(q, k, v, bias=bias), q, k, v, bias)


@model(causal=True)
def one_head_of_memory():
    q, k, v = _x("q", "batch length heads d"), _x("k", "batch memory d"), _x("v", "batch memory d")
    return _with_gradients(_attention(q, k, v, _causal()), q, k, v)


@model(causal=False)
def weights_fetched():
    q, k, v = _qkv()
    shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "heads", "length", "memory")])
    weights = mm.softmax(mm.einsum([q, k], shape), "memory")
    return [*_with_gradients(mm.einsum([weights, v], q.shape), q, k, v), weights]


@model(causal=True)
def two_layers():
    q, k, v = _qkv()
    y = _attention(q, k, v, _causal())
    y = _attention(mm.tanh(y), k, v, _causal())
    return _with_gradients(y, q, k, v)


@model(causal=False)
def no_softmax():
    """Sums over rows and columns of gated scores."""
    q, k, v = _qkv()
    shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "heads", "length", "memory")])
    gated = mm.sigmoid(mm.einsum([q, k], shape))
    total = mm.reduce_sum(gated, output_shape=mm.Shape([("heads", HEADS), ("memory", LENGTH)]))
    y = mm.einsum([gated, v], q.shape)
    return _with_gradients(mm.add(y, total_over_memory(total), output_shape=y.shape), q, k, v)


def total_over_memory(x: mm.Tensor) -> mm.Tensor:
    return mm.reduce_mean(x, reduced_dim="memory")


def built(name: str) -> tuple[mm.Graph, dict[str, mm.Tensor], dict[str, np.ndarray]]:
    with mm.Graph() as graph:
        fetches = {f"f{n}": x for n, x in enumerate(MODELS[name][0]())}
    rng = np.random.default_rng(3)
    feeds = {}
    for op in graph.operations:
        if type(op).__name__ == "Placeholder":
            t = op.outputs[0]
            values = rng.normal(size=t.shape.sizes)
            feeds[t.name] = rng.integers(0, 3, t.shape.sizes) if t.name == "ids" else values
    if "ids" in feeds:
        feeds["ids"] = feeds["ids"].astype(np.int32)
        feeds["ids"][0, :4] = 0  # the first rows see nothing
    return graph, fetches, feeds


def with_loops(p: Program, cache_bytes: int = CACHE) -> Program:
    passes = [
        partial(form_loops, cache_bytes=cache_bytes) if f is form_loops else f for f in PASSES
    ]
    return optimize(p, tuple(passes))


def loops_in(p: Program) -> list[Instruction]:
    return [i for i in p.instructions if i.kind == "loop"]


def run(p: Program, fetches: dict, feeds: dict, kernels: str = "numpy") -> dict[str, np.ndarray]:
    step = CompiledStep(p, mm.SimulatedMesh(p.mesh), fetches, None, kernels)
    got = step({n: feeds[n] for n in p.feeds})
    assert step._executor.states[0].held_memory == step.cost.memory
    assert sum(step.counted_flops.values()) == step.cost.flops
    return {n: np.asarray(r if isinstance(r := got[n], float) else r.numpy()) for n in fetches}


def compare(got: dict, want: dict, tolerance: float, label: str) -> None:
    for n in want:
        largest = max(1e-3, np.abs(want[n]).max())
        error = np.abs(got[n] - want[n]).max() / largest
        assert error < tolerance, f"{label}: {n} differs by {error:.2g}"


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of a few rows, so that small models have several, of unequal sizes."""
    monkeypatch.setattr(blocks, "LEAST_ROWS", 4)
    monkeypatch.setattr(blocks, "LEAST_CAUSAL_ROWS", 4)


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_program_as_lowered(name: str):
    graph, fetches, feeds = built(name)
    looped = 0
    want = None
    for layout in legal_layouts(graph, SHAPE, 4):
        try:
            p = mm.plan(graph, SHAPE, layout, fetches=fetches, optimize=False, seed=1).program
        except LayoutError:
            continue
        want = run(p, fetches, feeds) if want is None else want
        p = with_loops(p)
        looped += bool(loops_in(p))
        compare(run(p, fetches, feeds), want, 1e-9, f"{name} {layout}")
    assert looped, f"no layout of {name} has a loop"


@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize("name", MODELS)
def test_generated_kernels_in_loops(name: str):
    graph, fetches, feeds = built(name)
    for mesh, layout in (("rows:1", ""), ("rows:2;cols:3", "batch:rows;heads:cols")):
        p = mm.plan(graph, mesh, layout, fetches=fetches, optimize=False, seed=1).program
        want = run(p, fetches, feeds)
        compare(run(with_loops(p), fetches, feeds, "native"), want, 1e-9, f"{name} {layout}")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_behind_a_row_is_skipped_only_where_it_is_zero(name: str):
    graph, fetches, _ = built(name)
    p = with_loops(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)
    found = [i.attrs.get("causal") for i in loops_in(p)]
    expected = ("length", "memory") if MODELS[name][1] else None
    assert found and all(c == expected for c in found), found


def test_skipped_blocks_cost_nothing():
    flops = {}
    for name in ("whole", "masked"):
        graph, fetches, _ = built(name)
        p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
        step = CompiledStep(with_loops(p), mm.SimulatedMesh(p.mesh), fetches, None, "numpy")
        flops[name] = step.cost.flops
    assert flops["masked"] < 0.8 * flops["whole"]


@pytest.mark.parametrize("layout", ["", "length:rows", "heads:cols;batch:rows"])
def test_memory_grows_with_the_length_not_with_its_square(monkeypatch, layout: str):
    arena, stored = {}, {}
    for length in (128, 256):
        monkeypatch.setitem(SIZES, "length", length)
        monkeypatch.setitem(SIZES, "memory", length)
        with mm.Graph() as graph:
            fetches = {f"f{n}": x for n, x in enumerate(two_layers())}
        p = mm.plan(graph, SHAPE, layout, fetches=fetches, optimize=False).program
        for table, one in ((arena, with_loops(p, 40000)), (stored, optimize(p, _without_loops()))):
            step = CompiledStep(one, mm.SimulatedMesh(SHAPE), fetches, None, "numpy")
            table[length] = step.cost.memory["arena"]
    assert arena[256] <= 2.05 * arena[128]
    assert stored[256] > 3 * stored[128]


def _without_loops() -> tuple:
    return tuple(f for f in PASSES if f is not form_loops)


def test_scores_and_masks_are_computed_again_instead_of_being_stored():
    graph, fetches, _ = built("masked")
    p = with_loops(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)
    wide = [t for t in p.types.values() if {"length", "memory"} <= set(t.shape.names)]
    assert not wide, wide
    assert p.counts()["contract"] == 7  # scores twice, and five that use or make gradients


def test_products_of_bfloat16_are_summed_in_float32():
    with mm.Graph() as graph:
        q, k, v = (_x(n, f"batch {m} heads d", "bfloat16") for n, m in
                   (("q", "length"), ("k", "memory"), ("v", "memory")))  # fmt: skip
        shape = mm.Shape([(n, SIZES[n]) for n in ("batch", "heads", "length", "memory")])
        weights = mm.softmax(mm.cast(mm.einsum([q, k], shape), "float32"), "memory")
        y = mm.cast(mm.einsum([mm.cast(weights, "bfloat16"), v], q.shape), "float32")
        fetches = {f"f{n}": x for n, x in enumerate(_with_gradients(y, q, k, v))}
    p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
    q = with_loops(p, 600)
    sums = [q.types[v] for i in loops_in(q) for v in i.outputs
            if "memory" in q.types[v].shape.names]  # fmt: skip
    assert sums and all(t.dtype == "float32" for t in sums)
    rng = np.random.default_rng(0)
    feeds = {n: rng.normal(size=t.shape.sizes).astype(np.float32) for n, t in p.feeds.items()}
    want, got = (
        {n: a.astype(np.float64) for n, a in run(r, fetches, feeds).items()} for r in (p, q)
    )
    compare(got, want, 2e-2, "bfloat16")


def test_small_values_and_weights_are_left_alone():
    graph, fetches, _ = built("masked")
    p = mm.plan(graph, "rows:1", fetches=fetches).program
    assert not loops_in(p)
    with mm.Graph() as graph:
        x, w = _x("q", "batch length d", "float32"), mm.get_variable("w", [("d", D), ("wide", 500)])
        h = mm.relu(mm.einsum([x, w], mm.Shape([*x.shape[:2], ("wide", 500)])))
        loss = mm.reduce_sum(mm.square(h))
    p = mm.plan(graph, "rows:1", fetches={"loss": loss}, optimize=False).program
    assert not loops_in(with_loops(p))


def _loop(**attrs) -> Program:
    graph, fetches, _ = built("masked")
    p = with_loops(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)
    out = [
        i.replaced(attrs={**i.attrs, **attrs}) if i.kind == "loop" else i for i in p.instructions
    ]
    return p.with_instructions(out)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"over": (LoopDim("memory", 4),), "causal": None}, "needs all of 'memory'"),
        ({"over": (LoopDim("d", 2),), "causal": None}, "needs all of 'd'"),
        ({"over": ()}, "over no dim"),
        ({"over": (LoopDim("batch", 0),)}, "empty blocks"),
        ({"over": (LoopDim("batch", 1),)}, "causal along other dims"),
    ],
)
def test_rules_of_loops(attrs: dict, message: str):
    verify(_loop())
    with pytest.raises(ProgramError, match=message):
        verify(_loop(**attrs))


def test_blocks_cover_everything_once():
    graph, fetches, _ = built("whole")
    p = mm.plan(graph, SHAPE, "length:rows;heads:cols", fetches=fetches, optimize=False).program
    p = with_loops(p)
    for i in loops_in(p):
        for rank in range(SHAPE.size):
            here = SHAPE.coordinates(rank)
            seen: dict[tuple, int] = {}
            for r in iterations(i, p, here):
                for b in range(*r["batch"]):
                    for h in range(*r["heads"]):
                        for n in range(*r["length"]):
                            seen[b, h, n] = seen.get((b, h, n), 0) + 1
            lengths, heads = (11, 10)[rank // 3], (2, 2, 1)[rank % 3]
            assert len(seen) == BATCH * lengths * heads and set(seen.values()) == {1}


def test_loops_and_recomputing_on_real_ranks():
    arguments = ["-m", "tests.passes.mpi_loops"]
    done = launch(2, arguments, timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "7 programs agree"


def test_products_too_small_for_a_loop_beside_large_ones_of_the_same_dims():
    """Maps of a small product have the dims of wide values, but no loop can be formed for them."""
    rng, sizes = np.random.default_rng(0), (16, 12)
    with mm.Graph() as graph:
        found, feeds = [], {}
        for k, memory in enumerate(sizes):
            q = mm.placeholder(f"q{k}", "batch:4;heads:2;length:16;d_kv:2")
            kv = mm.placeholder(f"k{k}", f"batch:4;heads:2;memory_length:{memory};d_kv:2")
            feeds |= {t.operation.name: rng.normal(size=t.shape.sizes) for t in (q, kv)}
            seen = mm.less(mm.range(mm.Dimension("memory_length", memory)), 11)
            found.append(
                mm.dot_product_attention(q, kv, kv, "memory_length", "d_kv", "d_kv", mask=seen)
            )
    program = mm.plan(graph, "rows:2", "batch:rows", fetches=found, optimize=False).program
    least = 4 * 2 * 2 * 16 * 14  # bytes, between the scores of both
    passes = tuple(partial(form_loops, cache_bytes=least) if p is form_loops else p for p in PASSES)
    looped = optimize(program, passes)
    assert [i.kind for i in looped.instructions].count("loop") == 1
    fetches = dict(zip(looped.fetches, found, strict=True))
    mesh = mm.SimulatedMesh("rows:2")
    results = [CompiledStep(p, mesh, fetches, None, "numpy")(feeds) for p in (program, looped)]
    for t in found:
        np.testing.assert_allclose(results[0][t].numpy(), results[1][t].numpy(), 1e-5, 1e-6)
