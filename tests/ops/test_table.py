"""The table of cases is complete: whoever adds an operation adds a row that calls it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import meshmpi as mm
from meshmpi.graph import ops
from meshmpi.graph.arguments import checked
from meshmpi.ir.kinds import KINDS
from tests.layouts import legal_layouts
from tests.ops.build import EVEN, UNEVEN, Case, build
from tests.ops.cases import CASES
from tests.ops.run import fetched

MANY_KINDS = (
    "rename_swaps",
    "constrained_and_released",
    "slots_stored_elsewhere",
    "ranges",
    "shift",
    "random_numbers",
    "softmax_by_hand",
    "step_number",
    "slice_with_stride",
    "top_k",
    "cumsum",
    "embedding_used_twice",
    "pad",
    "concat",
    "transpose",
    "conv_of_pictures",
    "gather",
)
"""Rows tried first, which have nearly every kind between them; the others follow."""
HERE = str(Path(__file__).parent)
ROOT = Path(__file__).parent.parent.parent
MESH = mm.MeshShape("rows:2;cols:3")
ELSEWHERE = {"tiled": "tests/passes/test_tiled.py", "wait": "tests/passes/test_overlap.py"}
"""Kinds that passes make of programs larger than those of the table."""


def public_functions() -> dict[str, CodeType]:
    """Name -> code of the functions that ``meshmpi.graph.ops`` offers."""
    found = {n: getattr(ops, n) for n in ops.__all__}
    return {n: inspect.unwrap(f).__code__ for n, f in found.items() if inspect.isfunction(f)}


@cache
def called_by_rows() -> dict[CodeType, list[str]]:
    """Code of every function that a row itself calls -> names of such rows.

    What an operation calls in its turn does not count.
    """
    wanted = set(public_functions().values())
    called: dict[CodeType, list[str]] = {}
    row = ""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code not in wanted:
            return
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename == checked.__code__.co_filename:
            caller = caller.f_back  # arguments are read on the way
        if caller is not None and caller.f_code.co_filename.startswith(HERE):
            called.setdefault(frame.f_code, []).append(row)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for case in CASES:
            row = case.name
            build(case, UNEVEN)
    finally:
        sys.setprofile(before)
    return called


def test_every_public_operation_has_a_row():
    called = called_by_rows()
    without = [name for name, code in public_functions().items() if code not in called]
    assert not without, f"add a row to tests/ops that calls {without}"


def _kinds(case: Case) -> Iterator[str]:
    """Kinds of instructions of a row's programs in a few layouts, lowered and optimised."""
    built = build(case, EVEN)
    for layout in legal_layouts(built.graph, MESH, 3):
        for optimize in (False, True):
            try:
                plan = mm.plan(
                    built.graph, MESH, layout, fetches=fetched(built, False), updates=built.updates, optimize=optimize
                )
            except mm.LayoutError:
                assert case.refuses
                continue
            yield from plan.program.counts()


def test_every_instruction_kind_occurs_in_the_table():
    seen: set[str] = set()
    wanted = set(KINDS) - set(ELSEWHERE)
    for case in sorted(CASES, key=lambda c: c.name not in MANY_KINDS):
        seen.update(_kinds(case))
        if wanted <= seen:
            break
    assert sorted(wanted - seen) == []


def test_kinds_that_the_table_lacks_have_tests_of_their_own():
    for kind, file in ELSEWHERE.items():
        assert kind in KINDS and f'"{kind}"' in (ROOT / file).read_text()


def test_names_of_rows_are_unique():
    names = [case.name for case in CASES]
    twice = [n for n in dict.fromkeys(names) if names.count(n) > 1]
    assert not twice


def test_every_row_has_a_result_and_a_sense():
    """A row fetches something, and where it says that it has gradients it has one."""
    for case in CASES:
        built = build(case, UNEVEN)
        assert built.outputs, case.name
        assert built.gradients or not case.gradients or not _has_floats(built), case.name


def _has_floats(built) -> bool:
    floats = ("float64", "float32")
    fed = any(t.dtype in floats for n, t in built.sources.items() if n[0] != "_")
    return fed and any(y.dtype in floats for y in built.outputs)
