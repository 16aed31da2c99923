"""Recomputing for a limit of memory: the same results to the last bit, peaks as predicted."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes.rematerialise import fit_memory
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import COLLECTIVES, Feed, Map, View
from meshmpi.ir.program import Instruction, Kind, Program
from meshmpi.ir.scalar import Expr, Step
from meshmpi.ir.types import LocalType
from meshmpi.ir.verify import verify
from meshmpi.kernels.native import available
from meshmpi.runtime.compiled import CompiledStep, predict_cost

LAYOUTS = [("rows:1", ""), ("rows:2;cols:2", "batch:rows;heads:cols;d_ff:cols;vocab:cols")]


def language_model(dropout: float = 0.0, **options) -> tuple[mm.Graph, mm.Tensor, list]:
    config = mm.transformer.TransformerConfig(
        vocab=30,
        length=24,
        d_model=16,
        d_ff=64,
        heads=4,
        d_kv=4,
        layers=3,
        norm="layer",
        activation="gelu",
        residual_dropout=dropout,
        **options,
    )
    with mm.Graph() as graph:
        dims = mm.Shape("batch:6;length:24")
        tokens, targets = (mm.placeholder(n, dims, "int32") for n in ("tokens", "targets"))
        loss, _ = mm.transformer.lm_loss(config, tokens, targets, dropout > 0)
        updates = mm.optimize.Adam(1e-2).minimize(loss)
    return graph, loss, updates


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.integers(0, 30, (6, 24)).astype(np.int32) for n in ("tokens", "targets")}


def losses(p: Program, loss: mm.Tensor, kernels: str = "numpy") -> list[float]:
    step = CompiledStep(p, mm.SimulatedMesh(p.mesh), {"loss": loss}, None, kernels)
    assert step._executor.states[0].held_memory == step.cost.memory
    got = [step(feeds())[loss] for _ in range(3)]
    assert sum(step.counted_flops.values()) == 3 * step.cost.flops
    return got


def planned(mesh: str, layout: str, dropout: float = 0.0) -> tuple[Program, mm.Tensor]:
    graph, loss, updates = language_model(dropout)
    p = mm.plan(graph, mesh, layout, fetches={"loss": loss}, updates=updates).program
    return p, loss


def total(p: Program) -> int:
    return predict_cost(p).peak_memory


def share_of_arena(p: Program, share: float) -> int:
    memory = predict_cost(p).memory
    return sum(memory.values()) - int((1 - share) * memory["arena"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_are_equal_to_the_last_bit_in_less_memory(mesh: str, layout: str, dropout: float):
    p, loss = planned(mesh, layout, dropout)
    want = losses(p, loss)
    assert want[2] < want[0]
    for share in (0.9, 0.85):
        limit = share_of_arena(p, share)
        q = fit_memory(p, limit, total)
        verify(q)
        assert total(q) <= limit
        assert losses(q, loss) == want
        assert predict_cost(q).bytes_sent == predict_cost(p).bytes_sent
        assert [q.counts().get(k) for k in COLLECTIVES] == [p.counts().get(k) for k in COLLECTIVES]


@pytest.mark.matrix
@pytest.mark.skipif(not available(), reason="no C compiler")
def test_generated_kernels():
    p, loss = planned("rows:1", "", 0.3)
    q = fit_memory(p, share_of_arena(p, 0.6), total)
    assert losses(q, loss, "native") == losses(p, loss, "native")


def test_what_is_cheap_goes_first():
    p, _ = planned("rows:1", "")
    little = fit_memory(p, share_of_arena(p, 0.9), total)
    much = fit_memory(p, share_of_arena(p, 0.55), total)
    flops = [predict_cost(x).flops for x in (p, little, much)]
    assert flops[0] <= flops[1] < flops[2] < 2 * flops[0]


def test_a_view_behind_the_first_later_use_is_made_once():
    whole, flat = (LocalType(mm.Shape(s), "float32", ((),) * len(mm.Shape(s))) for s in ("a:64;b:64", "c:4096"))
    program, made = [Instruction(Feed("x"), (), (0,))], {0: whole}

    def add(row: Kind, *inputs: int) -> int:
        made[len(made)] = flat if isinstance(row, View) or made[inputs[0]] == flat else whole
        program.append(Instruction(row, inputs, (len(made) - 1,)))
        return len(made) - 1

    def apply(function: str, *inputs: int) -> int:
        step = Step(function, tuple(f"i{k}" for k in range(len(inputs))), "float32")
        return add(Map(Expr((step,), ("t0",))), *inputs)

    waiting, other = apply("tanh", 0), apply("exp", 0)
    used = apply("multiply", apply("add", other, apply("sin", other)), waiting)
    y = apply("add", apply("exp", add(View(), waiting)), add(View(), used))
    p = Program(mm.MeshShape("rows:1"), made, tuple(program), {}, {"x": whole}, {"y": y})
    q = fit_memory(p, total(p) - made[0].max_bytes(p.mesh), total)
    verify(q)
    assert (q.counts()["map"], q.counts()["view"]) == (p.counts()["map"], p.counts()["view"]), "tanh is only moved"


def test_a_limit_that_is_met_changes_nothing():
    p, _ = planned("rows:1", "")
    assert fit_memory(p, total(p), total) is p


def test_a_limit_out_of_reach_is_refused_with_the_least_memory_there_is():
    graph, loss, updates = language_model()
    with pytest.raises(ConfigError, match=r"needs [0-9,]+ bytes .* the limit is 100,000"):
        mm.plan(graph, "rows:1", fetches=[loss], updates=updates, memory_limit=100_000)


def test_memory_limit_of_compile_and_plan():
    graph, loss, updates = language_model()
    free = mm.plan(graph, "rows:1", fetches=[loss], updates=updates)
    limit = share_of_arena(free.program, 0.8)
    p = mm.plan(graph, "rows:1", fetches=[loss], updates=updates, memory_limit=limit)
    assert p.cost.peak_memory <= limit < free.cost.peak_memory
    step = mm.compile(
        graph,
        mm.SimulatedMesh("rows:1"),
        fetches=[loss],
        updates=updates,
        memory_limit=f"{limit / 2**20} MB",
        kernels="numpy",
    )
    assert step.held_bytes == step.cost.peak_memory <= limit
    assert step.program.digest() == p.program.digest()


@pytest.mark.parametrize("size", ["many", "", -3, "0 GB"])
def test_sizes_that_are_none(size):
    graph, loss, updates = language_model()
    with pytest.raises(ConfigError, match="memory_limit"):
        mm.plan(graph, "rows:1", fetches=[loss], updates=updates, memory_limit=size)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_recomputed_layers(mesh: str, layout: str):
    """Chosen in the model: equal losses, and memory of one layer's inside."""
    found = {}
    for recompute in ("none", "layers"):
        graph, loss, updates = language_model(0.2, recompute=recompute)
        p = mm.plan(graph, mesh, layout, fetches={"loss": loss}, updates=updates).program
        found[recompute] = losses(p, loss), predict_cost(p).memory["arena"]
    np.testing.assert_allclose(found["layers"][0], found["none"][0], rtol=1e-6)
    assert found["layers"][1] < 0.75 * found["none"][1]


@pytest.mark.matrix
def test_recomputed_layers_with_experts_keep_their_losses():
    found = {}
    for recompute in ("none", "layers"):
        graph, loss, updates = language_model(recompute=recompute, experts=2)
        p = mm.plan(graph, "rows:1", fetches={"loss": loss}, updates=updates).program
        found[recompute] = losses(p, loss)
    np.testing.assert_allclose(found["layers"], found["none"], rtol=1e-6)
