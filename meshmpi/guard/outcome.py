"""The exit status of each rank, written by the rank into a file, because mpirun may return 0 after losing a host.

``python -m meshmpi.guard.outcome FOLDER RANKS STATUS``, for scripts, exits with the status of the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshmpi.errors import ConfigError, MeshError
from meshmpi.files import plain
from meshmpi.files.private import replacing
from meshmpi.guard.deadlock import named
from meshmpi.guard.exit_status import LOST
from meshmpi.hashes import sha256
from meshmpi.job import rank_by_environment
from meshmpi.runtime import processes

if TYPE_CHECKING:
    import subprocess

OUTCOME_VARIABLE = "MESHMPI_OUTCOME"
"""Names the folder; ranks take it out of their environment, for jobs that they start themselves."""
SHARED_VARIABLE = "MESHMPI_SHARED_FOLDER"
"""A folder that all hosts see, for the folder of a job on several hosts; default: where it runs."""
PATIENCE_SECONDS = 5.0
"""How long a file system of several hosts may take to show what another host has written."""
UNCLEAR = (0, 1)
"""Statuses with which mpirun ends whatever has become of the ranks."""
SILENT_SECONDS = 10.0
"""How long a job may run on after one of its ranks has gone without a word.  Where the rank used
MPI, the launcher or the watchdog ends the job long before."""
SIGNALS = 128
"""From this status on, the launcher says that a rank, or itself, was ended by a signal."""
_BEGUN = "begun"
"""Before the name of the process of a rank that has not told how it ends."""
_WITHOUT = "others lost"
"""After the status of a rank: it went on without ranks that were lost."""
_REPORT = "report-"
_LISTENS = "listens-"
_SIGNAL = "signal"
STOP_BY = signal.SIGUSR1
"""By which ranks that listen save and leave: launchers hand it on, and give ranks soon after SIGTERM no time."""
_MOST_REPORT_BYTES = 1 << 16
_MOST_BYTES = 128
"""Longest file of a rank that is read; the longest that is written has about half of that."""


_mine: Path | None = None  # the file of this rank
_pid = 0  # of the process that is the rank: a forked child is not
_told = 0


# ---- a rank ----------------------------------------------------------------------------------


def begin() -> None:
    """Says that this rank has begun, and will say how it ends; nothing where nobody asks."""
    global _mine, _pid
    folder = os.environ.pop(OUTCOME_VARIABLE, "")
    if not folder:
        return
    rank, host = rank_by_environment(), os.uname().nodename
    _mine, _pid = Path(folder, f"rank-{rank:05d}"), os.getpid()
    atexit.register(tell, 0)  # the first one runs last
    try:
        _write(f"{_BEGUN} {processes.mark()}")
    except OSError as error:
        _mine = None
        raise ConfigError(
            f"rank {rank} on host {host} cannot write to {folder} ({error.strerror}), where ranks"
            " tell that they are done.",
            f"Set {SHARED_VARIABLE} to a folder that all hosts see.",
        ) from None


def tell(status: int, report: str = "") -> None:
    """Says how this rank ends; a failure that was told stays.

    Of a ``report`` a copy is kept: what a rank prints last may be lost where its launcher ends the job.
    """
    global _told
    if _mine is None or _pid != os.getpid():
        return
    _told = _told or status
    recovery = sys.modules.get("meshmpi.guard.recovery")
    note = f" {_WITHOUT}" if recovery is not None and recovery.lost_some() else ""
    with contextlib.suppress(OSError):  # whoever reads takes this rank for lost
        _write(f"{_told}{note}")
        if report:
            path = _mine.with_name(_mine.name.replace("rank-", _REPORT))
            path.write_text(report[-_MOST_REPORT_BYTES:], errors="backslashreplace")


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """While it is open, this rank takes `STOP_BY` as the wish to save and leave: its launcher sends that."""
    listens = None if _mine is None else _mine.with_name(_mine.name.replace("rank-", _LISTENS))
    if listens is not None:
        with contextlib.suppress(OSError):  # then it is ended as any other program
            listens.touch()
    try:
        yield
    finally:
        if listens is not None:
            with contextlib.suppress(OSError):
                listens.unlink()


def stopped_by() -> str:
    """Name of the signal that the launching process got, if this rank was sent `STOP_BY` in its place."""
    if _mine is None:
        return ""
    with contextlib.suppress(OSError, ValueError):
        return plain.text(_mine.with_name(_SIGNAL), 64)
    return ""


def _write(text: str) -> None:
    assert _mine is not None
    with replacing(_mine, 0o644) as file:
        file.write(_content(_mine, text))


def _content(path: Path, text: str) -> bytes:
    """What a rank writes: with a hash, since one flipped bit turns a failure, 1, into 0."""
    seal = sha256(f"{path.parent.name}/{path.name} {text}".encode()).hexdigest()[:16]
    return f"{text} # {seal}\n".encode()


# ---- who started them ------------------------------------------------------------------------


@contextlib.contextmanager
def place(several_hosts: bool, beside: Path | None = None) -> Iterator[Path]:
    """An empty folder for one start of a job, which goes afterwards."""
    import shutil  # late: a rank does without these
    import tempfile

    shared = os.environ.get(SHARED_VARIABLE, "")
    roots = [Path(shared)] if shared else [beside] if beside else [Path.cwd(), Path.home()]
    for root in roots if several_hosts else [Path(tempfile.gettempdir())]:
        try:
            folder = Path(tempfile.mkdtemp(prefix=".meshmpi-job-", dir=root.absolute()))
        except OSError:
            continue
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    raise MeshError(
        f"the folder of the job cannot be made in {' or '.join(map(str, roots))}.",
        f"Set {SHARED_VARIABLE} to a folder that all hosts see and that you may write to.",
    )


def stopping_signal(folder: Path, number: int) -> int | None:
    """What to send a job instead of a signal: `STOP_BY` where its ranks listen, who are told the name; else None."""
    if number not in (signal.SIGTERM, signal.SIGINT) or not any(folder.glob(f"{_LISTENS}*")):
        return None
    with contextlib.suppress(OSError), open(folder / _SIGNAL, "x") as told:  # told before: the first one counts
        told.write(signal.Signals(number).name)
    return STOP_BY


class Outcome(NamedTuple):
    """What ranks have told."""

    begun: tuple[int, ...]  # ranks that have begun
    told: dict[int, int]  # Rank -> its exit status
    without: bool  # whether ranks went on without others that were lost
    damaged: tuple[int, ...] = ()  # ranks of which a file is there, but not as they wrote it
    gone: tuple[int, ...] = ()  # ranks of this host that have not told, and whose processes have ended


def read(folder: Path) -> Outcome:
    """What ranks have told so far."""
    begun, told, without = list[int](), dict[int, int](), False
    damaged, gone = list[int](), list[int]()
    for path in sorted(folder.glob("rank-*")):
        number = path.name.removeprefix("rank-")
        if not number.isdigit():
            continue
        begun.append(int(number))
        try:
            found = plain.contents(path, most=_MOST_BYTES)
        except OSError:
            found = b""
        text = found.partition(b" # ")[0].decode("ascii", "replace")
        if found != _content(path, text):
            damaged.append(int(number))
            continue
        status, _, note = text.partition(" ")
        if status == _BEGUN:
            gone += [int(number)] if processes.is_over(note) else []
        elif status:
            told[int(number)] = int(status)
            without |= note == _WITHOUT
    return Outcome(tuple(begun), told, without, tuple(damaged), tuple(gone))


@contextlib.contextmanager
def ended_by_silence(folder: Path, launcher: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Ends a job that runs on after a rank of this host has gone without a word.

    So does one that calls os._exit(0) before MPI starts in it: no launcher minds, and the others
    wait for it in MPI_Init for ever, where no Python of theirs runs.

    Yields:
        An empty list, which takes what to tell the user where the job is ended.
    """
    over, notes = threading.Event(), list[str]()

    def watch() -> None:
        since: dict[int, float] = {}
        while not over.wait(1.0):
            now = time.monotonic()
            since = {rank: since.get(rank, now) for rank in read(folder).gone}
            ranks = [rank for rank, seen in since.items() if now - seen >= SILENT_SECONDS]
            if ranks and launcher.poll() is None:
                notes.append(
                    f"meshmpi: {named(ranks)} ended without a word, as by os._exit, and the job"
                    f" still ran {SILENT_SECONDS:g} s later: it was ended; exit status {LOST}\n"
                )
                processes.stop_session(launcher)
                return

    thread = threading.Thread(target=watch, name="meshmpi outcome", daemon=True)
    thread.start()
    try:
        yield notes
    finally:
        over.set()
        thread.join()


