"""Under mpirun: every case of the table in shared memory, compared bit by bit with `SimulatedMesh`; then races.

Prints one line with the number of cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from meshmpi.runtime import operands
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.runtime.mpi_programs.collective_cases import MESHES, Case, call, cases, inputs, outputs

COLLECTIVES = {
    c.kind: c
    for c in (operands.AllReduce, operands.AllGather, operands.ReduceScatter, operands.AllToAll, operands.Shift)
}
HALF = 1 << 20


class Planned:
    """A mesh whose methods take arrays in shared memory."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda *a: self.mesh.bind(COLLECTIVES[kind](*a), planned=True)()


def placed(space: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A copy of ``x`` at the start of ``space``."""
    out = space[: x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def check_case(case: Case, mesh: Mesh, simulated: SimulatedMesh, space: np.ndarray) -> None:
    xs, outs = inputs(case), outputs(case)
    x, out = placed(space, xs[mesh.rank]), placed(space[HALF:], outs[mesh.rank])
    before = x.copy()
    call(case, simulated, xs, outs)
    call(case, Planned(mesh), x, out)
    got, wanted = (x, xs) if case.kind == "all_reduce" else (out, outs)
    assert got.tobytes() == wanted[mesh.rank].tobytes(), (case, mesh.rank, got, wanted[mesh.rank])
    if case.kind != "all_reduce":
        assert x.tobytes() == before.tobytes(), (case, "the input was changed")


def check_races(mesh: Mesh, space: np.ndarray, rounds: int) -> None:
    """all_reduces of all sizes back to back, on ranks that are late at random; each must see the newest values."""
    axes, late = mesh.shape.names, random.Random(mesh.rank)
    sizes = [4, 16, 512, 600, 5000, 100_000]
    arrays = [space[: 4 * n].view(np.float32) for n in sizes]
    runs = [mesh.bind(operands.AllReduce(x, axes), planned=True) for x in arrays]
    for turn in range(rounds):
        k = random.Random(turn).randrange(len(sizes))
        arrays[k][:] = turn + mesh.rank
        if late.random() < 0.05:
            time.sleep(late.random() / 500)
        runs[k]()
        wanted = mesh.size * turn + mesh.size * (mesh.size - 1) // 2
        assert (arrays[k] == wanted).all(), (turn, sizes[k], arrays[k], wanted)


def main() -> None:
    count, used = 0, 0
    for text in MESHES[MPI.COMM_WORLD.size]:
        mesh, simulated = Mesh(text), SimulatedMesh(text)
        space = mesh.allocate(2 * HALF)
        shared: Any = mesh._shared  # pyright: ignore[reportPrivateUsage]
        assert mesh.size == 1 or shared.region_of(space) is not None
        for case in cases(text):
            check_case(case, mesh, simulated, space)
            count += 1
        if mesh.size > 1:
            check_races(mesh, space, 2000)
            used += 1
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} cases on {used} meshes")


main()
