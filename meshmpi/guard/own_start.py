"""What a rank gets where meshmpi itself starts the program: by the launcher, or as the command ``meshmpi``.

Its errors are reported once for the job, with the user's lines only, also before there is a mesh; ranks that wait for
it are told when it leaves; it ends when its launcher is gone; a child that it forks leaves without a word to MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from meshmpi.errors import MeshmpiError, users_lines
from meshmpi.guard import abort, ending, exit_status
from meshmpi.runtime import processes
from meshmpi.runtime.world import IDENTITY, in_job, on_several_hosts, rank_by_environment, size_by_environment

PATIENCE_SECONDS = 5.0
"""How long a rank that is not the first waits for the launcher to end it, before MPI is there.
Assumption: ranks reach the same error within this time; measured on two cores with other load: 1 s
is too short for four ranks that are being started."""
_begun_in = 0


def begin() -> None:
    """Takes charge of this process for its whole life.  Further calls do nothing."""
    global _begun_in
    if _begun_in == os.getpid():
        return
    _begun_in = os.getpid()
    if in_job():
        atexit.register(_leave)
    abort.mesh_begins()
    sys.excepthook = users_lines(_in_turn(sys.excepthook) if in_job() else sys.excepthook)


def give_place() -> None:
    """Has this process leave without MPI: a child takes its place as a rank, from start to end."""
    atexit.unregister(_leave)


def _leave() -> None:
    if os.getpid() != _begun_in:
        _leave_as_child()
    elif "mpi4py.MPI" in sys.modules or _others_may_wait():
        abort.leave_unmet()


def _leave_as_child() -> None:
    if "mpi4py.MPI" in sys.modules:
        ending.flush()
        os._exit(exit_status.pending() or 0)


def _others_may_wait() -> bool:
    """Starts MPI where this rank leaves without it: others would wait for it in MPI_Init for ever.

    Others that have no MPI in their memory do not wait yet; they are waited for, or may go first.
    A rank that failed ends the others by its status.  A process that a rank has started is not a
    rank; one that a script around it has started may be one of several, so nothing is done.
    """
    started_by = processes.starter(IDENTITY)
    if exit_status.pending() or size_by_environment() == 1:
        return False
    if started_by is None or started_by[0] != os.getppid():
        return False
    processes.call_leaving()
    nap = 0.01
    while not on_several_hosts():  # of others nothing is seen here: MPI will tell
        others = processes.others_below(started_by[0])
        if not others:
            return False
        if any(processes.has_mapped(pid, "libmpi") for pid in others):
            break
        time.sleep(nap)
        nap = min(2 * nap, 1.0)
    try:
        from meshmpi.runtime.mpi import MPI
    except (ImportError, RuntimeError):  # there is no MPI here, so nobody waits in it
        return False
    return MPI.Is_initialized() and not MPI.Is_finalized()


def _in_turn(previous: Callable[..., Any]) -> Callable[..., Any]:
    """The hook of a rank: one that is not the first waits; by then the launcher has ended it."""

    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if isinstance(error, MeshmpiError) and rank_by_environment() and ending.running_mpi() is None:
            time.sleep(PATIENCE_SECONDS)
        previous(kind, error, tb)

    return show
