"""Worker: collectives of a mesh beside plain mpi4py, on arrays of their own, on one rank of two."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from apps.bench.messages.timing import KINDS, SIZES, interleaved, options_of_worker
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


def _shared(mesh: Any, *sizes: int) -> Any:
    """Zeros where a step keeps what it hands to collectives."""
    made = mesh.allocate(4 * math.prod(sizes)).view(np.float32).reshape(sizes)
    made.fill(0.0)
    return made


def _workspace(nbytes: int) -> Any:
    return np.zeros(nbytes, np.uint8)


def _ours(mesh: Any, make: Callable[..., operands.Collective], *shapes: tuple[int, ...]) -> dict[str, Callable]:
    """A collective on arrays of these shapes as a step calls it, and through MPI."""
    shared, own = ([f(*shape) for shape in shapes] for f in (functools.partial(_shared, mesh), _zeros))
    return {"meshmpi": mesh.bind(make(*shared), planned=True), "through MPI": mesh.bind(make(*own))}


def _copy(n: int) -> Callable[[], None]:
    """As many bytes from one array to another, by the C library: what no rank of a gather can do without."""
    return functools.partial(np.copyto, _zeros(n), _zeros(n))


def _all_reduce(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    y, z = _zeros(n), _zeros(n)
    space = _workspace(all_reduce_workspace_bytes(y.shape, "float32"))
    pieces = [z[k : k + PIECE // 4] for k in range(0, n, PIECE // 4)]

    def in_pieces() -> None:
        for piece in pieces:
            mesh.comm.Allreduce(MPI.IN_PLACE, piece)

    found = {
        **_ours(mesh, lambda x: operands.AllReduce(x, ("all",), workspace=space), (n,)),
        "mpi4py": lambda: mesh.comm.Allreduce(MPI.IN_PLACE, y),
    }
    return {**found, "pieces": in_pieces} if len(pieces) > 1 else found


def _all_gather(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    block, sizes = n // mesh.size, [n // mesh.size] * mesh.size
    space = _workspace(all_gather_workspace_bytes((block,), "float32", 0, sizes))
    y, whole = _zeros(block), _zeros(n)
    return {
        **_ours(mesh, lambda x, out: operands.AllGather(x, out, 0, sizes, ("all",), space), (block,), (n,)),
        "mpi4py": lambda: mesh.comm.Allgather(y, whole),
        "copy": _copy(n),
    }


def _all_to_all(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    rows, columns = [1] * mesh.size, [n // mesh.size] * mesh.size
    before, after = (mesh.size, n // mesh.size), (1, n)
    index = mesh.shape.block_index(("all",), mesh.coordinates)
    space = _workspace(all_to_all_workspace_bytes(before, "float32", 0, 1, rows, columns, index))
    y, z = _zeros(n), _zeros(n)
    return {
        **_ours(mesh, lambda x, out: operands.AllToAll(x, out, 0, 1, rows, columns, ("all",), space), before, after),
        "mpi4py": lambda: mesh.comm.Alltoall(y, z),
        "copy": _copy(n),
    }


def _reduce_scatter(mesh: Any, n: int) -> dict[str, Callable[[], None]]:
    sizes = [n // mesh.size] * mesh.size
    space = _workspace(reduce_scatter_workspace_bytes((n,), "float32", 0, sizes))
    y, block = _zeros(n), _zeros(n // mesh.size)
    return {
        **_ours(
            mesh,
            lambda x, out: operands.ReduceScatter(x, out, 0, sizes, ("all",), workspace=space),
            (n,),
            (n // mesh.size,),
        ),
        "mpi4py": lambda: mesh.comm.Reduce_scatter_block(y, block),
    }


def main() -> None:
    """Worker of one MPI rank."""
    options = options_of_worker()
    mesh = mm.Mesh(f"all:{MPI.COMM_WORLD.size}")

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
