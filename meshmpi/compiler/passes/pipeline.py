"""The order of the passes; every one is followed by verify()."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.compiler.collecting import without_collection
from meshmpi.compiler.passes.clean import cse, dce
from meshmpi.compiler.passes.fold import fold
from meshmpi.compiler.passes.fusion import form_fused_kernels, fuse
from meshmpi.compiler.passes.messages import SMALLEST_BYTES, combine, overlap
from meshmpi.compiler.passes.reductions import form_reduce_scatter, place_reductions, shard_early
from meshmpi.compiler.passes.rematerialise import rematerialise
from meshmpi.compiler.passes.tiled_regions import form_tiled_regions
from meshmpi.ir.program import Program
from meshmpi.ir.verify import Proven, verify

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (
    dce,
    fold,
    cse,
    place_reductions,
    shard_early,
    cse,
    form_reduce_scatter,
    cse,
    dce,
    fuse,
    combine,
    form_tiled_regions,
    form_fused_kernels,
    rematerialise,
    combine,
)


def overlapping() -> tuple[Pass, ...]:
    """The passes for a network on which reductions travel while instructions compute.

    Only messages too short to be worth starting early are kept back to be combined.
    """
    return (*(_combine_short if p is combine else p for p in PASSES), overlap)


def _combine_short(program: Program) -> Program:
    return combine(program, SMALLEST_BYTES)


def optimize(program: Program, passes: tuple[Pass, ...] = PASSES, proven: Proven | None = None) -> Program:
    """Runs the passes; the result computes the same as ``program`` up to rounding.

    Args:
        proven: The instructions that `lower` has proven.
    """
    proven = Proven() if proven is None else proven
    with without_collection():
        for one in passes:
            before, program = program, one(program)
            if program is not before:
                verify(program, proven)
    return program
