"""mm.verify: right layouts pass, seeded mistakes are found, and the right operation is named."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.two_layer.model import Sizes, build
from meshmpi.checking import verify
from meshmpi.checking.layouts import legal_layouts
from meshmpi.kernels.native import available, scalars
from meshmpi.launch.launch import launch
from meshmpi.runtime.simulated_mesh import MEANINGS
from tests import layouts as independent
from tests.mutations.registry import MUTATIONS
from tests.ops.build import UNEVEN
from tests.ops.build import build as build_case
from tests.ops.cases import CASES

for room in ("blocks", "collectives", "lowering", "passes"):
    importlib.import_module(f"tests.mutations.{room}")
ROOT = Path(__file__).parents[2]
MESH = "rows:2;cols:3"
BY_NAME = {c.name: c for c in CASES}


def verified_case(name: str, **options):
    b = build_case(BY_NAME[name], UNEVEN)
    keys = [*b.outputs, *b.gradients.values()]
    options = {"sample": 8, "seed": 11, "warm_steps": 0, "mesh": MESH, **options}
    return verify(b.graph, fetches=keys, updates=b.updates, feeds=b.feeds, **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["float64", "own"])
def test_every_layout_of_the_two_layers_is_right(precision: str):
    b = build(Sizes(6, 5, 7))
    report = verify(b.graph, "all", ["rows:2;cols:2", "all:3"], b.fetches, b.updates, precision=precision)
    assert report.ok, report
    assert len(report.tried) == 19 + 4
    worst = report.largest()
    assert {"einsum", "variable w", "reduce_sum"} <= worst.keys()
    # Something was compared: sums in another order differ, but by less than the bound.
    assert 0 < max(d.ratio for d, _ in worst.values()) < 1
    apart = max(d.apart for d, _ in worst.values())
    assert (1e-17 < apart < 1e-12) if precision == "float64" else (1e-9 < apart < 1e-4)


CHECKED = """
softmax_by_hand einsum_of_three gather top_k random_numbers
rename slots_stored_elsewhere constrained_and_whole swap_of_variables
put_rows cumsum_of_constrained conv_of_a_constrained_value custom_gradient casts
"""


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CHECKED.split())
def test_cases_of_the_table_are_right(name: str):
    for precision in ("float64", "own"):
        report = verified_case(name, sample=4, precision=precision)
        assert report.ok, report
        assert len(report.checks) == 4
        assert all(c.differences for c in report.tried)


# mutation -> (stage, part of the name of the first tensor or of the message)
SEEDED = {
    "all_reduce_runs_over_the_first_axis_only": ("lowering", "einsum"),
    "reduce_scatter_keeps_the_mirrored_block": ("form_reduce_scatter", "constrain"),
    "take_shard_takes_the_first_block": ("lowering", "rename_1"),
    "iota_counts_within_the_block": ("lowering", "range"),
    "random_numbers_start_anew_in_each_block": ("lowering", "random_uniform"),
    "gather_forgets_where_its_block_starts": ("lowering", "gather"),
    "intermediate_products_lose_dims_that_only_operands_need": ("lowering", "einsum_1"),
    "the_first_update_wins": ("lowering", "variable w"),
    "fusion_swaps_the_operands": ("fuse", "exp"),
    "constants_are_subtracted_the_wrong_way_round": ("fold", "subtract"),
    "an_added_number_counts_once_per_rank": ("place_reductions", "reduce_sum_1"),
    "a_summed_out_split_dim_is_forgotten": ("lowering", "einsum made at"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SEEDED)
def test_seeded_mistakes_are_found_and_located(name: str, monkeypatch):
    stage, where = SEEDED[name]
    MUTATIONS[name].put(monkeypatch)
    report = verified_case(MUTATIONS[name].shows_in)
    assert not report.ok
    first = report.wrong[0]
    assert first.stage == stage, first
    if first.first is None:
        assert where in first.error
        return
    assert first.first.tensor == where, first
    assert first.first.source.file.startswith(str(ROOT / "tests/ops"))
    text = Path(first.first.source.file).read_text().splitlines()[first.first.source.line - 1]
    assert "mm." in text or "b." in text, text  # the line of the user that made it
    assert "differ by more than rounding" in str(report)


def test_a_mistake_in_one_layout_leaves_the_others_right(monkeypatch):
    MUTATIONS["all_reduce_runs_over_the_first_axis_only"].put(monkeypatch)
    b = build(Sizes(6, 5, 7))
    report = verify(b.graph, ["batch:rows", "batch:rows+cols", "hidden:cols"], "rows:2;cols:3", b.fetches, b.updates)
    assert [c.ok for c in report.checks] == [True, False, True]
    assert "layout 'batch:rows+cols' on mesh {rows: 2, cols: 3} is WRONG" in str(report)


def whole_and_split() -> tuple[mm.Graph, list[mm.Tensor]]:
    """A sum of whole rows and a product of blocks of them, which share global shapes."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "d:3;b:6")
        z = mm.square(x)
        s = mm.reduce_sum(mm.constrain(x, "b:"), reduced_dim="b")
        y = mm.tanh(z * s)
    return graph, [z, y]


