"""Tiled regions over blocks of large values, and reductions that travel while others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshmpi.compiler.passes import pipeline, tile_groups, tiled_regions
from meshmpi.ir import bands
from meshmpi.ir.kinds import regions
from meshmpi.kernels import bands as kernels_bands
from meshmpi.kernels import tiled
from meshmpi.nn import functions
from tests.mutations.registry import Patch, mutation
from tests.passes.overlap_model import everything_counts

TILED = "tests/passes/test_tiled.py"
OVERLAP = "tests/passes/overlap_model.py::losses(mm.SimulatedMesh('rows:2;cols:3'), 'batch:rows', overlap=True)"


def _short_blocks(m: Patch) -> None:
    """As the tests of tiled regions do, so that small models have several blocks."""
    m.setattr(tiled_regions, "LEAST_ROWS", 4)
    m.setattr(tiled_regions, "LEAST_BAND_ROWS", 4)


@mutation(f"{TILED}::test_results_are_those_of_the_program_as_lowered('no_softmax')")
def sums_over_blocks_keep_the_last_block(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(tiled._Begun, "first", lambda self, v, names, ranges: True)


@mutation(f"{TILED}::test_results_are_those_of_the_program_as_lowered('no_softmax')")
def sums_over_blocks_go_on_from_the_step_before(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(tiled._Begun, "first", lambda self, v, names, ranges: False)


RESULTS = f"{TILED}::test_results_are_those_of_the_program_as_lowered"
NOT_FINITE = f"{TILED}::test_what_is_not_finite_shows_where_it_is_seen"


@mutation(f"{RESULTS}('masked')")
def tiled_regions_leave_out_the_last_columns_that_their_rows_see(m: Patch) -> None:
    _short_blocks(m)
    right = bands.Band.seen

    def wrong(self: Any, rows: Any, columns: Any) -> Any:
        low, high = right(self, rows, columns)
        return low, max(low, high - 1)

    m.setattr(bands.Band, "seen", wrong)


@mutation(f"{RESULTS}('near')")
def tiled_regions_leave_out_the_first_columns_that_their_rows_see(m: Patch) -> None:
    _short_blocks(m)
    right = regions._seen

    def wrong(band: Any, rows: Any, own: Any, step: int) -> Any:
        low, high = right(band, rows, own, step)
        return min(low + 1, high), high

    m.setattr(regions, "_seen", wrong)


@mutation(f"{TILED}::test_blocks_are_skipped_where_a_band_is_declared_and_only_there('biased')")
def tiled_regions_take_the_band_of_one_member_for_that_of_all(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(tiled_regions, "leaves_out", lambda i, types, band, leaves=True: True)
    band = bands.Band("length", "memory", 0)
    m.setattr(tiled_regions, "_band", lambda members, types, dims: band if "length" in dims else None)


@mutation(f"{TILED}::test_rules_of_tiled_regions({{'band': NEAR}}, 'uses pairs outside')")
def a_tiled_region_may_have_any_band(m: Patch) -> None:
    m.setattr(regions, "leaves_out", lambda i, types, band, leaves=True: True)


@mutation(f"{NOT_FINITE}('masked', 'float32', 'v', 20, float('nan'), 'numpy')")
def products_over_a_band_trust_that_zero_times_anything_is_zero(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(kernels_bands, "_finite_check", lambda x: lambda: True)


@mutation(f"{NOT_FINITE}('masked', 'bfloat16', 'v', 20, float('-inf'), 'numpy')")
def negative_infinity_of_bfloat16_is_taken_for_a_number(m: Patch) -> None:
    _short_blocks(m)
    right = kernels_bands._finite_check

    def wrong(x: Any) -> Callable[[], bool]:
        if x.dtype != kernels_bands.BFLOAT16:
            return right(x)
        return lambda: bool(x.view("int16").max(initial=0) < 0x7F80)

    m.setattr(kernels_bands, "_finite_check", wrong)


@mutation(f"{NOT_FINITE}('masked', 'float32', 'q', 9, float('nan'), 'numpy')")
def only_the_first_columns_are_looked_at_for_numbers_that_leak(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(kernels_bands, "_at_risk", lambda array, x, band, here: array[:, :1])


@mutation(f"{NOT_FINITE}('masked', 'float32', 'k', 20, float('nan'), 'numpy')")
def products_over_a_band_multiply_what_lies_outside(m: Patch) -> None:
    _short_blocks(m)
    for module in (kernels_bands, tiled):
        m.setattr(module, "fill_outside", lambda *a: lambda: None)


@mutation(f"{TILED}::test_a_band_of_weights_is_zero_outside_and_has_rows_without_pairs()")
def weights_outside_a_band_are_not_set_to_zero(m: Patch) -> None:
    m.setattr(functions, "inside_band", lambda x, band: x)


@mutation(f"{TILED}::test_results_are_those_of_the_program_as_lowered('masked')")
def tiled_regions_forget_their_last_block(m: Patch) -> None:
    _short_blocks(m)
    right = regions.iterations

    def wrong(i: Any, program: Any, coordinates: Any) -> Iterator[dict]:
        found = list(right(i, program, coordinates))
        yield from found[: max(1, len(found) - 1)]

    m.setattr(regions, "iterations", wrong)


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
        starts = [i for i in p.instructions if i.in_background]
        rest = [i for i in p.instructions if not i.in_background]
        return p.with_instructions([*starts, *rest])

    m.setattr(pipeline, "overlap", wrong)


BLOCKS = "tests/passes/test_local_blocks.py::test_passes_change_no_value"


@mutation(f"{BLOCKS}('products_of_two_sizes', 'numpy')")
def members_of_a_tiled_region_may_hold_a_dim_in_two_ways(m: Patch) -> None:
    for module in (tile_groups, tiled_regions):
        m.setattr(module, "held_differently", lambda types: None)


@mutation("tests/passes/test_verify.py::test_broken_programs_are_refused('a tiled region over two sizes of a dim')")
def the_verifier_lets_tiled_regions_mix_sizes(m: Patch) -> None:
    m.setattr(regions, "held_differently", lambda types: None)


@mutation(f"{BLOCKS}('scores_in_two_splits', 'numpy')")
def sums_over_all_dims_of_a_tiled_region_are_copies_of_their_place(m: Patch) -> None:
    right = tiled._Binder._view

    def wrong(self: Any, v: int, ranges: Any) -> Any:
        return right(self, v, ranges) if self.arrays[v].ndim else self.arrays[v].copy()

    m.setattr(tiled._Binder, "_view", wrong)


@mutation(f"{TILED}::test_results_are_those_of_the_program_as_lowered('side_by_side')")
def groups_wait_for_each_other(m: Patch) -> None:
    _short_blocks(m)
    m.setattr(tile_groups.Grouping, "_need", lambda self, g, bits: None)
    _masks_relate(m)


def _masks_relate(m: Patch) -> None:
    """Layers with one mask count as related, and come into one group."""
    right = tile_groups.Grouping.__init__

    class Maskless:
        def __init__(self, again: Any):
            self.again, self.masks = again, {}

        def __getattr__(self, name: str) -> Any:
            return getattr(self.again, name)

    def wrong(self: Any, program: Any, again: Any) -> None:
        right(self, program, Maskless(again))

    m.setattr(tile_groups.Grouping, "__init__", wrong)
