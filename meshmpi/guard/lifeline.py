"""Ends a rank when the process that started it (mpirun, its daemon on another host, Slurm's) is gone.

A killed launcher cannot end its ranks, which would otherwise run or wait for ever. A blocked thread waits for its
end. The thread cannot run while MPI_Init holds the interpreter; Open MPI ends such a rank itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time

from meshmpi.guard import flight
from meshmpi.guard.exit_status import LOST
from meshmpi.job import IDENTITY, rank_by_environment
from meshmpi.runtime import processes

WAKE_SECONDS = 1.0
"""Where the kernel does not tell the end of a process (Linux before 5.3)."""
SETTLE_SECONDS = 2.0
"""A launcher that ends in order has just told its ranks to end, too."""
OFF_VARIABLE = "MESHMPI_WATCHDOG"
"""``0`` keeps ranks from watching anything."""
_watched_in = 0


def watch() -> None:
    """Begins to watch whoever started this rank.  Further calls, and calls outside, do nothing."""
    global _watched_in
    if _watched_in == os.getpid() or os.environ.get(OFF_VARIABLE) == "0":
        return
    starter = processes.starter(IDENTITY)
    if starter is not None:
        _watched_in = os.getpid()
        threading.Thread(target=_watch, args=starter, name="meshmpi lifeline", daemon=True).start()


def _watch(pid: int, started: int) -> None:
    wait_for_end(pid, started)
    time.sleep(SETTLE_SECONDS)
    with contextlib.suppress(OSError, ValueError):  # who read it is mostly gone as well
        sys.stderr.write(
            f"meshmpi: rank {rank_by_environment()} ends, as the process that started it (pid {pid}) is gone.\n"
        )
        sys.stderr.flush()
    if (ring := flight.ring()) is not None:
        ring.remove()
    os._exit(LOST)


def wait_for_end(pid: int, started: int) -> None:
    """Returns when a process has ended; it need not be a child."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # it has ended, or there is no such call
            fd = os.pidfd_open(pid)
            try:
                if processes.state(pid, started) != "gone":
                    poll = select.poll()
                    poll.register(fd, select.POLLIN)
                    poll.poll()
            finally:
                os.close(fd)
    while processes.state(pid, started) != "gone":
        time.sleep(WAKE_SECONDS)
