"""Passes: none changes a result, none costs bytes, each does what it is for."""

from __future__ import annotations

import gc
from fractions import Fraction

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes.clean import cse, dce
from meshmpi.compiler.passes.fold import fold
from meshmpi.compiler.passes.messages import combine
from meshmpi.compiler.passes.pipeline import PASSES, optimize
from meshmpi.compiler.passes.reductions import passes_through, place_reductions
from meshmpi.errors import LayoutError
from meshmpi.ir.kinds import COLLECTIVES, wire_bytes
from meshmpi.ir.program import Program
from meshmpi.ir.verify import verify
from meshmpi.runtime.compiled import CompiledStep
from tests.layouts import legal_layouts
from tests.ops.build import UNEVEN, Built, build
from tests.ops.cases import CASES
from tests.ops.run import SEED, compare, expected, fetched, result_array
from tests.passes.hand import MESH, Hand, t

SHAPE = mm.MeshShape("rows:2;cols:3")
RICH = [
    "sum_of_two_products",
    "two_layer_network",
    "attention_by_hand",
    "sgd_by_hand",
    "stored_elsewhere",
    "slots_stored_elsewhere",
    "constrained_and_released",
    "softmax_by_hand",
    "second_derivatives",
    "reduction_feeds_map_and_reduction",
    "embedding_used_twice",
    "updates_read_old_values",
]
"""Cases whose programs every pass has something to do in."""


def case(name: str):
    return next(c for c in CASES if c.name == name)


def bytes_moved(p: Program) -> Fraction:
    """Bytes one rank sends by the ring formulas, without rounding to whole bytes per message."""
    total = Fraction(0)
    for i in p.instructions:
        if i.kind in COLLECTIVES:
            n = p.mesh.count(i.attrs.axes)
            share = {"all_reduce": Fraction(2 * (n - 1), n), "all_gather": Fraction(n - 1)}
            elements = sum(p.types[v].max_elements(p.mesh) for v in i.inputs)
            item = wire_bytes(i.kind, p.types[i.inputs[0]].dtype)
            total += share.get(i.kind, Fraction(n - 1, n)) * elements * item
    return total


def lowered(built: Built, layout: str) -> Program | None:
    try:
        return mm.plan(
            built.graph, SHAPE, layout, fetches=fetched(built, False), updates=built.updates, optimize=False, seed=SEED
        ).program
    except LayoutError:
        assert built.case.refuses
        return None


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", RICH)
def test_the_program_is_right_after_every_pass(name: str):
    built = build(case(name), UNEVEN)
    want = expected(built)[0]
    mesh = mm.SimulatedMesh(SHAPE)
    for layout in legal_layouts(built.graph, SHAPE, 4)[1:]:
        p = lowered(built, layout)
        if p is None:
            continue
        for one in PASSES:
            p = one(p)
            verify(p)
            named = {x.name: x for x in fetched(built, False)}
            step = CompiledStep(p, mesh, named, None, "numpy")
            got = step({n: a for n, a in built.feeds.items() if n in p.feeds})
            for x, value in want.fetches.items():
                what = f"{name} '{layout}' after {one.__name__}: {x.name}"
                compare(result_array(got[x]), value, x.dtype, built.case.tolerance, what)


def _always_deferred(p: Program) -> Fraction:
    """Bytes when every sum stays pending for as long as it may."""
    pending: dict[int, tuple[str, ...]] = {}
    finished: dict[int, tuple[str, ...]] = {}
    kept = list(p.fetches.values())
    total = bytes_moved(p)
    for i in p.instructions:
        is_sum = i.kind == "all_reduce" and i.attrs.op == "sum"
        if is_sum and i.inputs[0] not in pending:
            total -= _reduction_bytes(p, i.inputs[0], i.attrs.axes)
            pending[i.outputs[0]] = i.attrs.axes
            continue
        mine = [v for v in i.inputs if v in pending]
        axes = pending[mine[0]] if mine else ()
        if mine and all(pending[v] == axes for v in mine) and passes_through(p, i, mine, axes):
            pending.update(dict.fromkeys(i.outputs, axes))
        else:
            finished.update((v, pending[v]) for v in mine)
    finished.update((v, pending[v]) for v in kept if v in pending)
    return total + sum(_reduction_bytes(p, v, axes) for v, axes in finished.items())


def _reduction_bytes(p: Program, v: int, axes: tuple[str, ...]) -> Fraction:
    n = p.mesh.count(axes)
    return Fraction(2 * (n - 1), n) * p.types[v].max_bytes(p.mesh)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [c.name for c in CASES if c.gradients])
def test_bytes_never_exceed_the_better_of_always_and_never_deferring(name: str):
    built = build(case(name), UNEVEN)
    for layout in legal_layouts(built.graph, SHAPE, 4):
        p = lowered(built, layout)
        if p is None:
            continue
        clean = cse(fold(dce(p)))
        placed, best = bytes_moved(place_reductions(clean)), bytes_moved(optimize(p))
        never, always = bytes_moved(clean), _always_deferred(clean)
        assert placed <= min(never, always), f"{name} '{layout}': {placed}, {never=}, {always=}"
        assert best <= placed, f"{name} '{layout}'"


def test_deferring_or_not_is_chosen_by_cost():
    """[a] summed to a scalar is best finished late; a scalar spread over [a, b] at once."""
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "a:8;u:4"), mm.placeholder("w", "u:4")
        late = mm.reduce_sum(mm.einsum([x, w], "a:8") * 3.0)
        early = mm.broadcast(mm.einsum([w, w], []), "a:8;b:8") * 2.0
    p = mm.plan(graph, "rows:2", "u:rows", fetches=[late]).program
    assert p.values()["all_reduce"] == {"rows": 1}
    p = mm.plan(graph, "rows:2", "u:rows", fetches=[early]).program
    assert p.values()["all_reduce"] == {"rows": 1}
    assert mm.plan(graph, "rows:2", "u:rows", fetches=[late], optimize=False).program.values()["all_reduce"] == {
        "rows": 8
    }


