"""Under mpirun, plain Python: a program of three collectives that fails in the way it is told.

Usage: fail.py FAULT RANK, RANK a number, ``last`` or ``all``.  Other ranks go on into collectives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

from meshmpi.errors import LayoutError
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.operands import AllReduce


class SaysNothing(Exception):
    """An error of the program itself."""


class NeverTold(Exception):
    """An error whose report never comes to an end."""

    def __str__(self) -> str:
        while True:
            time.sleep(1)


def fault(kind: str) -> None:
    """Fails, or not, as ``kind`` says."""
    if kind == "exception":
        raise SaysNothing("by order")
    if kind == "stuck":
        raise NeverTold
    if kind == "own":
        raise LayoutError("'batch' is split twice.", "Split it once.", "x made at a.py:1")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit3":
        sys.exit(3)
    if kind == "exit0":
        sys.exit(0)
    if kind == "message":
        sys.exit("no such file")
    if kind == "raise4":
        raise SystemExit(4)
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if kind == "thread":
        thread = threading.Thread(target=fault, args=("exception",), name="reader")
        thread.start()
        thread.join()
    if kind == "thread-exit":
        thread = threading.Thread(target=fault, args=("exit3",))
        thread.start()
        thread.join()
    if kind == "caught":
        with contextlib.suppress(SystemExit):
            fault("exit3")
    if kind == "child":
        child = multiprocessing.get_context("fork").Process(target=fault, args=("exception",))
        child.start()
        child.join()
        if os.fork() == 0:  # one that reports like the main program, and only then stops hard
            try:
                fault("exception")
            except SaysNothing as e:
                sys.excepthook(type(e), e, e.__traceback__)
            os._exit(0)
        os.wait()
    if kind == "slow":
        time.sleep(7)


def main() -> int:
    kind, which = sys.argv[1:]
    if kind == "mesh-size":
        Mesh("rows:5;cols:2")
    if kind == "before-mesh" and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == which:
        raise SaysNothing("by order")
    mesh = Mesh({"rows": int(os.environ["RANKS"])})
    print(f"rank {mesh.rank} starts")
    x = mesh.allocate(1 << 16).view(np.float64)
    meet = mesh.bind(AllReduce(x, ("rows",)), planned=True)
    meet()
    chosen = {"last": mesh.size - 1, "all": mesh.rank}.get(which, int(which) if which.isdigit() else -1)
    if kind == "in-collective" and mesh.rank == chosen:
        mesh.all_gather(np.ones(4), np.ones(3), 0, [2] * mesh.size, ("rows",))
    elif kind == "mpi-error" and mesh.rank == chosen:
        mesh.comm.Send(x, dest=99)
    elif mesh.rank == chosen:
        fault(kind)
    if kind in ("slow", "exit0") or (which == "all" and kind.startswith(("exit", "raise"))):
        return 0
    meet()
    mesh.comm.Barrier()
    print(f"rank {mesh.rank} ends")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "slow":
        raise SystemExit(main())
    main()
