"""Predicted times: each kind of instruction against a machine whose numbers are simple."""

from typing import Any

import pytest

import meshmpi as mm
from meshmpi.compiler.cost import Cost
from meshmpi.errors import LayoutError
from meshmpi.ir.program import AxesTable
from meshmpi.planner import report
from meshmpi.planner.machine import Curve, Network, ProductRates, axes_between_hosts, operations_from
from meshmpi.planner.memory_use import KINDS, gradient_values, memory_use
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.compiled import memory_plan
from tests.layouts import legal_layouts
from tests.ops.build import EVEN, Case, build
from tests.ops.cases import CASES
from tests.ops.run import fetched
from tests.planner.build import machine as simple_machine
from tests.planner.build import small_lm

GEMM, BANDWIDTH, SIMPLE, CALL = 1e9, 1e8, 1e-9, 1e-7


def machine(**changes):
    values = {"products": {"float32": ProductRates.constant(GEMM)}, "memory": Curve(((1.0, BANDWIDTH),)), "call": CALL}
    values |= {"operations": operations_from(SIMPLE), "networks": {"": Network(1e-5, 1e6)}}
    return simple_machine(**values | changes)


def planned(build, mesh="", layout=""):
    with mm.Graph() as graph:
        fetched = build()
    return mm.plan(graph, mesh, layout, fetches=[fetched]).program


def seconds(program, kind, **changes):
    return sum(t.seconds for t in predict_time(program, machine(**changes)).timings if t.instruction.kind == kind)


def product():
    x, w = mm.placeholder("x", "m:8;k:16"), mm.placeholder("w", "k:16;n:4")
    return mm.einsum([x, w], "m:8;n:4")


def test_a_product_takes_its_flop_over_the_rate():
    assert seconds(planned(product), "contract") == pytest.approx(2 * 8 * 16 * 4 / GEMM + CALL)


def test_a_split_product_is_shorter_and_its_sum_is_sent():
    program = planned(product, "all:4", "k:all")
    assert seconds(program, "contract") == pytest.approx(2 * 8 * 4 * 4 / GEMM + CALL)
    wanted = Network(1e-5, 1e6).seconds("all_reduce", 8 * 4 * 4, 4)
    assert seconds(program, "all_reduce") == pytest.approx(wanted + CALL)


def test_ranks_wait_for_one_another_by_what_they_computed_since_they_last_met():
    def build():
        x, w = mm.placeholder("x", "m:8;k:16"), mm.placeholder("w", "k:16;n:4")
        y = mm.einsum([x, w], "m:8;n:4")
        return mm.einsum([mm.square(y), w], "m:8;k:16")

    program = planned(build, "all:4", "k:all")
    waits = Curve(((1e-9, 1e-3), (1.0, 1e-3)))
    sent = seconds(program, "all_reduce")
    assert seconds(program, "all_reduce", waits=waits) == pytest.approx(sent + 1e-3)
    assert machine(waits=Curve(((1.0, 0.2), (4.0, 0.8)))).wait(2.0) == pytest.approx(0.4)
    assert machine(waits=waits).wait(0.0) == machine().wait(2.0) == 0.0
    assert machine(waits=Curve(((1.0, 0.2), (4.0, 0.8)))).wait(0.5) == pytest.approx(0.1)
    alone = planned(build, "all:1", "k:all")
    assert seconds(alone, "all_reduce", waits=waits) == seconds(alone, "all_reduce")


def test_a_matrix_times_a_vector_takes_the_time_to_read_the_matrix():
    def build():
        x, w = mm.placeholder("x", "k:64"), mm.placeholder("w", "k:64;n:32")
        return mm.einsum([x, w], "n:32")

    assert seconds(planned(build), "contract") == pytest.approx(4 * 64 * 32 / BANDWIDTH + CALL)


def test_a_map_is_bound_by_memory_or_by_its_functions():
    program = planned(lambda: mm.add(*(mm.placeholder(n, "n:1000") for n in "xy")))
    assert seconds(program, "map") == pytest.approx(3 * 4 * 1000 / BANDWIDTH + CALL)
    found = predict_time(program, machine(memory=Curve(((1.0, 1e15),))))
    assert [t.bound for t in found.timings] == ["compute"]
    assert found.seconds == pytest.approx(1000 * SIMPLE + CALL)


def test_reductions_in_the_background_cost_what_is_waited_for():
    """Started early, half of the reduction is hidden behind the product in between."""
    graph, fetches, updates = small_lm(vocab=4096)
    shown, hidden = (
        mm.plan(graph, "all:2", "batch:all", fetches=fetches, updates=updates, overlap=o).program for o in (False, True)
    )
    started = [i for i in hidden.instructions if i.in_background]
    assert started
    fast = {"": Network(1e-12, 1e12)}
    assert seconds(hidden, "wait", networks=fast) == 0.0
    slow = {"": Network(1e-12, 1e3)}
    before, after = (predict_time(p, machine(networks=slow)).seconds for p in (shown, hidden))
    between = after - predict_time(hidden, machine(networks=fast)).seconds
    # What hides is at most what is computed; the line carries one reduction after the other.
    computed = predict_time(shown, machine(networks=fast)).seconds
    assert before - computed <= after < before
    assert between > 0


@pytest.mark.parametrize("layout", ["batch:all", "heads:all;d_ff:all;vocab:all", "length:all"])
def test_tables_of_a_prediction_add_up(layout):
    graph, fetches, updates = small_lm()
    program = mm.plan(graph, "all:2", layout, fetches=fetches, updates=updates).program
    found = predict_time(program, machine(step=1e-3))
    for table in (found.by_kind(), found.by_bound()):
        assert sum(table.values()) + 1e-3 == pytest.approx(found.seconds)
    assert sum(found.by_axes().values()) <= found.by_bound()["network"] + 1e-12
    assert 0 < found.efficiency < 1
    assert any("by kind" in line for line in report.time_lines(found))


