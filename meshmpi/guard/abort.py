"""Ends the job on all ranks when one has an error: one traceback, no hang; an uncaught exception calls MPI_Abort.

Changes `sys.excepthook` and `threading.excepthook` and adds an atexit function once a mesh of several ranks is made
or meshmpi runs the program (`begin`). The hooks are restored when the last mesh is freed (docs/hangs.md).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from meshmpi.errors import MeshmpiError, users_lines
from meshmpi.guard import ending, exit_status, flight, lifeline, meeting, outcome, recovery, watchdog
from meshmpi.job import IDENTITY, alone, in_job, on_several_hosts, rank_by_environment
from meshmpi.runtime import processes

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

LEAVE_SECONDS = 5.0
"""How long a rank that failed by its exit status waits for the others to leave as well.
Assumption: ranks that all give up at the same step differ by less."""
PATIENCE_SECONDS = 5.0
"""How long a rank that is not the first waits for the launcher to end it, before MPI is there.
Assumption: ranks reach the same error within this time; measured on two cores with other load: 1 s
is too short for four ranks that are being started."""
_begun_in = 0
_leaving: list[MPI.Comm] = []
_keyvals: list[int] = []
_previous: tuple[Any, Any] | None = None
_ours: tuple[Any, Any] | None = None
_meshes = 0


def install(comm: MPI.Intracomm) -> None:
    """Makes errors of any rank of ``comm`` end the job.  Collective; once for a communicator."""
    from meshmpi.runtime.mpi import MPI

    if comm.size == 1:
        return
    install_hooks()
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval())
        recovery.at_shrinking(_leaving.clear)  # the lost ranks of earlier communicators leave no more
    if comm.Get_attr(_keyvals[0]) is None:  # on all its ranks or on none: install is collective
        comm.Set_attr(_keyvals[0], True)
        _leaving.append(recovery.made(comm, comm.Dup))


def install_hooks() -> None:
    """The part of `install` that needs no MPI: it may be called first thing in a program.

    Exceptions then end the job as soon as MPI is initialised by whoever; a single process behaves
    as ever.  Further calls do nothing.
    """
    global _previous, _ours
    if ending.speak():
        atexit.register(_leave)
        lifeline.watch()
    if _previous is None:
        _previous = sys.excepthook, threading.excepthook
        _ours = _main_hook(sys.excepthook), _thread_hook(threading.excepthook)
        sys.excepthook, threading.excepthook = _ours


def mesh_begins() -> None:
    """A mesh of several ranks is about to be made."""
    global _meshes
    _meshes += 1
    install_hooks()


def mesh_ends() -> None:
    """A mesh was freed; after the last one the exception hooks are those of before, unless others came."""
    global _meshes, _previous, _ours
    _meshes -= 1
    if _meshes or _previous is None or _ours is None:
        return
    if (sys.excepthook, threading.excepthook) == _ours:
        sys.excepthook, threading.excepthook = _previous
        _previous = _ours = None


def _main_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        status = 130 if issubclass(kind, KeyboardInterrupt) else 1
        ending.fail_job(error, tb, "", status)
        if ending.speaks():
            exit_status.ended(status)
        previous(kind, error, tb)

    return show


def _thread_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def show(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            thread = f" in thread {args.thread.name}" if args.thread else ""
            ending.fail_job(args.exc_value, args.exc_traceback, thread, 1)
        previous(args)

    return show


UNKNOWN_END = (
    "meshmpi: ranks were lost, and by which status this one ends is not known, as it was not started by meshmpi: it"
    f" ends by {exit_status.LOST}. Start the script by python -m meshmpi.launch, then its own status is given."
)


def _leave() -> None:
    """Runs at exit: all ranks leave together, or a failing one ends the job."""
    mpi, status = ending.running_mpi(), exit_status.pending()
    ring, dog = flight.ring(), watchdog.current()
    if ring is not None:
        ring.leaving(status)
    if mpi is not None and _leaving:
        _all_here(mpi, status)
        if dog is not None:
            dog.last_look(_leaving)  # files of ranks are there until all have looked
        _all_here(mpi, status)
    watchdog.left()
    if mpi is not None and recovery.lost_some():
        if status is None:
            sys.stderr.write(f"{UNKNOWN_END}\n")
            status = exit_status.LOST
        ending.flush()
        outcome.tell(status)
        os._exit(status)  # MPI_Finalize of Open MPI 5.0.11 may wait for lost ranks for ever


# ---- where meshmpi itself starts the program --------------------------------------------------


def begin() -> None:
    """Takes charge of this process for its whole life, where the launcher or ``meshmpi`` runs the program.

    Errors are reported once for the job, with the user's lines only, also before there is a mesh; ranks that wait for
    the first mesh are told when this one leaves; a child that it forks leaves without a word to MPI.
    """
    global _begun_in
    if _begun_in == os.getpid():
        return
    _begun_in = os.getpid()
    if in_job():
        atexit.register(_leave_last)
    mesh_begins()  # one that never ends
    sys.excepthook = users_lines(_in_turn(sys.excepthook) if in_job() else sys.excepthook)


def give_place() -> None:
    """Has this process leave without MPI: a child takes its place as a rank, from start to end."""
    atexit.unregister(_leave_last)


def _leave_last() -> None:
    """Runs at exit, after `_leave`: has ranks that wait for the first mesh know that this one left without."""
    if os.getpid() != _begun_in:
        if "mpi4py.MPI" in sys.modules:
            ending.flush()
            os._exit(exit_status.pending() or 0)
    elif "mpi4py.MPI" in sys.modules or _others_may_wait():
        install_hooks()
        status = exit_status.pending()
        # What outlives its ranks has a way of its own.
        if ending.running_mpi() is not None and not recovery.watching():
            meeting.leave(status, LEAVE_SECONDS, lambda: _gave_up(status))


def _others_may_wait() -> bool:
    """Starts MPI where this rank leaves without it: others would wait for it in MPI_Init for ever.

    Others that have no MPI in their memory do not wait yet; they are waited for, or may go first.
    A rank that failed ends the others by its status.  A process that a rank has started is not a
    rank; one that a script around it has started may be one of several, so nothing is done.
    """
    started_by = processes.starter(IDENTITY)
    if exit_status.pending() or alone():
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


# ---- all together -----------------------------------------------------------------------------


def _gave_up(status: int | None) -> None:
    text = f"left the program by exit status {status} while other ranks still run: the job is ended.\n"
    ending.end_job(text, status or 1, at_once=True)


def _all_here(mpi: ModuleType, status: int | None) -> None:
    """Waits until all ranks are here; ends the job if they do not come to one that failed."""
    requests = [comm.Ibarrier() for comm in _leaving]
    limit = time.monotonic() + LEAVE_SECONDS if status else None
    nap = 1e-4
    while not _all_left(mpi, requests):
        if limit is not None and time.monotonic() > limit:
            _gave_up(status)
        time.sleep(nap)  # healthy ranks may wait long for a slow one; do not burn its core
        nap = min(2 * nap, 0.02)


def _all_left(mpi: ModuleType, requests: list[MPI.Request]) -> bool:
    try:
        return mpi.Request.Testall(requests)
    except mpi.Exception as error:
        if not recovery.is_loss(error):
            raise
        return True  # in a job that outlives its ranks, who is lost has left
