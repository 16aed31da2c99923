"""Collectives over several hosts: by lanes, beside MPI's own; all_reduce also in three stages by hand with mpi4py.

Start it with as many ranks on each host::

    mpirun -n 4 --host a:2,b:2 python -m apps.bench.lanes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.runtime.operands import AllGather, AllReduce, Collective, ReduceScatter

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes of the vector; of what an all_gather makes, and of what a rank hands to a reduce_scatter."""


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


def sent(mesh: mm.Mesh, call: Callable[[], None], size: int, least: float) -> float:
    """Bytes that the hosts send in a call of ``size`` bytes, in units of the ``least``."""
    first = [mesh.host_of.index(host) for host in range(mesh.hosts)]
    mine = mesh.rank in first
    repeats = max(3, (4 << 20) // size)
    mesh.comm.Barrier()
    before = network_bytes() if mine else 0
    for _ in range(repeats):
        call()
    mesh.comm.Barrier()
    total = mesh.comm.allreduce(network_bytes() - before if mine else 0)
    return total / repeats / least


def divided(mesh: mm.Mesh, kind: str, size: int) -> Collective:
    """A collective of float32, in memory that ranks of a host share."""
    whole, n = mesh.allocate(size).view(np.float32), mesh.size
    part = mesh.allocate(size // n).view(np.float32)
    if kind == "all_gather":
        return AllGather(part, whole, 0, [part.size] * n, "all")
    return ReduceScatter(whole, part, 0, [part.size] * n, "all")


def report(mesh: mm.Mesh, kind: str, seconds: float) -> None:
    """Prints a line for each size."""
    if mesh.rank == 0:
        print(f"{kind:>14} {'lanes':>18} {'flat MPI':>18}" + f" {'by hand':>18}" * (kind == "all_reduce"))
    for size in SIZES:
        least = (mesh.hosts - 1) * size
        if kind == "all_reduce":
            x = mesh.allocate(size).view(np.float32)
            y = np.ones(size // 4, np.float32)
            ways = [mesh.bind(AllReduce(x, "all"), planned=True), mesh.bind(AllReduce(y, "all"))]
            ways.append(by_hand(mesh, size // 4))
            least *= 2
        else:
            call = divided(mesh, kind, size)
            ways = [mesh.bind(call, planned=planned) for planned in (True, False)]
        found = [(microseconds(mesh, way, seconds), sent(mesh, way, size, least)) for way in ways]
        if mesh.rank == 0:
            print(f"{size:>14,} " + " ".join(f"{t:>11,.0f} ({share:.2f})" for t, share in found), flush=True)


def main() -> None:
    """Prints a table for each collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each way and size")
    parser.add_argument("--kinds", default="all_reduce,all_gather,reduce_scatter")
    options = parser.parse_args()
    mesh = mm.Mesh(f"all:{MPI.COMM_WORLD.size}")
    if mesh.hosts < 2:
        sys.exit("start it on ranks of several hosts: meshmpi run -n 4 --hosts n1:2,n2:2 -m apps.bench.lanes")
    if mesh.rank == 0:
        print(f"{mesh.size} ranks on {mesh.hosts} hosts; microseconds (bytes sent between hosts / the least possible)")
    for kind in options.kinds.split(","):
        report(mesh, kind, options.seconds)


if __name__ == "__main__":
    main()
