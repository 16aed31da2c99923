"""All-reduces over several hosts: by lanes, beside MPI's own, and three stages written by hand with mpi4py.

Start it with as many ranks on each host::

    mpirun -n 4 --host a:2,b:2 python -m apps.bench.lanes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.runtime.operands import AllReduce

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes of the vector."""


def by_hand(mesh: mm.Mesh, n: int) -> Callable[[], None]:
    """reduce_scatter inside a host, all_reduce between equal ranks of the hosts, all_gather inside."""
    inside = mesh.comm.Split(mesh.host_of[mesh.rank], mesh.rank)
    between = mesh.comm.Split(inside.rank, mesh.rank)
    whole, part = np.ones(n, np.float32), np.ones(n // inside.size, np.float32)

    def run() -> None:
        inside.Reduce_scatter_block(whole, part)
        between.Allreduce(MPI.IN_PLACE, part)
        inside.Allgather(part, whole)

    return run


def microseconds(mesh: mm.Mesh, call: Callable[[], None], seconds: float) -> float:
    """Median of calls, on the slowest rank."""
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 3 or (len(found) < 100 and mesh.comm.bcast(time.perf_counter() - began) < seconds):
        mesh.comm.Barrier()
        start = time.perf_counter()
        call()
        found.append(mesh.comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return 1e6 * statistics.median(found)


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each way and size")
    options = parser.parse_args()
    mesh = mm.Mesh(f"all:{MPI.COMM_WORLD.size}")
    if mesh.rank == 0:
        print(f"{mesh.size} ranks on {mesh.hosts} hosts; microseconds")
        print(f"{'bytes':>10} {'lanes':>12} {'by hand':>12} {'flat MPI':>12}")
    for size in SIZES:
        x = mesh.allocate(size).view(np.float32)
        y = np.ones(size // 4, np.float32)
        ways = (
            mesh.bind(AllReduce(x, "all"), planned=True),
            by_hand(mesh, size // 4),
            lambda y=y: mesh.comm.Allreduce(MPI.IN_PLACE, y),
        )
        times = [microseconds(mesh, way, options.seconds) for way in ways]
        if mesh.rank == 0:
            print(f"{size:>10,} " + " ".join(f"{t:>12,.0f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
