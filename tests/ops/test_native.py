"""The table through generated C: every case in a few layouts, all its kernels in one library.

Tolerances are those of the table but at least 1e-11 in float64: the C code forms sums in another
order and its exponentials may differ from the C library's in the last bits.
"""

from __future__ import annotations

import pytest

import meshmpi as mm
from meshmpi.errors import LayoutError
from meshmpi.kernels.native import NativeKernels, available
from meshmpi.runtime.compiled import CompiledStep
from tests.layouts import legal_layouts
from tests.ops.build import EVEN, UNEVEN, Built, build
from tests.ops.cases import CASES
from tests.ops.run import SEED, compare, expected, fetched, result_array

pytestmark = [pytest.mark.matrix, pytest.mark.skipif(not available(), reason="there is no C compiler on this machine")]
PARTS = {"even": ("rows:2;cols:3", EVEN), "uneven": ("rows:2", UNEVEN)}
"""Even blocks are alike on all ranks, so that 6 ranks need no more C functions than one."""


def _programs(mesh: mm.MeshShape, sizes: dict[str, int]):
    for case in CASES:
        built = build(case, sizes)
        for layout in legal_layouts(built.graph, mesh, 6)[-1:]:
            try:
                yield (
                    built,
                    layout,
                    mm.plan(
                        built.graph, mesh, layout, fetches=fetched(built, False), updates=built.updates, seed=SEED
                    ).program,
                )
            except LayoutError:
                assert case.refuses


@pytest.mark.parametrize("part", PARTS)
def test_table_by_generated_kernels(part: str):
    shape, sizes = PARTS[part]
    mesh = mm.SimulatedMesh(shape)
    rows = list(_programs(mesh.shape, sizes))
    shared = NativeKernels([p for _, _, p in rows], mesh.coordinates)
    assert shared.functions > 200
    for built, layout, program in rows:
        _check(built, layout, CompiledStep(program, mesh, _named(built), None, shared))


def _named(built: Built) -> dict[str, mm.Tensor]:
    return {t.name: t for t in fetched(built, False)}


def _check(built: Built, layout: str, step: CompiledStep) -> None:
    feeds = {n: a for n, a in built.feeds.items() if n in step.program.feeds}
    tolerance = max(built.case.tolerance, 1e-11)
    for want in expected(built):
        got = step(feeds)
        for t, value in want.fetches.items():
            what = f"{built.case.name} '{layout}': {t.name} {t.shape}"
            compare(result_array(got[t]), value, t.dtype, tolerance, what)