def verdict(found: Outcome, ranks: int, status: int, all_tell: bool = False) -> tuple[int, str]:
    """The exit status of a job, 0 only if every rank told so, and what to tell the user, or nothing.

    ``status`` is the launcher's.  ``all_tell``: the program tells all its failures, as `meshmpi` does;
    what is not told is then one that a launcher has made up for a lost rank.
    """
    failures = [s for _, s in sorted(found.told.items()) if s]
    if failures:
        return (status if status in failures else failures[0]), ""
    missing = [r for r in range(ranks) if r not in found.told]
    if not missing or (found.without and found.told and not found.damaged):
        return status, ""
    clear = status >= SIGNALS if all_tell else status not in UNCLEAR
    if clear or (status and not found.begun):
        return status, ""
    are = "has" if len(missing) == 1 else "have"
    why = "lost, or by os._exit or MPI_Abort"
    if found.damaged:
        why += f"; the file of {named(found.damaged)} is damaged"
    return LOST, (
        f"meshmpi: {named(missing)} {are} not reported the end of the program, but its launcher"
        f" ended with status {status}: {why}; exit status {LOST}\n"
    )


def of_silence(folder: Path, ranks: int, launcher: str, status: int) -> str:
    """What to tell the user of a job that failed without a line on stderr.

    Seen under load with Open MPI 5.0.11: mpirun ends with status 1 and has passed on nothing.
    """
    found = read(folder)
    failed = [f"rank {rank} by status {s}" for rank, s in sorted(found.told.items()) if s]
    begun = f"{named(found.begun)} of {ranks} had begun" if found.begun else f"none of {ranks} ranks had begun"
    text = f"meshmpi: the job ended with status {status} and said nothing; {begun}"
    text += f", and ended {', '.join(failed)}.\n" if failed else f": {launcher} itself has failed.\n"
    for path in sorted(folder.glob(f"{_REPORT}*"))[:1]:
        with contextlib.suppress(OSError):
            lost = plain.contents(path, most=8 * _MOST_REPORT_BYTES).decode(errors="replace")
            text += f"What rank {int(path.name.removeprefix(_REPORT))} reported:\n{lost}"
    return text


def judged(folder: Path, ranks: int, status: int, patience: float = 0.0, all_tell: bool = False) -> tuple[int, str]:
    """As `verdict`, of what is in ``folder`` after at most ``patience`` seconds."""
    limit = time.monotonic() + patience
    while True:
        answer = verdict(read(folder), ranks, status, all_tell)
        if not answer[1] or time.monotonic() > limit:
            return answer
        time.sleep(0.2)


def main(folder: str, ranks: str, status: str) -> int:
    """The command line, for scripts that start ranks of `meshmpi` by srun."""
    found, text = judged(Path(folder), int(ranks), int(status), PATIENCE_SECONDS, True)
    sys.stderr.write(text)
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
