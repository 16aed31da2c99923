"""The order of the passes; every one is followed by verify()."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.passes.clean import cse, dce
from meshmpi.passes.combine import combine
from meshmpi.passes.fold import fold
from meshmpi.passes.fuse import fuse
from meshmpi.passes.lean import recompute_cheap
from meshmpi.passes.loops import form_loops
from meshmpi.passes.overlap import SMALLEST_BYTES, overlap
from meshmpi.passes.reductions import place_reductions
from meshmpi.passes.scatter import form_reduce_scatter, shard_early
from meshmpi.passes.segments import form_segments
from meshmpi.program import Program
from meshmpi.typerules import Proven, verify

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (
    dce, fold, cse, place_reductions, shard_early, cse, form_reduce_scatter, cse, dce, fuse,
    combine, form_loops, form_segments, recompute_cheap, combine,
)  # fmt: skip


def overlapping(passes: tuple[Pass, ...] = PASSES) -> tuple[Pass, ...]:
    """The passes for a network on which reductions travel while instructions compute.

    Only messages too short to be worth starting early are kept back to be combined.
    """
    return (*(_combine_short if p is combine else p for p in passes), overlap)


def _combine_short(program: Program) -> Program:
    return combine(program, SMALLEST_BYTES)


def optimize(program: Program, passes: tuple[Pass, ...] = PASSES) -> Program:
    """Runs the passes; the result computes the same as ``program`` up to rounding."""
    proven = Proven()
    for one in passes:
        program = one(program)
        verify(program, proven)
    return program
