"""All-reduces over several hosts: by lanes, beside MPI's own, and three stages written by hand with mpi4py.

Start it with as many ranks on each host::

    mpirun -n 4 --host a:2,b:2 python -m apps.bench.lanes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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


def network_bytes() -> int:
    """Bytes that this host has sent over all its networks but the one inside it."""
    rows = (line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(row[9]) for row in rows if row[0] != "lo:")


def sent(mesh: mm.Mesh, call: Callable[[], None], size: int) -> float:
    """Bytes that the hosts send in a call, in units of what the best all_reduce of ``size`` bytes needs."""
    first = [mesh.host_of.index(host) for host in range(mesh.hosts)]
    mine = mesh.rank in first
    repeats = max(3, (4 << 20) // size)
    mesh.comm.Barrier()
    before = network_bytes() if mine else 0
    for _ in range(repeats):
        call()
    mesh.comm.Barrier()
    total = mesh.comm.allreduce(network_bytes() - before if mine else 0)
    return total / repeats / (2 * (mesh.hosts - 1) * size)


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each way and size")
    options = parser.parse_args()
    mesh = mm.Mesh(f"all:{MPI.COMM_WORLD.size}")
    if mesh.rank == 0:
        print(f"{mesh.size} ranks on {mesh.hosts} hosts; microseconds (bytes sent between hosts / the least possible)")
        print(f"{'bytes':>10} {'lanes':>18} {'by hand':>18} {'flat MPI':>18}")
    for size in SIZES:
        x = mesh.allocate(size).view(np.float32)
        y = np.ones(size // 4, np.float32)
        ways = (
            mesh.bind(AllReduce(x, "all"), planned=True),
            by_hand(mesh, size // 4),
            lambda y=y: mesh.comm.Allreduce(MPI.IN_PLACE, y),
        )
        found = [(microseconds(mesh, way, options.seconds), sent(mesh, way, size)) for way in ways]
        if mesh.rank == 0:
            print(f"{size:>10,} " + " ".join(f"{t:>11,.0f} ({share:.2f})" for t, share in found), flush=True)


if __name__ == "__main__":
    main()
