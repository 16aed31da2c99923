"""How each rank of a job has ended, as told by the rank itself.

An exit status does not tell: mpirun of Open MPI 5.0.11 ends with 0 when it has lost a host.  So the
ranks of one start of a job find an empty folder; each says there that it has begun and, at its very
end, with which status.  Who started them reads it (`verdict`): a job whose ranks have not all told
that they are done has not finished.

    python -m meshmpi.guard.outcome FOLDER RANKS STATUS     ends with the status of the job
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import ConfigError, MeshError
from meshmpi.files import plain
from meshmpi.guard.exit_status import LOST
from meshmpi.runtime import processes
from meshmpi.runtime.world import rank_by_environment

OUTCOME_VARIABLE = "MESHMPI_OUTCOME"
"""Names the folder; ranks take it out of their environment, for jobs that they start themselves."""
SHARED_VARIABLE = "MESHMPI_SHARED"
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
_MOST_BYTES = 128
"""Longest file of a rank that is read; the longest that is written has about half of that."""


class _Mine(NamedTuple):
    """Where this rank tells."""

    path: Path
    pid: int


_mine: _Mine | None = None
_told = 0


# ---- a rank ----------------------------------------------------------------------------------


def begin() -> None:
    """Says that this rank has begun, and will say how it ends; nothing where nobody asks.

    Raises:
        ConfigError: This host does not see the folder.
    """
    global _mine
    folder = os.environ.pop(OUTCOME_VARIABLE, "")
    if not folder:
        return
    rank, host = rank_by_environment(), socket.gethostname()
    _mine = _Mine(Path(folder, f"rank-{rank:05d}"), os.getpid())
    atexit.register(tell, 0)  # the first one runs last
    try:
        _write(f"{_BEGUN} {processes.mark()}")
    except OSError as error:
        _mine = None
        raise ConfigError(
            f"rank {rank} on host {host} cannot write to {folder} ({error.strerror}), where ranks"
            " tell that they are done.",
            f"Let {SHARED_VARIABLE} name a folder that all hosts see.",
        ) from None


def tell(status: int) -> None:
    """Says how this rank ends; a failure that was told stays."""
    global _told
    if _mine is None or _mine.pid != os.getpid():  # a forked child is not the rank
        return
    _told = _told or status
    recovery = sys.modules.get("meshmpi.guard.recovery")
    note = f" {_WITHOUT}" if recovery is not None and recovery.lost_some() else ""
    with contextlib.suppress(OSError):  # whoever reads takes this rank for lost
        _write(f"{_told}{note}")


def _write(text: str) -> None:
    assert _mine is not None
    unfinished = _mine.path.with_suffix(".new")
    unfinished.write_bytes(_content(_mine.path, text))
    os.replace(unfinished, _mine.path)


def _content(path: Path, text: str) -> bytes:
    """What a rank writes: with a hash, since one bit makes 1, a failure, to 0."""
    seal = hashlib.sha256(f"{path.parent.name}/{path.name} {text}".encode()).hexdigest()[:16]
    return f"{text} # {seal}\n".encode()


# ---- who started them ------------------------------------------------------------------------


@contextlib.contextmanager
def place(several_hosts: bool, beside: Path | None = None) -> Iterator[Path]:
    """An empty folder for one start of a job, which goes afterwards.

    Args:
        several_hosts: Whether ranks of other hosts must see it.
        beside: Where to make it, on a file system that all hosts see.

    Raises:
        MeshError: It can be made nowhere.
    """
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
        f"there is no room for a folder of the job in {' or '.join(map(str, roots))}.",
        f"Let {SHARED_VARIABLE} name a folder that all hosts see and that you may write to.",
    )


class Outcome(NamedTuple):
    """What ranks have told.

    Attributes:
        begun: Ranks that have begun.
        told: Rank -> its exit status.
        without: Whether ranks went on without others that were lost.
        damaged: Ranks of which a file is there, but not as they wrote it.
        gone: Ranks of this host that have not told, and whose processes have ended.
    """

    begun: tuple[int, ...]
    told: dict[int, int]
    without: bool
    damaged: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


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

    Args:
        folder: Where ranks tell how they end.
        launcher: The job's, started in a session of its own.

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
                from meshmpi.guard.deadlock import named

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
    """The exit status of a job, whatever its launcher says.

    Args:
        found: What ranks have told.
        ranks: Number of ranks of the job.
        status: With which the launcher ended.
        all_tell: Whether the program tells all its failures, as `meshmpi` does: what is not told is
            no status of the program, but one that a launcher has made up for a lost rank.

    Returns:
        The status, 0 only if every rank told so, and what to tell the user, or nothing.
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
    from meshmpi.guard.deadlock import named

    are = "has" if len(missing) == 1 else "have"
    why = "lost, or by os._exit or MPI_Abort"
    if found.damaged:
        why += f"; the file of {named(found.damaged)} is damaged"
    return LOST, (
        f"meshmpi: {named(missing)} {are} not told the end of the program, though its launcher"
        f" ended with status {status}: {why}; exit status {LOST}\n"
    )


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