@pytest.mark.skipif(not available(), reason="no C compiler")
def test_values_in_different_blocks_in_one_loop_nest_are_found(monkeypatch):
    """By the verifier; and were its rule missing, too, by running the kernels that a run takes."""
    graph, fetches = whole_and_split()
    report = verify(graph, ["b:r"], "r:2", fetches)
    assert report.ok and report.native, report
    MUTATIONS["fused_kernels_take_equal_global_shapes_for_equal_blocks"].put(monkeypatch)
    refused = verify(graph, ["b:r"], "r:2", fetches, kernels="numpy")
    assert refused.wrong[0].stage == "form_fused_kernels" and "mixes blocks" in refused.wrong[0].error
    MUTATIONS["the_verifier_lets_fused_kernels_mix_blocks"].put(monkeypatch)
    assert verify(graph, ["b:r"], "r:2", fetches, kernels="numpy").ok
    (wrong,) = verify(graph, ["b:r"], "r:2", fetches).wrong
    assert (wrong.stage, wrong.native, wrong.first.tensor) == ("form_fused_kernels", True, "tanh")
    assert "right by NumPy's kernels; by the generated ones" in str(wrong)


@pytest.mark.skipif(not available(), reason="no C compiler")
def test_a_wrong_generated_kernel_is_found_in_the_program_as_lowered(monkeypatch):
    right = scalars.step_source

    def wrong(step, names, dtypes):
        wrong_step = step._replace(function="sigmoid") if step.function == "tanh" else step
        return right(wrong_step, names, dtypes)

    monkeypatch.setattr(scalars, "step_source", wrong)
    graph, fetches = whole_and_split()
    (found,) = verify(graph, ["b:r"], "r:2", fetches).wrong
    assert (found.stage, found.native, found.first.tensor) == ("lowering", True, "tanh")


@pytest.mark.skipif(not available(), reason="no C compiler")
def test_rows_of_bfloat16_in_generated_kernels():
    """What a later stage of a nest reads waits in the row of a result, as bfloat16."""
    with mm.Graph() as graph:
        x = mm.cast(mm.placeholder("x", "rows:5;columns:7"), "bfloat16")
        y = mm.tanh(x)
        z = y * y + x * y * mm.reduce_sum(y * x, reduced_dim="columns")
    report = verify(graph, ["", "rows:r"], "r:2", [z], precision="own")
    assert report.ok and report.native, report


def test_where_no_kernels_can_be_generated_the_report_says_so(monkeypatch):
    monkeypatch.setenv("MESHMPI_CC", "no-such-compiler")
    graph, fetches = whole_and_split()
    report = verify(graph, ["b:r"], "r:2", fetches)
    assert report.ok and not report.native
    assert "Generated kernels were not run: " in str(report)
    with pytest.raises(mm.ConfigError, match="kernels='native' needs a C compiler"):
        verify(graph, ["b:r"], "r:2", fetches, kernels="native")
    with pytest.raises(mm.ConfigError, match="no kernels 'nativ'. Did you mean 'native'"):
        verify(graph, kernels="nativ")


def test_replicas_that_differ_are_found(monkeypatch):
    right = MEANINGS["all_reduce"]

    def wrong(group, by_rank):
        right(group, by_rank)
        by_rank[-1].x[...] *= 1 + 1e-9  # the last rank rounds otherwise

    monkeypatch.setitem(MEANINGS, "all_reduce", wrong)
    b = build(Sizes(6, 5, 7))
    report = verify(b.graph, ["hidden:all"], "all:3", b.fetches, b.updates)
    assert not report.ok
    assert report.wrong[0].first.tensor == "einsum_1"
    assert "on rank 2" in report.wrong[0].first.where


