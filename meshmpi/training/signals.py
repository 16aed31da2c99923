"""Signals that ask a run to stop: recorded when they arrive, handled where the run can be left.

Batch systems send SIGTERM before they kill, and SIGUSR1 as an early warning; Ctrl-C is SIGINT. Further SIGTERM and
SIGUSR1 change nothing (Slurm sends them twice); a second SIGINT ends the run at once. A launching process forwards
all of them as SIGUSR1, and writes the name of the original signal to a file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED = 75
"""Exit status of a run that was asked to stop: start it again.  EX_TEMPFAIL of sysexits.h."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PATIENCE_SECONDS = 5.0
"""A program with nothing to save may take this long to reach a place where all ranks leave together;
then it is ended where it is.  Assumption: most models compile within it."""
TOLD_VARIABLE = "MESHMPI_STOP_SIGNAL"
"""Names the file in which a launching process writes the name of the first signal that it got,
unless that is SIGUSR1, which ranks get anyway."""
AT_LAUNCH = " at the launching process"

_open: list[StopSignals] = []
_has_work = threading.Event()
_first: list[str] = []  # the name of the first signal: only this one counts
_files: list[Path] = []  # the ranks of a running job read them
_telling = threading.RLock()  # a handler may interrupt another one


def noted() -> str:
    """Name of the first signal that arrived while any `StopSignals` was open, or empty."""
    return next((s.name for s in _open if s.name), "")


def described() -> str:
    """As `noted`, or, if the launching process forwarded the signal: "SIGINT at the launching process"."""
    return _origin(noted())


def _origin(name: str) -> str:
    if name != signal.SIGUSR1.name:
        return name
    from meshmpi.files import plain  # here: a program listens as early as it can
    from meshmpi.guard import outcome

    file, told = os.environ.get(TOLD_VARIABLE), outcome.stopped_by()
    # There is no file where the signal was sent to this rank, or no file system is shared.
    with contextlib.suppress(OSError, ValueError):
        told = plain.text(file, 64) if file else told
    return f"{told}{AT_LAUNCH}" if told.isalnum() else name


class StopSignals:
    """While it is open, the signals are noted; afterwards they act as before.  May be nested."""

    def __init__(self) -> None:
        self.name = ""  # of the first signal that arrived, such as "SIGTERM"
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
    `work_begins` is called, a signal also ends the program within PATIENCE_SECONDS, with exit status
    STOPPED.  Once the exit has begun, signals change nothing.
    """
    if _open or threading.current_thread() is not threading.main_thread():
        return
    StopSignals().__enter__()
    atexit.register(_ignore)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python runs handlers between bytecodes only; the pipe works during a long call into C too.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def work_begins() -> None:
    """Says that from now on there is something to save before the program may end."""
    _has_work.set()


def blocked_prefix() -> list[str]:
    """What to put before a command that calls `listen_for_life`, so that no signal comes too early.

    Empty where ``env`` cannot block signals; GNU's can from 8.31 on.
    """
    import subprocess

    prefix = ["env", f"--block-signal={','.join(s.name.removeprefix('SIG') for s in STOP_SIGNALS)}"]
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return prefix if done.returncode == 0 else []


def _watch(reading: int) -> None:
    """Waits for the first signal, tells ranks its name, and ends a program that has no work."""
    while (numbers := os.read(reading, 1)) and numbers[0] not in STOP_SIGNALS:
        pass
    name = signal.Signals(numbers[0]).name
    _tell(name)
    if _has_work.wait(PATIENCE_SECONDS):
        return
    from meshmpi.guard import ending, outcome

    text = f"stopped by {_origin(name)} before the first step: there is nothing to save.\n"
    ending.end_job(text, STOPPED)  # returns where no job of several ranks has begun
    sys.stderr.write(text)
    sys.stderr.flush()
    outcome.tell(STOPPED)
    os._exit(STOPPED)


# ---- a launching process ---------------------------------------------------------------------


@contextlib.contextmanager
def handing_on(run: Path | None) -> Iterator[dict[str, str]]:
    """While it is open, this process waits for a job and tells it which signal came; ranks use `described`.

    All hosts find the file next to the folder of the run; without one only this host does.

    Yields:
        Variables for the environment of the ranks.
    """
    work_begins()
    beside = Path(tempfile.gettempdir(), "meshmpi") if run is None else run.absolute()
    file = beside.with_name(f".{beside.name}.stop-{os.getpid()}-{secrets.token_hex(4)}")
    _files.append(file)
    _tell(noted())  # a signal may have come already
    try:
        yield {TOLD_VARIABLE: str(file)}
    finally:
        with _telling, contextlib.suppress(OSError):
            _files.remove(file)
            file.unlink()


def telling_before() -> bool:
    """Makes the present handlers write a signal's name for the ranks first; whether one has come already.

    The thread of `listen_for_life` may be late, where this process gets little of a core.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, partial(_tell_first, signal.getsignal(number)))
    return bool(noted())


def _tell_first(handler: Any, number: int, frame: FrameType | None) -> None:
    _tell(signal.Signals(number).name)
    if callable(handler):
        handler(number, frame)


def _tell(name: str) -> None:
    """Writes the name of the first signal where ranks look for it; they can do without."""
    with _telling:
        if name and not _first:
            _first.append(name)
        for file in _files if _first and _first[0] != signal.SIGUSR1.name else ():
            with contextlib.suppress(OSError):  # mostly because it exists already
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(file, "x") as told:
                    told.write(_first[0])


def _ignore() -> None:
    # While it shuts down, Python restores the default action of signals unless they are ignored.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
