"""Under mpirun: started reductions give the losses, bytes and memory of those that block."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import meshmpi as mm
from tests.passes.overlap_model import everything_counts, losses


def sent(mesh: mm.Mesh) -> int:
    return sum(row[2] for table in mesh.counters.values() for row in table.values())


def main() -> None:
    shape = {2: "rows:2", 4: "rows:2;cols:2"}[MPI.COMM_WORLD.size]
    layouts = ["batch:rows", "batch:rows;d1:cols;d3:cols"][: len(shape.split(";"))]
    patch = pytest.MonkeyPatch()
    everything_counts(patch)
    for layout in layouts:
        blocking, background = mm.Mesh(shape), mm.Mesh(shape)
        want, _ = losses(blocking, layout, overlap=False)
        got, step = losses(background, layout, overlap=True)
        started = [i for i in step.program.instructions if i.in_background]
        assert started, layout
        # The order of summation is MPI's own choice, and may differ between the two calls.
        np.testing.assert_allclose(got, want, rtol=1e-13)
        assert sent(background) == sent(blocking) > 0
        state = step._executor.states[0]
        assert state.held_memory == dict(step.cost.memory)
    if MPI.COMM_WORLD.rank == 0:
        print("the same losses and bytes")


if __name__ == "__main__":
    main()
