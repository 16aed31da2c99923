"""Loops over blocks of large values, and reductions that travel while others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshmpi import loops
from meshmpi.kernels import loops as kernels_loops
from meshmpi.passes import blocks, causal, pipeline
from tests.mutations.registry import Patch, mutation
from tests.passes.overlap_model import everything_counts

LOOPS = "tests/passes/test_loops.py"
OVERLAP = (
    "tests/passes/overlap_model.py"
    "::losses(mm.SimulatedMesh('rows:2;cols:3'), 'batch:rows', overlap=True)"
)


def _short_blocks(m: Patch) -> None:
    """As the tests of loops do, so that small models have several blocks."""
    m.setattr(blocks, "LEAST_ROWS", 4)
    m.setattr(blocks, "LEAST_CAUSAL_ROWS", 4)


def _iterations(m: Patch, wrong: Callable[..., Iterator[dict]]) -> None:
    for module in (loops, kernels_loops):
        m.setattr(module, "iterations", wrong)


@mutation(f"{LOOPS}::test_results_are_those_of_the_program_as_lowered('no_softmax')")
def sums_over_blocks_keep_the_last_block(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(kernels_loops._Begun, "first", lambda self, v, names, ranges: True)


@mutation(f"{LOOPS}::test_results_are_those_of_the_program_as_lowered('no_softmax')")
def sums_over_blocks_go_on_from_the_step_before(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(kernels_loops._Begun, "first", lambda self, v, names, ranges: False)


@mutation(f"{LOOPS}::test_results_are_those_of_the_program_as_lowered('masked')")
def causal_loops_leave_out_the_columns_of_their_own_rows(m: Patch) -> None:
    _short_blocks(m)
    right = loops.iterations

    def wrong(i: Any, program: Any, coordinates: Any) -> Iterator[dict]:
        rows, columns = i.attrs.get("causal") or ("", "")
        for ranges in right(i, program, coordinates):
            if columns:
                first, end = ranges[columns]
                ranges[columns] = (first, max(first + 1, min(end, ranges[rows][0])))
            yield ranges

    _iterations(m, wrong)


@mutation(f"{LOOPS}::test_what_is_behind_a_row_is_skipped_only_where_it_is_zero('later_only')")
def every_comparison_of_two_positions_is_taken_for_a_mask(m: Patch) -> None:
    def wrong(program: Any, group: Any, wide: Any, products: Any, dims: Any) -> tuple:
        for rows, columns in causal._compared(program, group, wide):
            if rows in dims and columns not in dims and products:
                return rows, columns
        return ()

    _short_blocks(m)
    m.setattr(blocks, "causal_dims", wrong)


@mutation(f"{LOOPS}::test_results_are_those_of_the_program_as_lowered('masked')")
def loops_forget_their_last_block(m: Patch) -> None:
    _short_blocks(m)
    right = loops.iterations

    def wrong(i: Any, program: Any, coordinates: Any) -> Iterator[dict]:
        found = list(right(i, program, coordinates))
        yield from found[: max(1, len(found) - 1)]

    _iterations(m, wrong)


@mutation(OVERLAP)
def started_reductions_are_waited_for_after_their_first_use(m: Patch) -> None:
    everything_counts(m)
    right = pipeline.overlap

    def wrong(program: Any) -> Any:
        out = list(right(program).instructions)
        for n in range(len(out) - 1, 0, -1):
            if out[n - 1].kind == "wait":
                out[n - 1], out[n] = out[n], out[n - 1]
        return program.with_instructions(out, right(program).types)

    m.setattr(pipeline, "overlap", wrong)


@mutation(OVERLAP)
def reductions_start_before_what_they_reduce_is_made(m: Patch) -> None:
    everything_counts(m)
    right = pipeline.overlap

    def wrong(program: Any) -> Any:
        p = right(program)
        starts = [i for i in p.instructions if i.attrs.get("start")]
        rest = [i for i in p.instructions if not i.attrs.get("start")]
        return p.with_instructions([*starts, *rest])

    m.setattr(pipeline, "overlap", wrong)