@pytest.mark.parametrize("mesh, layout", [("", ""), ("all:2", "batch:all"), ("all:3", "d_ff:all")])
def test_memory_by_kind_adds_up_to_the_plan(mesh, layout):
    graph, fetches, updates = small_lm()
    found = mm.plan(graph, mesh, layout, fetches=fetches, updates=updates)
    plan = memory_plan(found.program)
    kinds = memory_use(found.program, plan).at_peak
    assert tuple(kinds) == (*KINDS, "gaps", "workspace") and min(kinds.values()) >= 0
    assert sum(kinds.values()) == plan.total_bytes == found.cost.peak_memory
    assert kinds["slots"] > kinds["parameters"] > 0 and kinds["activations"] > 0
    assert "the peak is while" in report.memory_lines(found.program, plan)[1]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_operation_has_a_prediction(case: Case):
    """Whatever a program holds: its time, its memory and its traffic can be told."""
    built = build(case, EVEN)
    wanted = {"fetches": fetched(built, False), "updates": built.updates}
    layouts = legal_layouts(built.graph, mm.MeshShape("rows:2;cols:3"), 3)[1:]
    for layout, overlap in zip(layouts, (False, True), strict=False):
        try:
            found = mm.plan(built.graph, "rows:2;cols:3", layout, overlap=overlap, **wanted)
        except LayoutError:
            continue
        known = predict_time(found.program, machine())
        assert known.seconds == pytest.approx(sum(known.by_kind().values()))
        told = [*report.time_lines(known), *report.traffic_lines(found.program)]
        told += report.memory_lines(found.program, memory_plan(found.program))
        assert all(isinstance(line, str) for line in told)


@pytest.mark.parametrize("options", [{"rotary": True}, {"microbatches": 2}])
def test_language_models_have_a_prediction(options: dict[str, Any]):
    graph, fetches, updates = small_lm(**options)
    program = mm.plan(graph, "all:2", "batch:all", fetches=fetches, updates=updates).program
    assert any(i.kind == "slice" and i.attrs.start for i in program.instructions)
    assert predict_time(program, machine()).seconds > 0


def test_gradients_are_what_becomes_updates():
    graph, fetches, updates = small_lm()
    program = mm.plan(graph, "", "", fetches=fetches, updates=updates).program
    found = gradient_values(program)
    made = {v: i.kind for i in program.instructions for v in i.outputs}
    assert {"contract", "scatter_add"} <= {made[v] for v in found}
    assert "feed" not in {made[v] for v in found}


def test_bytes_by_scope_add_up_to_the_cost():
    graph, fetches, updates = small_lm()
    found = mm.plan(graph, "rows:2;cols:2", "batch:rows;d_ff:cols", fetches=fetches, updates=updates)
    table = report.sent_by_scope(found.program)
    assert sum(sent for _, sent in table.values()) == found.cost.bytes_sent > 0
    assert list(table.values()) == sorted(table.values(), key=lambda row: -row[1])
    assert all(__file__.split("/")[-1] in key[3] or ".py:" in key[3] for key in table)
    assert len(report.traffic_lines(found.program, 1)) == 2  # the first, and how much more


def test_rows_put_in_place_cost_their_own_bytes():
    def cache(fetched):
        with mm.Graph() as graph:
            x, rows = mm.get_variable("x", "n:4096;k:64"), mm.placeholder("rows", "m:4;k:64")
            at = mm.placeholder("at", "m:4", "int32")
            new = mm.put(x, rows, at, "n")
            kept = [x] if fetched else []
            program = mm.plan(graph, "", "", fetches=kept, updates=[mm.assign(x, new)]).program
        return seconds(program, "put")

    assert cache(False) == pytest.approx(4 * 64 * 4 * (0.75 + 0.75) / BANDWIDTH + CALL, rel=0.05)
    assert cache(True) > 4096 * 64 * 4 / BANDWIDTH  # another reads the old value: it is copied


@pytest.mark.parametrize("dtype, peak", [("float32", GEMM), ("bfloat16", 4 * GEMM)])
def test_the_peak_is_that_of_the_types_that_are_multiplied(dtype, peak):
    rates = {"float32": ProductRates.constant(GEMM), "bfloat16": ProductRates.constant(4 * GEMM)}

    def build():
        x, w = mm.placeholder("x", "m:64;k:64", dtype), mm.placeholder("w", "k:64;n:64", dtype)
        return mm.einsum([x, w], "m:64;n:64")

    found = predict_time(planned(build), machine(products=rates, memory=Curve(((1.0, 1e15),))))
    assert found.peak == peak
    assert found.efficiency == pytest.approx(1.0, rel=0.01)


def test_axes_that_cross_the_network_are_named_and_the_heavier_one_is_warned_of():
    cost = Cost(0, {"all_reduce": AxesTable({"rows": 4_000_000, "cols": 1000, "rows+cols": 500})}, {})
    mesh = mm.MeshShape("rows:2;cols:2")
    assert report.network_lines(cost, mesh, ()) == []
    first, warning = report.network_lines(cost, mesh, axes_between_hosts(mesh, 2))
    assert first.startswith("between hosts: rows (") and first.endswith("inside a host: cols")
    assert "axis rows sends more than cols" in warning and "mesh 'cols:2;rows:2'" in warning
    (only,) = report.network_lines(cost, mm.MeshShape("cols:2;rows:2"), ("cols",))
    assert "inside a host: rows" in only
    assert len(report.network_lines(cost, mesh, axes_between_hosts(mesh, 1))) == 1  # nothing is inside