def test_enumeration_agrees_with_an_independent_one():
    b = build(Sizes(6, 5, 7))
    for mesh in ("all:2", "rows:2;cols:3"):
        shape = mm.MeshShape(mesh)
        found = legal_layouts(b.graph, shape)
        assert sorted(found.legal) == sorted(independent.legal_layouts(b.graph, shape))
        assert found.exhausted
        assert found.possible == len(independent.options(shape)) ** 3
    three = legal_layouts(b.graph, mm.MeshShape("a:2;b:2;c:2"))
    assert "batch:c+a+b" in three.legal
    assert "batch:a;io:c;hidden:b" in three.legal
    assert not any(x.count(":a") + x.count("+a") > 1 for x in three.legal)


def test_samples_are_seeded_and_say_what_was_left_out():
    b = build(Sizes(6, 5, 7))
    shape = mm.MeshShape("rows:2;cols:2")
    a, again, other = (legal_layouts(b.graph, shape, 6, seed) for seed in (1, 1, 2))
    assert a.legal == again.legal != other.legal
    assert len(dict.fromkeys(a.legal)) == 6
    assert a.legal[0] == ""
    assert "a sample of 6 of 125" in str(a)
    assert "batch and io (x made at model.py" in str(legal_layouts(b.graph, shape))


def constrained() -> mm.Graph:
    with mm.Graph() as graph:
        x = mm.constrain(mm.placeholder("x", "a:4;b:6"), "a:rows")
        mm.reduce_sum(x)
    return graph


def test_layouts_that_constraints_forbid_are_counted_among_all():
    report = verify(constrained(), "all", "rows:2;cols:2")
    refused = [c.layout for c in report.checks if c.refused]
    assert {"b:rows", "b:rows+cols"} <= {*refused}
    assert report.ok and len(report.tried) > 3
    want = f"{len(refused)} illegal: tensor [a=4, b=6] would be split twice over mesh axis 'rows'"
    assert want in str(report)


@pytest.mark.parametrize("layouts", ["b:rows", ["b:rows", "b:cols"], ["b:cols", "b:zz"]])
def test_a_named_layout_that_is_illegal_is_a_mistake(layouts):
    report = verify(constrained(), layouts, "rows:2;cols:2")
    assert not report.ok
    (illegal,) = report.wrong
    assert illegal.layout == ("b:zz" if "b:zz" in layouts else "b:rows")
    assert illegal.refused and illegal.remedy and not illegal.differences
    text = str(report)
    assert f"layout '{illegal.layout}' on mesh {{rows: 2, cols: 2}} is illegal: " in text
    assert illegal.refused in text and illegal.remedy in text
    if isinstance(layouts, list):  # the other one is verified all the same
        assert text.startswith("1 layout computes what one rank does, in float64")
    else:
        assert text.startswith("No layout was tried: nothing is verified.\n")


def test_where_nothing_was_tried_nothing_is_right():
    for layouts, mesh in (([], MESH), ("all", [])):
        report = verify(constrained(), layouts, mesh)
        assert not report.ok and report.checks == []
        assert str(report).startswith("No layout was tried")
    with pytest.raises(mm.ConfigError, match="a sample of 0 layouts verifies nothing"):
        verify(constrained(), sample=0)


def test_feeds_are_made_where_none_are_given():
    with mm.Graph() as graph:
        table = mm.get_variable("table", "vocab:5;d:3")
        tokens = mm.placeholder("tokens", "batch:4;length:6", "int32")
        mm.gather(table, tokens, "vocab")
    from meshmpi.checking.feeds import random_feeds

    fed = random_feeds(graph)["tokens"]
    assert fed.shape == (4, 6)
    assert fed.dtype == np.int32
    assert fed.min() == 0 and fed.max() == 4
    assert verify(graph, sample=5, mesh=MESH).ok


def test_what_it_cannot_do_is_said():
    b = build(Sizes(6, 5, 7))
    with pytest.raises(mm.ConfigError, match="precision is 'float64' or 'own'"):
        verify(b.graph, precision="double")
    with pytest.raises(mm.FeedError, match="'t'"):
        verify(b.graph, [""], "all:2", b.fetches, b.updates, feeds={"x": np.zeros((6, 5))})
    with pytest.raises(mm.MeshError, match="needs 4 ranks"):
        verify(b.graph, [""], "all:4", b.fetches, b.updates, ranks="mpi")


@pytest.mark.quick(1)
@pytest.mark.parametrize("broken", [False, True])
def test_real_ranks(broken: bool):
    program = ["-m", "tests.checking.mpi_verify", *(["broken"] if broken else [])]
    done = launch(4, program, timeout_seconds=120, capture_output=True, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    if broken:
        assert "batch:rows" in done.stdout
        assert "einsum_3 (gradient of einsum_1) made at" in done.stdout
        assert "on rank 3" in done.stdout
    else:
        assert "6 layouts compute what one rank does" in done.stdout
