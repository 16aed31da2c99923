"""Failing together: an error on one rank ends the job on all, with one traceback and no hang.

Plain Python under mpirun hangs when one rank raises: the rank waits in MPI_Finalize for the
others, they wait for it in a collective.  Here an uncaught exception, in any thread, calls
MPI_Abort; a rank that leaves with a status other than 0 gives the others a few seconds to leave
too, then aborts.

Not known here: meshes, programs.  mpi4py is used only when it is initialised, never imported first.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from meshmpi.errors import without_library
from meshmpi.runtime import exit_status, meeting, recovery, watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

LEAVE_SECONDS = 5.0
"""How long a rank that failed by its exit status waits for the others to leave as well.
Assumption: ranks that all give up at the same step differ by less."""
UNSEEN_SECONDS = 60.0
"""The same for a rank that left by a SystemExit whose code is unknown: it may well have been 0.
Assumption: a compromise between ending a healthy job and waiting for ever."""
STAGGER_SECONDS, STAGGER_STEP, STAGGER_RANKS = 1.0, 0.25, 12
"""Rank r > 0 waits STAGGER_SECONDS + STAGGER_STEP * min(r - 1, STAGGER_RANKS) before it reports, so
that an error that all ranks raise is reported once, by rank 0.  At most 4 s, within the 10 s
promised.  Measured with Open MPI 5 on one machine: 10 ms after MPI_Abort all ranks are gone."""
SETTLE_SECONDS = 0.1
"""Between report and MPI_Abort, so that the launcher shows the report before its own notices."""
REPORT_SECONDS = 3.0
"""After this time a rank that is still busy reporting or aborting is ended hard.  Seen with a heap
that Open MPI had damaged (ranks gave unequal counts): formatting the traceback never returned."""
_lock = threading.Lock()
_leaving: list[MPI.Comm] = []
_keyvals: list[int] = []
_installed_in: int | None = None


def install(comm: MPI.Intracomm) -> None:
    """Makes errors of any rank of ``comm`` end the job.  Collective; once for a communicator.

    Args:
        comm: An intracommunicator; with one rank nothing is done.
    """
    from mpi4py import MPI

    if comm.size == 1:
        return
    install_hooks()
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval())
    if comm.Get_attr(_keyvals[0]) is None:  # on all its ranks or on none: install is collective
        comm.Set_attr(_keyvals[0], True)
        _leaving.append(recovery.made(comm, comm.Dup))


def forget() -> None:
    """Ranks were lost and the others go on: those of earlier communicators leave no more."""
    _leaving.clear()


def install_hooks() -> None:
    """The part of `install` that needs no MPI: it may be called first thing in a program.

    Exceptions then end the job as soon as MPI is initialised by whoever; a single process behaves
    as ever.  Further calls do nothing.
    """
    global _installed_in
    if _installed_in is not None:
        return
    _installed_in = os.getpid()
    exit_status.watch()
    atexit.register(_leave)
    sys.excepthook = _main_hook(sys.excepthook)
    threading.excepthook = _thread_hook(threading.excepthook)


def _running_mpi() -> ModuleType | None:
    """mpi4py.MPI when this process is a rank of a running job of several; never initialises MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or os.getpid() != _installed_in:  # a forked child must not speak for us
        return None
    if not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.size == 1:
        return None
    return module


def _main_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        mpi = _running_mpi()
        if mpi is None:
            previous(kind, error, tb)
        else:
            _fail(mpi, error, tb, "", 130 if issubclass(kind, KeyboardInterrupt) else 1)

    return report


def _thread_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def report(args: threading.ExceptHookArgs) -> None:
        mpi = _running_mpi()
        if mpi is None or args.exc_value is None or issubclass(args.exc_type, SystemExit):
            previous(args)
        else:
            thread = f" in thread {args.thread.name}" if args.thread else ""
            _fail(mpi, args.exc_value, args.exc_traceback, thread, 1)

    return report


def _fail(
    mpi: ModuleType, error: BaseException, tb: TracebackType | None, thread: str, status: int
) -> None:
    """Reports the error in its turn and ends the job."""
    _wait_for_turn(mpi)
    _end(mpi, thread, report(error, tb), status)


