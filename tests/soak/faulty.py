"""Under mpirun: a program of a few collectives in which one rank does something wrong.

Usage: faulty.py FAULT RANK.  A rank prints when it begins to do wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import numpy as np

import meshmpi as mm
from meshmpi.job import rank_by_environment
from meshmpi.runtime.world import world_size

EARLY = ("early", "early exception", "shape")
ROUNDS = int(os.environ.get("FAULTY_ROUNDS", "40"))


class Wrong(Exception):
    """The error of a program."""


def begin_wrong(fault: str, ranks: int) -> int:
    """What a rank does in place of its first mesh."""
    print(f"fault {time.time()}", flush=True)
    if fault == "early exception":
        raise Wrong("by order")
    if fault == "shape":
        mm.Mesh({"columns": ranks})
    return 0


def compile_step(mesh: mm.Mesh) -> None:
    """Compiles a small step: collective."""
    with mm.Graph() as graph:
        mean = mm.reduce_mean(mm.placeholder("x", "batch:8"))
    mm.compile(graph, mesh, {}, fetches=[mean])


def main() -> int:
    """Runs the program; returns its exit status."""
    fault, chosen = sys.argv[1], int(sys.argv[2])
    if fault == "before mpi" and rank_by_environment() == chosen:
        return begin_wrong(fault, 0)
    ranks = world_size()
    if fault in EARLY and rank_by_environment() == chosen:
        return begin_wrong(fault, ranks)
    mesh, second = mm.Mesh({"rows": ranks}), mm.Mesh({"cols": ranks})
    odd = mesh.rank == chosen
    x, long, cut = np.ones(1000, np.float32), np.ones(200_000, np.float32), 1
    for k in range(ROUNDS):
        bad = odd and k == ROUNDS // 2
        if bad:
            print(f"fault {time.time()}", flush=True)
        if bad and fault == "exception":
            raise Wrong("by order")
        if bad and fault == "exit3":
            sys.exit(3)
        if bad and fault in ("exit0", "return"):
            return 0
        if bad and fault == "swallowed":
            with contextlib.suppress(Wrong):
                raise Wrong("by order")
            break
        if bad and fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad and fault == "mesh":
            mm.Mesh({"more": ranks})
        if bad and fault == "compile":
            compile_step(mesh)
        if bad and fault == "slow":
            time.sleep(float(sys.argv[3]))
        if bad and fault == "pid":
            print(f"pid {os.getpid()}", flush=True)
        cut = 2 if bad and fault in ("count 500", "count 100k") else 1
        if not (bad and fault == "skip"):
            mesh.all_reduce(x[: 1000 // cut], ("rows",))
        if bad and fault == "broadcast":
            mesh.broadcast(x, ("rows",))
        elif bad and fault == "dtype":
            mesh.all_reduce(x.view(np.int32), ("rows",))
        elif bad and fault == "op":
            mesh.all_reduce(x, ("rows",), op="max")
        elif fault == "count 100k":
            mesh.all_reduce(long[: 200_000 // cut], ("rows",))
        else:
            mesh.all_reduce(x, ("rows",))
        if bad and fault == "order":
            second.all_reduce(x, ("cols",))
            mesh.all_reduce(x, ("rows",))
        else:
            mesh.all_reduce(x, ("rows",))
            second.all_reduce(x, ("cols",))
        mesh.broadcast(x, ("rows",), root=1 if bad and fault == "root" else 0)
        x[:] = 1
        time.sleep(0.02)
    print(f"rank {mesh.rank} is done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
