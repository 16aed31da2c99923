"""Signals that ask a run to stop: noted when they arrive, acted on where it can be left.

Batch systems send SIGTERM before they kill, SIGUSR1 when told to warn earlier; Ctrl-C is SIGINT.
Further SIGTERM and SIGUSR1 change nothing (Slurm sends them twice); a second SIGINT ends at once.
Knows nothing of ranks: what they agree on is `meshmpi.train.stopping`'s.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Any

STOPPED = 75
"""Exit status of a run that was asked to stop: start it again.  EX_TEMPFAIL of sysexits.h."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PATIENCE_SECONDS = 5.0
"""How long a program that has nothing to save yet may take to reach a place where all ranks leave
together; then it is ended where it stands.  Assumption: most models compile within it."""

_open: list[StopSignals] = []
_has_work = threading.Event()


def noted() -> str:
    """Name of the first signal that arrived while any `StopSignals` was open, or empty."""
    return next((s.name for s in _open if s.name), "")


class StopSignals:
    """While it is open, the signals are noted; afterwards they act as before.  May be nested.

    Attributes:
        name: Of the first signal that arrived, such as "SIGTERM"; empty before.
    """

    def __init__(self) -> None:
        self.name = ""
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: object) -> None:
        again, self._interrupted = self._interrupted, number == signal.SIGINT or self._interrupted
        for each in _open:
            each.name = each.name or signal.Signals(number).name
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        _open.append(self)
        # Python lets only the main thread set handlers; elsewhere the process keeps its own.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        _open.remove(self)


# ---- a whole program -------------------------------------------------------------------------


def listen_for_life() -> None:
    """Notes the signals from now to the end of the process, for the main of a training program.

    Signals that the launcher has blocked until now (`blocked_prefix`) arrive here.  Until
    `work_begins` is called, a signal also ends the program within PATIENCE_SECONDS, by exit status
    STOPPED; from the start of the exit on, signals change nothing any more.
    """
    if _open or threading.current_thread() is not threading.main_thread():
        return
    StopSignals().__enter__()
    atexit.register(_ignore)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python runs handlers between bytecodes only; this tells also during a long call into C.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_leave_in_time, args=(reading,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def work_begins() -> None:
    """Says that from now on there is something to save before the program may end."""
    _has_work.set()


def blocked_prefix() -> list[str]:
    """What to put before a command that calls `listen_for_life`, so that no signal comes too early.

    Empty where ``env`` cannot do that (other than GNU's, from 8.31 on).
    """
    names = ",".join(s.name.removeprefix("SIG") for s in STOP_SIGNALS)
    word = f"--block-signal={names}"
    if not sys.platform.startswith("linux"):
        return []
    import subprocess

    try:
        done = subprocess.run(["env", word, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ["env", word] if done.returncode == 0 else []


def _leave_in_time(reading: int) -> None:
    while (numbers := os.read(reading, 1)) and numbers[0] not in STOP_SIGNALS:
        pass
    if _has_work.wait(PATIENCE_SECONDS):
        return
    from meshmpi.runtime import abort

    name = signal.Signals(numbers[0]).name
    text = f"stopped by {name} before the first step: there is nothing to save.\n"
    abort.end_job(text, STOPPED)  # returns where no job of several ranks has begun
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(STOPPED)


def _ignore() -> None:
    # While it shuts down, Python gives signals their default action back, except ignored ones.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
