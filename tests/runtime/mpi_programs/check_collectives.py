"""Under mpirun: every case of the table on `Mesh`, compared bit by bit with `SimulatedMesh`.

Each is run with long and with short pieces, by all algorithms of reduce_scatter, and in a
workspace of exactly the predicted size.  Prints one line with the number of cases.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from meshmpi.ir import collective_bytes
from meshmpi.runtime import collectives
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.runtime.mpi_programs.collective_cases import MESHES, Case, call, cases, inputs, outputs, workspace_bytes

PIECE_BYTES = (collective_bytes.PIECE_BYTES, 64)
ALGORITHMS = ("all_reduce", "reduce_scatter", "all_to_all")


def simulate(case: Case, mesh: SimulatedMesh) -> list[np.ndarray]:
    xs, outs = inputs(case), outputs(case)
    call(case, mesh, xs, outs)
    return xs if case.kind == "all_reduce" else outs


def check(case: Case, mesh: Mesh, wanted: np.ndarray, asked: list[int]) -> None:
    """One case in the current setting; ``asked`` collects the scratch bytes asked for."""
    x, out = inputs(case)[mesh.rank], outputs(case)[mesh.rank]
    before = x.copy()
    need = workspace_bytes(case, x, mesh.rank)
    asked.clear()
    call(case, mesh, x, out, np.full(need, 0xFF, np.uint8))
    used = max(asked, default=0)
    if case.n > 1:
        enough = case.kind in ("reduce_scatter", "shift") and used < need
        assert used == need or enough, (case, used, need)
    got = x if case.kind == "all_reduce" else out
    assert got.tobytes() == wanted.tobytes(), (case, mesh.rank, got, wanted)
    if case.kind != "all_reduce":
        assert x.tobytes() == before.tobytes(), (case, "the input was changed")


def main() -> None:
    asked: list[int] = []
    plain_scratch = collectives.scratch

    def spy(workspace: np.ndarray | None, elements: int, dtype: np.dtype) -> np.ndarray:
        asked.append(elements * np.dtype(dtype).itemsize)
        return plain_scratch(workspace, elements, dtype)

    collectives.scratch = spy
    count = 0
    for text in MESHES[MPI.COMM_WORLD.size]:
        mesh, simulated = Mesh(text), SimulatedMesh(text)
        for case in cases(text):
            wanted = simulate(case, simulated)[mesh.rank]
            for piece in PIECE_BYTES:
                for algorithm in ALGORITHMS if case.kind == "reduce_scatter" else ALGORITHMS[:1]:
                    collective_bytes.PIECE_BYTES = collectives.PIECE_BYTES = piece
                    collectives.REDUCE_SCATTER_ALGORITHMS = {MPI.get_vendor()[0]: ((0, algorithm),)}
                    check(case, mesh, wanted, asked)
                    count += 1
        compare_counters(mesh, simulated)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} collectives agree")


def compare_counters(mesh: Mesh, simulated: SimulatedMesh) -> None:
    """The real mesh ran each case once per setting, the simulated one once."""
    for kind, table in simulated.counters[mesh.rank].items():
        times = len(PIECE_BYTES) * (len(ALGORITHMS) if kind == "reduce_scatter" else 1)
        for axes, row in table.items():
            got = mesh.counters[kind][axes]
            assert got[:3] == [times * v for v in row[:3]], (kind, axes, got, row)
            assert got[3] > 0


if __name__ == "__main__":
    main()
