"""What is shown of an error that nobody caught: the user's lines, and once for a whole job.

`meshmpi.runtime.abort` sees to errors of a job whose ranks have met in a mesh.  Before, while
graphs are built, every rank raises the same error and knows of no other; here the first one tells.
Imported with meshmpi, so it imports little.  Knows nothing of meshes or programs.
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
from meshmpi.runtime import exit_status
from meshmpi.runtime.world import in_job, rank_by_environment

PATIENCE_SECONDS = 5.0
"""How long a rank that is not the first waits for the launcher to end it, before MPI is there.
Assumption: ranks reach the same error within this time; measured on two cores with other load: 1 s
is too short for four ranks that are being started."""
_watched_in = 0
"""The process, where it is a rank of a job."""


def watch() -> None:
    """Puts itself before the hook for uncaught exceptions; what comes later goes first.

    A rank of a job that leaves tells the others, too: they may wait for it in their first mesh.
    """
    global _watched_in
    if in_job() and not _watched_in:
        _watched_in = os.getpid()
        exit_status.watch()
        atexit.register(_leave)
    sys.excepthook = users_lines(_in_turn(sys.excepthook) if in_job() else sys.excepthook)


def _leave() -> None:
    if "mpi4py.MPI" in sys.modules and os.getpid() == _watched_in:  # else a forked child
        from meshmpi.runtime import abort

        abort.leave_unmet()


def _in_turn(previous: Callable[..., Any]) -> Callable[..., Any]:
    """The hook of a rank: one that is not the first waits; by then the launcher has ended it."""

    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if "mpi4py.MPI" in sys.modules and os.getpid() == _watched_in:
            from meshmpi.runtime import abort

            # Where MPI runs, started by the user: a rank that just left would wait for the others.
            abort.install_hooks()
            interrupted = issubclass(kind, KeyboardInterrupt)
            abort.end_job(abort.report(error, tb), 130 if interrupted else 1)
        if isinstance(error, MeshmpiError) and rank_by_environment():
            time.sleep(PATIENCE_SECONDS)
        previous(kind, error, tb)

    return show