def stagger_seconds(rank: int) -> float:
    """How long a rank waits before it reports an error that rank 0 may have as well."""
    return STAGGER_SECONDS + STAGGER_STEP * min(rank - 1, STAGGER_RANKS) if rank else 0.0


def end_job(text: str, status: int) -> None:
    """Ends the job of several ranks, with a message in place of a traceback.

    Returns, having done nothing, where no such job has begun.

    Args:
        text: Whole lines; where all ranks call this, only rank 0's are shown.
        status: The exit status of the job.
    """
    mpi = _running_mpi()
    if mpi is not None:
        _wait_for_turn(mpi)
        _end(mpi, "", text, status)


def end_now(text: str, status: int) -> None:
    """As `end_job`, without waiting for the turn of lower ranks: for who knows that it is alone."""
    mpi = _running_mpi()
    if mpi is not None:
        _end(mpi, "", text, status, claimed=True)


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
    if not claimed and not watchdog.claim():  # another rank of this host reports and ends the job
        _end_hard_after(watchdog.HARD_SECONDS)
        time.sleep(2 * watchdog.HARD_SECONDS)
    with _lock:  # two threads that fail together make one report
        _end_hard_after(REPORT_SECONDS)
        world = mpi.COMM_WORLD
        _flush()
        if text:
            sys.stderr.write(f"[rank {world.rank} of {world.size}{thread}] {text}")
        _flush()
        time.sleep(SETTLE_SECONDS)
        watchdog.clean()
        world.Abort(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def report(error: BaseException, tb: TracebackType | None) -> str:
    """The traceback as text; for meshmpi's own errors without the frames inside meshmpi.

    Args:
        error: The exception.
        tb: Its traceback.
    """
    return "".join(traceback.format_exception(type(error), error, without_library(error, tb)))


def _leave() -> None:
    """Runs at exit: all ranks leave together, or a failing one ends the job."""
    mpi, status = _running_mpi(), exit_status.pending()
    watchdog.leave(status)
    if mpi is not None and _leaving:
        _leave_together(mpi, status)
    watchdog.left()
    if mpi is not None and status is not None and recovery.lost_some():
        _flush()
        os._exit(status)  # MPI_Finalize of Open MPI 5.0.11 may wait for lost ranks for ever


def leave_unmet() -> None:
    """Runs at exit, after `_leave`: has ranks that wait for the first mesh know that this one left.

    Also where `install` was never called, because this rank came to no mesh.
    """
    install_hooks()
    mpi, status = _running_mpi(), exit_status.pending()
    if mpi is None or recovery.watching():  # what outlives its ranks has a way of its own
        return
    patience = UNSEEN_SECONDS if status is None else LEAVE_SECONDS
    meeting.leave(status, patience, lambda: _gave_up(mpi, status))


def _gave_up(mpi: ModuleType, status: int | None) -> None:
    how = "SystemExit" if status is None else f"exit status {status}"
    text = f"left the program by {how} while other ranks still run: the job is ended.\n"
    _end(mpi, "", text, status or 1)


def _leave_together(mpi: ModuleType, status: int | None) -> None:
    _all_here(mpi, status)
    watchdog.last_look(_leaving)  # files of ranks are there until all have looked
    _all_here(mpi, status)


def _all_here(mpi: ModuleType, status: int | None) -> None:
    """Waits until all ranks are here; ends the job if they do not come to one that failed."""
    requests = [comm.Ibarrier() for comm in _leaving]
    patience = UNSEEN_SECONDS if status is None else LEAVE_SECONDS
    limit = None if status == 0 else time.monotonic() + patience
    nap = 1e-4
    while not _all_left(mpi, requests):
        if limit is not None and time.monotonic() > limit:
            _gave_up(mpi, status)
        time.sleep(nap)  # healthy ranks may wait long for a slow one; do not burn its core
        nap = min(2 * nap, 0.02)


def _all_left(mpi: ModuleType, requests: list[MPI.Request]) -> bool:
    try:
        return mpi.Request.Testall(requests)
    except mpi.Exception as error:
        if not recovery.is_loss(error):
            raise
        return True  # in a job that outlives its ranks, who is lost has left
