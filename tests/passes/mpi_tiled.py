"""Run under mpirun by test_tiled: loops and recomputed values on real ranks.

Results must be those of the simulated mesh, and the arena that of the plan, on every rank.
"""

from __future__ import annotations

import numpy as np

import meshmpi as mm
from meshmpi.compiler.passes import tiled_regions
from meshmpi.compiler.passes.rematerialise import fit_memory
from meshmpi.ir.program import Program
from meshmpi.runtime.compiled import CompiledStep
from tests.passes.test_recompute import feeds as token_feeds
from tests.passes.test_recompute import planned, share_of_arena, total
from tests.passes.test_tiled import built, regions_in, with_tiling


def check(p: Program, mesh: mm.Mesh, fetches: dict, feeds: dict, tolerance: float) -> None:
    """The program on real and on simulated ranks; sums over two ranks have one order."""
    real = CompiledStep(p, mesh, fetches, None, "numpy")
    simulated = CompiledStep(p, mm.SimulatedMesh(p.mesh), fetches, None, "numpy")
    given = {n: feeds[n] for n in p.feeds}
    a, b = real(given), simulated(given)
    assert real.held_memory["arena"] == real.cost.memory["arena"]
    if mesh.rank == 0:
        assert real.held_memory == real.cost.memory
    for n in fetches:
        x, y = (np.asarray(r[n] if isinstance(r[n], float) else r[n].numpy()) for r in (a, b))
        np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=n)


def main() -> None:
    """Prints how many programs agree."""
    tiled_regions.LEAST_ROWS = tiled_regions.LEAST_BAND_ROWS = 4
    mesh, count = mm.Mesh("rows:2"), 0
    layouts = {"masked": ("batch:rows", "length:rows", "memory:rows"), "dropped_out": ("length:rows",)}
    for name in layouts:
        graph, fetches, feeds = built(name)
        for layout in layouts[name]:
            p = mm.plan(graph, mesh.shape, layout, fetches=fetches, optimize=False).program
            p = with_tiling(p, 1000)
            assert regions_in(p)
            check(p, mesh, fetches, feeds, 1e-12)
            count += 1
    p, loss = planned("rows:2", "heads:rows;d_ff:rows;vocab:rows", 0.2)
    check(fit_memory(p, share_of_arena(p, 0.7), total), mesh, {"loss": loss}, token_feeds(), 1e-6)
    if mesh.rank == 0:
        print(f"{count + 1} programs agree")


if __name__ == "__main__":
    main()
