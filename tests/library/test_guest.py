"""A guest in the user's process: what the interpreter is like before and after, and plain ``mpirun python``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmpi.guard.exit_status import LOST
from meshmpi.launch.launch import TIMED_OUT, launch

ROOT = Path(__file__).parents[2]
STATE = """
import atexit, builtins, faulthandler, gc, logging, os, signal, sys, threading, warnings
import numpy, threadpoolctl

def state():
    return {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "sys.exit": sys.exit,
        "builtins": dict(vars(builtins)),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "environment": dict(os.environ),
        "threads": [t.name for t in threading.enumerate()],
        "thread settings": [(i["filepath"], i["num_threads"]) for i in threadpoolctl.threadpool_info()],
        "affinity": os.sched_getaffinity(0),
        "path": list(sys.path),
        "finders": (list(sys.meta_path), list(sys.path_hooks)),
        "faulthandler": faulthandler.is_enabled(),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "warnings": list(warnings.filters),
        "logging": list(logging.root.handlers),
        "floating point": numpy.geterr(),
        "folder": os.getcwd(),
    }

def compare(before, when):
    after = state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"{when} changes {changed}"

before = state()
"""
IMPORT = """
exits = atexit._ncallbacks()
import meshmpi as mm
compare(before, "the import")
assert atexit._ncallbacks() == exits, "the import registers something for the end"
assert "mpi4py" not in sys.modules and "meshmpi.guard" not in sys.modules
with mm.Graph():
    y = mm.square(mm.placeholder("x", "batch:4"))
mm.compile(y.graph, mm.SimulatedMesh("all:2"), "batch:all", fetches=[y])(x=numpy.ones(4))
compare(before, "a step on a simulated mesh")
"""
RANK = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}


@pytest.mark.parametrize("environment", [{}, RANK], ids=["alone", "a rank of a job"])
def test_an_import_changes_nothing(environment: dict[str, str]):
    done = subprocess.run(
        [sys.executable, "-c", STATE + IMPORT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def plainly(code: str, ranks: int = 2):
    """A job as ``mpirun python -c`` starts it, without the launcher's own start."""
    command = ["--", sys.executable, "-c", code]
    return launch(ranks, command, timeout_seconds=60, capture_output=True, cwd=ROOT)


def test_a_mesh_gives_back_what_it_takes():
    """MPI's own threads and variables are there once it is initialised, so it is before."""
    done = plainly(
        "import mpi4py.MPI\n"
        + STATE
        + """
import meshmpi as mm
with mm.Mesh("all:2") as mesh:
    with mm.Mesh("all:2"):
        pass
    assert sys.excepthook is not before["sys.excepthook"], "errors end the job"
    assert threading.excepthook is not before["threading.excepthook"]
after = state()
for name in ("threads",):  # the watchdog stays until the ranks leave
    del before[name]
compare(before, "a mesh that was freed")
sys.excepthook = lambda *a: None
theirs = sys.excepthook
with mm.Mesh("all:2"):
    sys.excepthook = last = lambda *a: None
assert sys.excepthook is last, "a hook that came later stays"
"""
    )
    assert done.returncode == 0, done.stderr


MESH = """
import sys, time
import numpy as np
import meshmpi as mm
mesh = mm.Mesh("all:2")
mesh.all_reduce(np.ones(3), "all")
"""


def test_a_rank_that_leaves_by_sys_exit_is_found():
    """Its status is not known, but others wait for it in a collective."""
    began = time.monotonic()
    done = plainly(MESH + "if mesh.rank: sys.exit(3)\nmesh.all_reduce(np.ones(3), 'all')")
    assert done.returncode not in (0, TIMED_OUT, LOST) and time.monotonic() - began < 40
    assert "HangError: rank 1 left the program while other ranks still run" in done.stderr, done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("status", [0, 3])
def test_ranks_leave_at_different_times(status: int):
    done = plainly(MESH + f"time.sleep(7 * mesh.rank)\nsys.exit({status})")
    assert done.returncode == status and "HangError" not in done.stderr, done.stderr


def test_an_uncaught_error_ends_the_job():
    done = plainly(MESH + "if mesh.rank: raise ValueError('by order')\nmesh.all_reduce(np.ones(3), 'all')")
    assert done.returncode == 1
    assert "[rank 1 of 2] Traceback" in done.stderr and done.stderr.count("ValueError: by order") == 1


def test_meshes_need_nobody_who_watches():
    """The runtime alone: what the guard does it does by hooks."""
    done = plainly(
        """
import sys
import numpy as np
import meshmpi as mm
from meshmpi.runtime import hooks
from meshmpi.runtime.operands import AllReduce
hooks.on_first_mesh(None)
hook = sys.excepthook
with mm.Mesh("rows:2;cols:1") as mesh:
    x = np.ones(3)
    mesh.all_reduce(x, "rows")
    mesh.bind(AllReduce(x, ("rows", "cols")))()
    assert x.tolist() == [4.0] * 3
    assert mesh.counters["all_reduce"]["rows"][:2] == [1, 3]
    assert mesh.hosts == 1 and not mesh.simulated
assert sys.excepthook is hook
assert not [name for name in sys.modules if name.startswith("meshmpi.guard")]
"""
    )
    assert done.returncode == 0, done.stderr
