"""Worker: collectives of a mesh beside plain mpi4py, on arrays of their own, on one rank of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from apps.bench.messages.timing import KINDS, RANKS, SIZES, interleaved, options_of_worker
from apps.bench.step.yardstick import emit
from meshmpi.ir.collective_bytes import (
    all_gather_workspace_bytes,
    all_reduce_workspace_bytes,
    all_to_all_workspace_bytes,
    reduce_scatter_workspace_bytes,
)
from meshmpi.runtime import operands

PIECE = 16 << 20
"""Bytes of a piece in the column "mpi4py in pieces".  Measured: docs/performance.md."""


def calls(mesh: Any, kind: str, n: int) -> dict[str, Callable[[], None]]:
    """The ways to run one collective of ``n`` bytes, on arrays of their own.

    Args:
        kind: One of `KINDS`.
        n: Bytes, a multiple of four times the number of ranks.
    """
    return {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "all_to_all": _all_to_all,
        "reduce_scatter": _reduce_scatter,
    }[kind](mesh, n // 4)


def _zeros(*sizes: int) -> Any:
    """Zeros in pages of their own: pages never written to are all one page of the kernel's."""
    made = np.empty(sizes, np.float32)
    made.fill(0.0)
    return made


def _workspace(nbytes: int) -> Any:
    return np.zeros(nbytes, np.uint8)


def _all_reduce(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    x, y, z = _zeros(n), _zeros(n), _zeros(n)
    space = _workspace(all_reduce_workspace_bytes(x.shape, "float32"))
    pieces = [z[k : k + PIECE // 4] for k in range(0, n, PIECE // 4)]

    def in_pieces() -> None:
        for piece in pieces:
            mesh.comm.Allreduce(MPI.IN_PLACE, piece)

    found = {
        "meshmpi": mesh.bind(operands.AllReduce(x, ("all",), workspace=space)),
        "mpi4py": lambda: mesh.comm.Allreduce(MPI.IN_PLACE, y),
    }
    return {**found, "pieces": in_pieces} if len(pieces) > 1 else found


def _all_gather(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    block, sizes = n // RANKS, [n // RANKS] * RANKS
    space = _workspace(all_gather_workspace_bytes((block,), "float32", 0, sizes))
    x, out, y, whole = _zeros(block), _zeros(n), _zeros(block), _zeros(n)
    return {
        "meshmpi": mesh.bind(operands.AllGather(x, out, 0, sizes, ("all",), workspace=space)),
        "mpi4py": lambda: mesh.comm.Allgather(y, whole),
    }


def _all_to_all(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    rows, columns = [1] * RANKS, [n // RANKS] * RANKS
    x, out = _zeros(RANKS, n // RANKS), _zeros(1, n)
    index = mesh.shape.block_index(("all",), mesh.coordinates)
    space = _workspace(all_to_all_workspace_bytes(x.shape, "float32", 0, 1, rows, columns, index))
    y, z = _zeros(n), _zeros(n)
    return {
        "meshmpi": mesh.bind(operands.AllToAll(x, out, 0, 1, rows, columns, ("all",), workspace=space)),
        "mpi4py": lambda: mesh.comm.Alltoall(y, z),
    }


def _reduce_scatter(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    sizes = [n // RANKS] * RANKS
    space = _workspace(reduce_scatter_workspace_bytes((n,), "float32", 0, sizes))
    x, out, y, block = _zeros(n), _zeros(n // RANKS), _zeros(n), _zeros(n // RANKS)
    return {
        "meshmpi": mesh.bind(operands.ReduceScatter(x, out, 0, sizes, ("all",), workspace=space)),
        "mpi4py": lambda: mesh.comm.Reduce_scatter_block(y, block),
    }


def main() -> None:
    """Worker of one MPI rank."""
    options = options_of_worker()
    mesh = mm.Mesh(f"all:{RANKS}")

    def slowest(times: list[float]) -> list[float]:
        most = np.array(times)
        mesh.comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
        return most.tolist()

    found = {
        kind: {
            n: interleaved(calls(mesh, kind, n), mesh.comm.Barrier, slowest, options.seconds)
            for n in SIZES
            if n <= options.most
        }
        for kind in KINDS
    }
    emit(rank=mesh.rank, microseconds=found)


if __name__ == "__main__":
    main()
