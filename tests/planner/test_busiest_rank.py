"""Costs are those of the busiest rank: causal attention, bands and borders; and cheap for many."""

from __future__ import annotations

import pytest

import meshmpi as mm
from meshmpi.api import Plan
from meshmpi.ir import flops
from meshmpi.runtime.compiled import CompiledStep
from tests.planner.test_timing import machine

BANDS = {
    "causal": mm.Band.causal("length", "memory"),
    "later": mm.Band("length", "memory", most=-1),
    "near": mm.Band.local("length", "memory", 40),
}


def attention(band: mm.Band, mesh: str, layout: str, length: int = 514) -> tuple[Plan, dict]:
    """Loops over 1 MB of scores and more, of uneven blocks; fetches gradients."""
    with mm.Graph() as graph:
        q = mm.placeholder("q", f"batch:2;heads:4;length:{length};d:8")
        k, v = (mm.placeholder(n, f"batch:2;heads:4;memory:{length};d:8") for n in "kv")
        y = mm.dot_product_attention(q, k, v, "memory", "d", "d", band=band)
        loss = mm.reduce_sum(mm.square(y))
        found = [loss, *mm.gradients([loss], [q, k, v])]
        fetches = {f"f{n}": t for n, t in enumerate(found)}
    return mm.plan(graph, mesh, layout, fetches=fetches), fetches


def convolution(mesh: str) -> tuple[Plan, dict]:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;height:13;width:9;io:3")
        fetches = {"y": mm.conv2d(x, mm.Dimension("o", 4))}
    return mm.plan(graph, mesh, "height:rows", fetches=fetches), fetches


CASES = {
    **{
        f"{n} {mesh}": lambda n=n, mesh=mesh: attention(BANDS[n], mesh, "length:rows")
        for n in BANDS
        for mesh in ("rows:2", "rows:3")
    },
    "memory": lambda: attention(BANDS["causal"], "rows:3", "memory:rows"),
    "both": lambda: attention(BANDS["causal"], "rows:2;cols:2", "length:rows;memory:cols"),
    "two axes": lambda: attention(BANDS["causal"], "rows:2;cols:3", "length:rows+cols;batch:"),
    "batch": lambda: attention(BANDS["causal"], "rows:2", "batch:rows"),
    "convolution": lambda: convolution("rows:4"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CASES)
def test_the_cost_is_that_of_the_busiest_rank_and_exact_on_every_one(name: str):
    plan, fetches = CASES[name]()
    step = CompiledStep(plan.program, mm.SimulatedMesh(plan.program.mesh), fetches, None, "numpy")
    counted = [sum(s.flops_by_kind().values()) for s in step.executor.states]
    assert counted == [step.cost_of(r).flops for r in range(len(counted))]
    assert counted == [plan.cost_of(r).flops for r in range(len(counted))]
    assert plan.cost.flops == step.cost.flops == max(counted)
    sent = [plan.cost_of(r).bytes_sent for r in range(len(counted))]
    assert plan.cost.bytes_sent >= max(sent)


def test_the_first_rank_of_a_causal_attention_has_least_to_do():
    plan, _ = CASES["causal rows:2"]()
    assert any(i.attrs.band is not None for i in plan.program.instructions if i.kind == "tiled")
    assert plan.cost_of(1).flops == plan.cost.flops > 1.5 * plan.cost_of(0).flops


def test_the_time_is_that_of_the_busiest_rank(monkeypatch):
    plan, _ = CASES["causal rows:2"]()
    longest = mm.predict_time(plan.program, machine())
    assert longest.flops == plan.cost.flops
    monkeypatch.setattr("meshmpi.planner.timing.busiest_rank", lambda program: {"rows": 0})
    assert mm.predict_time(plan.program, machine()).seconds < longest.seconds


def test_many_ranks_are_not_looked_at_one_by_one(monkeypatch):
    """Layers of one form and places that tell no difference are priced once."""
    calls: list[str] = []
    right = flops.local_flops

    def counting(i, program, coordinates=None):
        calls.append(i.kind)
        return right(i, program, coordinates)

    length = 16 * 4096
    with mm.Graph() as graph:
        first = x = mm.placeholder("x", f"batch:4;length:{length};d_model:8")
        for n in range(4):
            heads, d_kv = mm.Dimension("heads", 2), mm.Dimension("d_kv", 4)
            x = mm.multihead_attention(x, None, None, d_kv, heads, causal=True, name=f"layer_{n}")
        found = mm.gradients([mm.reduce_sum(mm.square(x))], [first])
    plan = mm.plan(graph, "data:4;rows:4096", "batch:data;length:rows", fetches=found)
    loops = [i for i in plan.program.instructions if i.kind == "tiled"]
    assert len(loops) >= 8
    monkeypatch.setattr(flops, "local_flops", counting)
    at = flops.busiest_rank(plan.program)
    assert at["data"] == 0 and at["rows"] > 4000
    assert calls.count("tiled") <= 5 * 4, calls.count("tiled")