def test_two_sums_that_meet_are_reduced_once():
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "a:8;u:4"), mm.placeholder("w", "u:4;c:4")
        y = x @ w + 2.0 * (mm.tanh(x) @ w) - mm.einsum([x, w, w], "a:8;c:4")
    p = mm.plan(graph, "rows:2", "u:rows", fetches=[y]).program
    assert p.counts()["all_reduce"] == 1 and p.values()["all_reduce"] == {"rows": 32}


def test_a_sum_that_is_then_split_is_reduce_scattered():
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "a:8;u:4"), mm.placeholder("w", "u:4;c:6")
        y = mm.tanh(mm.constrain((x @ w) * 2.0, "a:rows"))
    p = mm.plan(graph, "rows:2", "u:rows", fetches=[y]).program
    assert "all_reduce" not in p.counts() and "take_shard" not in p.counts()
    assert p.values() == {"reduce_scatter": {"rows": 48}}


def test_a_sum_whose_block_several_use_is_reduce_scattered():
    """Taking blocks before maps makes one take_shard for each map; they are the same block."""
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "a:8;u:4"), mm.placeholder("w", "u:4;c:6")
        y = x @ w
        ys = [mm.constrain(f(y), "a:rows") for f in (mm.tanh, mm.exp, mm.square)]
    p = mm.plan(graph, "rows:2", "u:rows", fetches=ys).program
    assert "all_reduce" not in p.counts() and "take_shard" not in p.counts()
    assert p.values() == {"reduce_scatter": {"rows": 48}}


def test_zero_storage_gathers_weights_and_scatters_gradients():
    with mm.Graph() as graph:
        x, w = (mm.placeholder("x", "batch:8;io:4"), mm.get_variable("w", "io:4;hidden:6", storage="io:rows"))
        loss = mm.reduce_sum(mm.square(x @ w))
        updates = mm.optimize.Adam(0.1).minimize(loss)
    p = mm.plan(graph, "rows:2", "batch:rows", fetches=[loss], updates=updates).program
    assert p.values()["all_gather"] == {"rows": 12}
    assert p.values()["reduce_scatter"] == {"rows": 24}
    assert p.values()["all_reduce"] == {"rows": 1}
    assert all(v.type.split("io") == ("rows",) for n, v in p.variables.items() if "w" in n.split("/"))


def test_small_reductions_travel_together_and_keep_their_order():
    h = Hand()
    sums = [h.pending(dims, "cols") for dims in ("a", "b", "a b")]
    done = [
        h.add("all_reduce", [v], t(d), axes=("cols",), op="sum") for v, d in zip(sums, ("a", "b", "a b"), strict=True)
    ]
    used = h.map("negative", [done[0]], t("a"))
    other = h.add("all_reduce", [h.pending("a", "rows")], t("a"), axes=("rows",), op="sum")
    h.fetches.update(x=used, y=done[1], z=done[2], o=other)
    p = combine(h.program())
    verify(p)
    together = [i for i in p.instructions if i.kind == "all_reduce"]
    assert [len(i.inputs) for i in together] == [3, 1]
    assert bytes_moved(p) == bytes_moved(h.program())


def test_reductions_over_axes_of_one_rank_are_not_copied_into_one():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;a:3;b:5")
        fetches = [mm.reduce_sum(x, reduced_dim=d) for d in (["batch", "a"], ["batch", "b"])]

    def inputs(mesh):
        program = mm.plan(graph, mesh, "batch:all", fetches=fetches).program
        return [len(i.inputs) for i in program.instructions if i.kind == "all_reduce"]

    assert inputs("all:2") == [2] and inputs("all:1") == [1, 1]


def test_dead_and_repeated_code_goes():
    h = Hand()
    x = h.feed("x", t("a/rows b"))
    unused = h.map("negative", [x], t("a/rows b"))
    first, second = (h.map("square", [x], t("a/rows b")) for _ in range(2))
    h.fetches["y"] = h.map("add", [first, second], t("a/rows b"))
    p = cse(dce(h.program()))
    verify(p)
    assert p.counts() == {"feed": 1, "map": 2} and unused not in p.types
    assert p.mesh == MESH


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_is_as_the_user_had_it(on: bool):
    with mm.Graph() as graph:
        y = mm.placeholder("x", "a:8;b:8") * 2.0
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        mm.plan(graph, "rows:2", "a:rows", fetches=[y])
        assert gc.isenabled() == on
        with pytest.raises(LayoutError):
            mm.plan(graph, "rows:2", "a:rows;b:rows", fetches=[y])
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_random_numbers_of_two_names_are_not_merged():
    with mm.Graph() as graph:
        y = mm.random_uniform("a:8") - mm.random_uniform("a:8")
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), "a:rows", fetches=[y], seed=3)
    assert np.all(step()[y].numpy() != 0)


@pytest.mark.parametrize("name", RICH)
def test_optimising_again_gains_nothing(name: str):
    built = build(case(name), UNEVEN)
    for layout in legal_layouts(built.graph, SHAPE, 4)[1:]:
        p = lowered(built, layout)
        if p is not None:
            once = optimize(p)
            assert bytes_moved(optimize(dce(p))) == bytes_moved(once)
            assert optimize(p).text() == once.text()
