"""A program of which one rank, the last, ends or begins in an unusual way.

Usage: ends.py HOW.  ``wait`` programs leave a file named after their process in FOLDER.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import meshmpi as mm
from meshmpi.job import rank_by_environment, size_by_environment

HOW = sys.argv[1]
LAST = rank_by_environment() == size_by_environment() - 1


def child_ends() -> None:
    """A child of the last rank ends as HOW says, with all that Python does then."""
    if HOW == "subprocess":
        words = [sys.executable, "-c", "import meshmpi; raise SystemExit(3)"]
        print("child", subprocess.run(words).returncode, flush=True)
        return
    pid = os.fork()
    if pid == 0:
        if HOW == "child raises":
            raise ValueError("in the child")
        if HOW != "child returns":
            sys.exit(int(HOW[-1]))
        return
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def compiled(mesh: mm.Mesh, debug: bool) -> None:
    """A step, of which one rank alone may ask to be debugged."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:8")
        mean = mm.reduce_mean(x)
    step = mm.compile(graph, mesh, "batch:rows", fetches=[mean], debug=debug)
    assert step(x=np.ones(8, np.float32))[mean] == 1.0


def wait(here: bool) -> None:
    """For ever: before MPI, in MPI_Init, in C after it, or in collectives."""
    Path(os.environ["FOLDER"], str(os.getpid())).touch()
    if here and HOW == "wait before":
        time.sleep(100)
    mesh, x = mm.Mesh({"rows": size_by_environment()}), np.ones(4)
    if here and HOW == "wait after":
        time.sleep(100)
    while True:
        mesh.all_reduce(x, ("rows",))


def main() -> int:
    """Runs the program; returns its exit status."""
    if HOW.startswith("wait"):
        wait(LAST)
    if HOW == "nobody uses MPI" or (HOW == "leaves early" and LAST):
        return 0
    if HOW in ("goes hard", "goes hard, missed") and LAST:
        os._exit(0)
    if HOW == "goes hard":
        return 0
    if HOW == "goes hard, missed":
        time.sleep(2.0)  # a launcher that sees MPI used already minds
    if HOW == "is killed" and LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "is killed":
        return 0
    if HOW == "debug variable" and LAST:
        os.environ["MESHMPI_DEBUG"] = "collectives"
    mesh = mm.Mesh({"rows": size_by_environment()}, debug=True if HOW == "debug mesh" and LAST else None)
    if LAST and ("child" in HOW or HOW == "subprocess"):
        child_ends()
        if os.getpid() != int(os.environ.setdefault("ENDS_PID", str(os.getpid()))):
            return 4
    compiled(mesh, HOW == "debug step" and LAST)
    print(f"rank {mesh.rank} is done", flush=True)
    return 0


if __name__ == "__main__":
    os.environ["ENDS_PID"] = str(os.getpid())
    sys.exit(main())
