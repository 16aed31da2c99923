"""Reports an error of a rank once and ends the job on all ranks by MPI_Abort, without a hang.

Uses mpi4py only if it is already initialised, and never imports it first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from types import ModuleType, TracebackType

from meshmpi.errors import without_library
from meshmpi.guard import flight, outcome
from meshmpi.guard.rings import Host

STAGGER_SECONDS, STAGGER_STEP, STAGGER_RANKS = 1.0, 0.25, 12
"""Rank r > 0 waits STAGGER_SECONDS + STAGGER_STEP * min(r - 1, STAGGER_RANKS) before it reports, so
that an error that all ranks raise is reported once, by rank 0.  At most 4 s, within the 10 s
promised.  Measured with Open MPI 5 on one machine: 10 ms after MPI_Abort all ranks are gone."""
SETTLE_SECONDS = 0.1
"""Between report and MPI_Abort, so that the launcher shows the report before its own notices."""
REPORT_SECONDS = 3.0
"""After this time a rank that is still busy reporting or aborting is ended hard.  Seen with a heap
that Open MPI had damaged (ranks gave unequal counts): formatting the traceback never returned."""
HARD_SECONDS = 8.0
"""A rank that still runs this long after another one claimed the end kills itself."""


_lock = threading.Lock()
_speaks_in = 0
_host: Host | None = None


def speak() -> bool:
    """Lets this process report and end its job, but none that it forks; False where it could already."""
    global _speaks_in
    new = _speaks_in != os.getpid()
    _speaks_in = os.getpid()
    return new


def speaks() -> bool:
    """Whether this process is the one that called `speak`."""
    return _speaks_in == os.getpid()


def settle_with(host: Host) -> None:
    """Has the ranks of this host settle which of them ends the job."""
    global _host
    _host = host


def running_mpi() -> ModuleType | None:
    """mpi4py.MPI when this process is a rank of a running job of several; never initialises MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not speaks():
        return None
    if not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.size == 1:
        return None
    return module


def stagger_seconds(rank: int) -> float:
    """How long a rank waits before it reports an error that rank 0 may have as well."""
    return STAGGER_SECONDS + STAGGER_STEP * min(rank - 1, STAGGER_RANKS) if rank else 0.0


def fail_job(error: BaseException, tb: TracebackType | None, thread: str, status: int) -> None:
    """Ends the job of several ranks with the traceback of an error; returns where there is none."""
    mpi = running_mpi()
    if mpi is not None:
        _wait_for_turn(mpi)
        _end(mpi, thread, report(error, tb), status)


def end_job(text: str, status: int, at_once: bool = False, claimed: bool = False) -> None:
    """Ends the job of several ranks with a message of whole lines; returns where there is none.

    Where all ranks call this, only rank 0's message is shown.  ``at_once``: the caller is alone and waits
    for no other rank's turn; ``claimed``: it has claimed the end of the job already.
    """
    mpi = running_mpi()
    if mpi is not None:
        if not at_once:
            _wait_for_turn(mpi)
        _end(mpi, "", text, status, claimed)


def _wait_for_turn(mpi: ModuleType) -> None:
    turn = stagger_seconds(mpi.COMM_WORLD.rank)
    _end_hard_after(turn + REPORT_SECONDS)
    time.sleep(turn)


def _end_hard_after(seconds: float) -> None:
    """Shows all stacks and calls _exit(1) unless the process has ended by then.

    A thread in C does it that needs neither the interpreter nor the heap; the launcher then ends
    the other ranks, because one has gone without MPI_Finalize.  Should the stacks be damaged as
    well, the kernel ends the process a second later.
    """
    if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _end(mpi: ModuleType, thread: str, text: str, status: int, claimed: bool = False) -> None:
    if not claimed and _host is not None and not _host.claim():  # another rank of this host does it
        _end_hard_after(HARD_SECONDS)
        time.sleep(2 * HARD_SECONDS)
    with _lock:  # two threads that fail together make one report
        _end_hard_after(REPORT_SECONDS)
        world, ring = mpi.COMM_WORLD, flight.ring()
        flush()
        if text:
            sys.stderr.write(f"[rank {world.rank} of {world.size}{thread}] {text}")
        flush()
        time.sleep(SETTLE_SECONDS)
        if _host is not None:
            _host.clean()
        elif ring is not None:
            ring.remove()
        outcome.tell(status, text)
        world.Abort(status)


def flush() -> None:
    """Writes out what is still in the buffers of stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def report(error: BaseException, tb: TracebackType | None) -> str:
    """The traceback as text; for meshmpi's own errors without the frames inside meshmpi."""
    return "".join(traceback.format_exception(type(error), error, without_library(error, tb)))
