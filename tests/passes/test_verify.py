"""verify() refuses every kind of broken program: one row per rule of the instruction set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshmpi.compiler.passes.pipeline import optimize
from meshmpi.dims import MeshShape
from meshmpi.errors import MeshError, ProgramError
from meshmpi.ir.kinds.functions import ArrayType, Function
from meshmpi.ir.program import LocalType, Program
from meshmpi.ir.scalar import Expr, Step, call
from meshmpi.ir.verify import Proven, verify
from tests.passes import exchange_rows, local_rows, scan_rows, tiled_rows
from tests.passes.hand import Hand, t

Row = Callable[[Hand], object]


def test_right_programs_pass():
    h = Hand()
    x, w = h.feed("x", t("a/rows b/cols")), h.variable("w", t("b/cols c"))
    y = h.add("contract", [x, w], t("a/rows c", "cols"))
    y = h.map("negative", [y], t("a/rows c", "cols"))
    z = h.add("all_reduce", [y], t("a/rows c"), axes=("cols",), op="sum")
    s = h.add("take_shard", [z], t("a/rows c/cols"), dim="c", axes=("cols",))
    g = h.add("all_gather", [s], t("a c/cols"), dim="a", axes=("rows",))
    v = h.map("square", [w], t("b/cols c"))
    h.add("write", [v], variable="w")
    h.fetches["g"] = g
    verify(h.program())


def _x(h: Hand) -> int:
    return h.feed("x", t("a/rows b"))


def _tape(*steps: Step, results: tuple[str, ...] = ("t0",)) -> Expr:
    return Expr(steps, results)


def _declared(takes: str, makes: str) -> Function:
    """A function of one array with dims of one letter."""
    array = [ArrayType(tuple(names), t(" ".join(names)).dtype) for names in (takes, makes)]
    return Function("f", lambda x: x, (array[0],), (array[1],))


def _function(h: Hand, x: LocalType, y: LocalType, makes: str = "ab") -> int:
    return h.add("local_function", [h.feed("x", x)], y, function=_declared("ab", makes), batch_dims=("a",))


ROWS: dict[str, tuple[Row, str]] = {
    # wiring
    "an unknown kind": (lambda h: h.add("teleport", [_x(h)], t("a/rows b")), "not in the instruction set"),
    "a value used before it is made": (lambda h: h.map("negative", [7], t("a")), "before it is made"),
    "one axis for two dims": (lambda h: h.feed("x", t("a/rows b/rows")), "uses a mesh axis twice"),
    "an axis both split and pending": (
        lambda h: h.map("negative", [_x(h)], t("a/rows b", "rows")),
        "uses a mesh axis twice",
    ),
    "pending axes out of order": (
        lambda h: h.map("negative", [h.pending("a", "cols")], t("a", "cols+rows")),
        "malformed pending",
    ),
    "an unknown reduction": (
        lambda h: h.map("negative", [h.pending("a", "cols")], t("a", "cols", "mean")),
        "malformed pending",
    ),
    # sources and variables
    "a feed of another type": (
        lambda h: (h.feed("x", t("a/rows b")), h.add("feed", [], t("a b"), name="x")),
        "type of the feed",
    ),
    "a read in another layout": (
        lambda h: (h.variable("w", t("b")), h.add("read", [], t("b/rows"), variable="w")),
        "stored type",
    ),
    "a write in another layout": (
        lambda h: (h.variable("w", t("a b")), h.add("write", [_x(h)], variable="w")),
        "stored type",
    ),
    "a read after the write": (
        lambda h: (
            w := h.variable("w", t("a")),
            h.add("write", [h.map("negative", [w], t("a"))], variable="w"),
            h.add("read", [], t("a"), variable="w"),
        ),
        "reads what the step has written",
    ),
    "an old value used after the write": (
        lambda h: (
            w := h.variable("w", t("a")),
            h.add("write", [h.map("negative", [w], t("a"))], variable="w"),
            h.map("square", [w], t("a")),
        ),
        "'w' after its write",
    ),
    "two writes of one variable": (
        lambda h: (
            v := h.map("negative", [h.variable("w", t("a"))], t("a")),
            h.add("write", [v], variable="w"),
            h.add("write", [v], variable="w"),
        ),
        "twice",
    ),
    "a step with dims": (lambda h: h.add("step", [], t("a", dtype="int32")), "int32 without dims"),
    "an iota of another dim": (lambda h: h.add("iota", [], t("a", dtype="int32"), dim="b"), "of its dim"),
    # map
    "a map whose input is split otherwise": (lambda h: h.map("negative", [_x(h)], t("a b")), "'a' is not the same"),
    "a map that makes another type": (
        lambda h: h.add("map", [_x(h)], t("a/rows b", dtype="float64"), expr=call("negative", 1, "float32")),
        "another data type",
    ),
    "a map with too few results": (
        lambda h: h.add("map", [_x(h)], t("a/rows b"), t("a/rows b"), expr=call("negative", 1, "float32")),
        "one result per output",
    ),
    "an expression with an unknown function": (
        lambda h: h.add("map", [_x(h)], t("a/rows b"), expr=_tape(Step("frobnicate", ("i0",), "float32"))),
        "unknown function",
    ),
    "an expression that miscounts": (
        lambda h: h.add("map", [_x(h)], t("a/rows b"), expr=_tape(Step("add", ("i0",), "float32"))),
        "miscounts",
    ),
    "an expression that uses what comes later": (
        lambda h: h.add("map", [_x(h)], t("a/rows b"), expr=_tape(Step("add", ("i0", "t1"), "float32"))),
        "undefined reference",
    ),
    "a map that is not linear in a pending sum": (
        lambda h: h.map("square", [h.pending("a", "cols")], t("a", "cols")),
        "not linear",
    ),
    "a number added to a pending sum": (
        lambda h: h.add(
            "map", [h.pending("a", "cols")], t("a", "cols"), expr=_tape(Step("add", ("i0", 1.0), "float32"))
        ),
        "not linear",
    ),
    "a finished value added to a pending sum": (
        lambda h: h.map("add", [h.pending("a", "cols"), h.feed("y", t("a"))], t("a", "cols")),
        "not linear",
    ),
    "a product of two pending sums": (
        lambda h: h.map("multiply", [h.pending("a", "cols"), h.pending("a", "cols")], t("a", "cols")),
        "not linear",
    ),
    "sums pending over different axes added": (
        lambda h: h.map("add", [h.pending("a", "cols"), h.pending("a", "rows")], t("a", "cols")),
        "mixes",
    ),
    "a map that forgets what is pending": (lambda h: h.map("negative", [h.pending("a", "cols")], t("a")), "mixes"),
    # reduce and contract
    "a reduced split dim without a pending sum": (
        lambda h: h.add("reduce", [_x(h)], t("b"), op="sum"),
        "must leave a reduction pending",
    ),
    "a max left pending as a sum": (
        lambda h: h.add("reduce", [_x(h)], t("b", "rows"), op="max"),
        "must leave max pending",
    ),
    "a max over a pending sum": (
        lambda h: h.add("reduce", [h.pending("a b", "cols")], t("a", "cols"), op="max"),
        "unfinished",
    ),
    "a reduction that changes a kept dim": (
        lambda h: h.add("reduce", [_x(h)], t("a"), op="sum"),
        "'a' is not the same",
    ),
    "a contraction of one operand": (lambda h: h.add("contract", [_x(h)], t("a/rows")), "two operands"),
    "a contraction of operands split differently": (
        lambda h: h.add("contract", [_x(h), h.feed("y", t("b/cols c"))], t("a/rows c", "cols")),
        "'b' is not the same",
    ),
    "a contraction that forgets its pending sum": (
        lambda h: h.add("contract", [h.feed("x", t("a b/cols")), h.feed("y", t("b/cols c"))], t("a c")),
        "must leave a reduction pending",
    ),
    "a contraction of two pending sums": (
        lambda h: h.add("contract", [h.pending("a", "cols"), h.pending("a", "cols")], t("", "cols")),
        "two unfinished sums",
    ),
    "a contraction with a lonely summed dim": (
        lambda h: h.add("contract", [_x(h), h.feed("y", t("a/rows c"))], t("c", "rows")),
        "reduce ['b'] first",
    ),
    "a contraction of two data types": (
        lambda h: h.add("contract", [h.feed("x", t("a")), h.feed("y", t("a", dtype="float64"))], t("")),
        "two data types",
    ),
    "operands split over one axis by two dims": (
        lambda h: h.add("contract", [h.feed("x", t("a/rows b")), h.feed("y", t("b c/rows"))], t("a/rows c/rows")),
        "axis twice",
    ),
    # structure
    "a transpose that changes a dim": (lambda h: h.add("transpose", [_x(h)], t("b c/rows")), "changes dims"),
    "a transpose that changes a split": (lambda h: h.add("transpose", [_x(h)], t("b a")), "'a' is not the same"),
    "a transpose that finishes a sum": (
        lambda h: h.add("transpose", [h.pending("a b", "cols")], t("b a")),
        "what is pending",
    ),
    "a view that is not local": (lambda h: h.add("view", [h.feed("x", t("a b/rows"))], t("m/rows")), "not local"),
    "a view that changes the split": (lambda h: h.add("view", [_x(h)], t("m/cols")), "not local"),
    "a slice along a split dim": (
        lambda h: h.add("slice", [_x(h)], t("a=2/rows b"), dim="a", start=0, stop=2, stride=1),
        "which is split",
    ),
    "a slice of another length": (
        lambda h: h.add("slice", [_x(h)], t("a/rows b=5"), dim="b", start=0, stop=4, stride=1),
        "4 elements",
    ),
    "a pad of another length": (
        lambda h: h.add("pad", [_x(h)], t("a/rows b=9"), dim="b", before=1, after=1, value=0),
        "10 elements",
    ),
    "a pending sum padded with a number": (
        lambda h: h.add("pad", [h.pending("a", "cols")], t("a=5", "cols"), dim="a", before=1, after=0, value=1.0),
        "pads an unfinished",
    ),
    "a concat of another length": (
        lambda h: h.add("concat", [_x(h), h.feed("y", t("a/rows b"))], t("a/rows b=15"), dim="b"),
        "16 elements",
    ),
    "a concat of a finished and a pending value": (
        lambda h: h.add("concat", [h.pending("a", "cols"), h.feed("y", t("a"))], t("a=8", "cols"), dim="a"),
        "what is pending",
    ),
    # indexing
    "a gather that forgets its pending sum": (
        lambda h: h.add("gather", [h.feed("w", t("b/cols c")), h.feed("i", t("a", dtype="int32"))], t("a c"), dim="b"),
        "must leave a reduction pending",
    ),
    "a gather from rows split like its result": (
        lambda h: h.add(
            "gather", [h.feed("w", t("b/cols c")), h.feed("i", t("a/cols", dtype="int32"))], t("a/cols c"), dim="b"
        ),
        "splits its result like",
    ),
    "a scatter_add that forgets its pending sum": (
        lambda h: h.add(
            "scatter_add", [h.feed("x", t("a/rows c")), h.feed("i", t("a/rows", dtype="int32"))], t("b c"), dim="b"
        ),
        "must leave a reduction pending",
    ),
    "a function whose result has other dims than it declares": (
        lambda h: _function(h, t("a/rows b"), t("a/rows")),
        "where its function has",
    ),
    "a function of an unfinished sum": (
        lambda h: h.add(
            "local_function", [h.pending("a b", "cols")], t("a b"), function=_declared("ab", "ab"), batch_dims=("a",)
        ),
        "unfinished input",
    ),
    "a function that splits its result in another way": (
        lambda h: _function(h, t("a/rows b"), t("a b")),
        "split in two ways",
    ),
    "a function split along a dim that is no batch dim": (
        lambda h: _function(h, t("a b/cols"), t("a b/cols")),
        "which is no batch dimension",
    ),
    "a function whose sum over a batch dim is not pending": (
        lambda h: _function(h, t("a/rows b"), t("b"), "b"),
        "must leave a reduction pending",
    ),
    "a put of updates split over dims of the index": (
        lambda h: h.add(
            "put",
            [h.feed("x", t("b c")), h.feed("u", t("a/rows c")), h.feed("i", t("a/rows", dtype="int32"))],
            t("b c"),
            dim="b",
        ),
        "split over dims of the index",
    ),
    "a put that changes the splits of its input": (
        lambda h: h.add(
            "put",
            [h.feed("x", t("b/rows c")), h.feed("u", t("a c")), h.feed("i", t("a", dtype="int32"))],
            t("b c"),
            dim="b",
        ),
        "changes the type of its input",
    ),
    "a put of rows split unlike its input": (
        lambda h: h.add(
            "put",
            [h.feed("x", t("b c/cols")), h.feed("u", t("a c")), h.feed("i", t("a", dtype="int32"))],
            t("b c/cols"),
            dim="b",
        ),
        "is not the same in",
    ),
    # redistribution
    "an all_reduce of nothing pending": (
        lambda h: h.add("all_reduce", [_x(h)], t("a/rows b"), axes=("cols",), op="sum"),
        "pending over ()",
    ),
    "an all_reduce with another op": (
        lambda h: h.add("all_reduce", [h.pending("a", "cols")], t("a"), axes=("cols",), op="max"),
        "with max",
    ),
    "an all_reduce over too few axes": (
        lambda h: h.add(
            "all_reduce",
            [h.map("negative", [h.pending("a", "cols")], t("a", "cols"))],
            t("a"),
            axes=("rows",),
            op="sum",
        ),
        "pending over ('cols',)",
    ),
    "an all_reduce that claims another result": (
        lambda h: h.add("all_reduce", [h.pending("a", "cols")], t("a/rows"), axes=("cols",), op="sum"),
        "should make",
    ),
    "an all_reduce of two data types": (
        lambda h: h.add(
            "all_reduce",
            [
                h.add("reduce", [h.feed("p", t("a b/cols"))], t("a", "cols"), op="sum"),
                h.add(
                    "reduce", [h.feed("q", t("a b/cols", dtype="float64"))], t("a", "cols", dtype="float64"), op="sum"
                ),
            ],
            t("a"),
            t("a", dtype="float64"),
            axes=("cols",),
            op="sum",
        ),
        "several data types",
    ),
    "a reduce_scatter onto an axis in use": (
        lambda h: h.add("reduce_scatter", [h.pending("a", "cols")], t("a/rows"), dim="a", axes=("rows",), op="sum"),
        "pending over ('cols',)",
    ),
    "an all_gather of the wrong axes": (
        lambda h: h.add("all_gather", [h.feed("x", t("a/rows+cols"))], t("a/cols"), dim="a", axes=("rows",)),
        "split over ('rows', 'cols')",
    ),
    "an all_gather of a pending sum": (
        lambda h: h.add(
            "all_gather",
            [h.add("contract", [h.feed("x", t("a/rows u/cols")), h.feed("y", t("u/cols"))], t("a/rows", "cols"))],
            t("a", "cols"),
            dim="a",
            axes=("rows",),
        ),
        "moves an unfinished sum",
    ),
    "an all_to_all from an unsplit dim": (
        lambda h: h.add("all_to_all", [_x(h)], t("a b/cols"), split="b", concat="a", axes=("cols",)),
        "split over ('rows',)",
    ),
    "a take_shard over an axis in use": (
        lambda h: h.add("take_shard", [_x(h)], t("a/rows b/cols"), dim="b", axes=("rows",)),
        "splits 'b'",
    ),
    "a take_shard of a pending sum over its axis": (
        lambda h: h.add("take_shard", [h.pending("a", "cols")], t("a/cols"), dim="a", axes=("cols",)),
        "pending over",
    ),
    "blocks that do not nest": (
        lambda h: h.add("take_shard", [h.feed("x", t("c/rows"))], t("c/rows+cols"), dim="c", axes=("cols",)),
        "do not hold whole blocks",
    ),
}
ROWS.update(exchange_rows.ROWS)
ROWS.update(scan_rows.ROWS)
ROWS.update(tiled_rows.ROWS)
ROWS.update(local_rows.ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_broken_programs_are_refused(name: str):
    write, words = ROWS[name]
    h = Hand()
    write(h)
    said = _refusal(h.program())
    assert words in said, said
    assert "bug in" in said and "instruction" in said


def _refusal(program: Program) -> str:
    """What `verify` says against a program; empty where it passes."""
    try:
        verify(program)
    except ProgramError as e:
        return str(e)
    return ""


def _overwritten(h: Hand) -> int:
    w = h.variable("w", t("a"))
    h.add("write", [h.map("negative", [w], t("a"))], variable="w")
    return w


@pytest.mark.parametrize(
    "fetch",
    [lambda h: h.pending("a", "cols"), lambda h: 99, _overwritten],
    ids=["unfinished", "undefined", "overwritten"],
)
def test_broken_fetches_are_refused(fetch: Callable[[Hand], int]):
    h = Hand()
    h.fetches["y"] = fetch(h)
    with pytest.raises(ProgramError, match="fetch 'y'"):
        verify(h.program())


def test_every_kind_of_instruction_is_broken_by_some_row():
    from meshmpi.ir.kinds import KINDS

    broken = []
    for write, _ in ROWS.values():
        h = Hand()
        write(h)
        broken += [i.kind for i in h.instructions]
    assert [k for k in KINDS if k not in (*broken, "random")] == []


def test_what_passed_is_checked_again_where_its_surroundings_changed():
    """The same instruction object: passes with its types, not with others, nor on another mesh."""
    h = Hand()
    x = h.feed("x", t("a/rows b"))
    h.fetches["y"] = h.map("negative", [x], t("a/rows b"))
    good, proven = h.program(), Proven()
    verify(good, proven)
    verify(good, proven)
    wrong = replace(good, types={**good.types, 1: t("a b")})
    with pytest.raises(ProgramError, match="is not the same in"):
        verify(wrong, proven)
    verify(good, proven)
    with pytest.raises(ProgramError, match="type of the feed"):
        verify(replace(good, feeds={"x": t("a b")}), proven)
    with pytest.raises(MeshError, match="no axis 'rows'"):
        verify(replace(good, mesh=MeshShape("cols:2")), proven)


def test_the_order_is_checked_also_of_what_passed():
    h = Hand()
    x = h.feed("x", t("a"))
    y = h.map("negative", [x], t("a"))
    h.fetches["z"] = h.map("square", [y], t("a"))
    good, proven = h.program(), Proven()
    verify(good, proven)
    feed, first, second = good.instructions
    with pytest.raises(ProgramError, match="used before it is made"):
        verify(replace(good, instructions=(feed, second, first)), proven)
    with pytest.raises(ProgramError, match="made twice"):
        verify(replace(good, instructions=(feed, first, first, second)), proven)


def test_the_pipeline_finds_the_pass_that_broke_an_instruction():
    h = Hand()
    x = h.feed("x", t("a/rows b"))
    h.fetches["y"] = h.map("negative", [x], t("a/rows b"))

    def harmless(program: Program) -> Program:
        return program

    def breaks(program: Program) -> Program:
        return program.with_instructions(program.instructions, {**program.types, 1: t("b")})

    optimize(h.program(), (harmless, harmless))
    with pytest.raises(ProgramError, match="bug in lowering or in a pass"):
        optimize(h.program(), (harmless, breaks))
