"""Lets one job at a time write the folder of a run, by a file in it that names the holder.

The file is made by O_EXCL and taken over by a rename, which works on file systems of several hosts (no flock).  A lock
that is no longer touched, by the file system's clock, or whose process or Slurm job has ended, may be taken over.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshmpi.errors import ConfigError
from meshmpi.files import disk, plain
from meshmpi.runtime import processes
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.stopping import squeue

LOCK = "lock.json"
"""The file in the folder of a run."""
RUN_VARIABLE = "MESHMPI_RUN"
"""Names the process that starts the job, and again when it dies: all its jobs are one here."""
BEAT_SECONDS = 10.0
"""Between two touches."""
STALE_SECONDS = 90.0
"""A lock that was not touched for this long is stale: nine beats, as a file system may be busy."""
_FIELDS = dict.fromkeys(("token", "user", "host", "boot", "job", "slurm", "since"), str)
_FIELDS |= dict.fromkeys(("pid", "start", "slurm_restart"), int)
_WRITING_SECONDS = 2.0  # between the creation of the file and its text, seen from another host
_SLURM_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL")
_SLURM_OVER += ("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_OVER = "is over"


class RunLock:
    """Holds the folder of a run, which is made when missing, until `release`.

    Raises:
        ConfigError: Another job writes the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder, LOCK)
        self._me = myself()
        self._new = not self.path.parent.exists()
        self.take()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshmpi lock", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Makes the file, in place of a stale one."""
        try:
            while not self._taken():
                pass
        except OSError as error:
            raise ConfigError(
                f"{self.path.parent} cannot be written: {error.strerror}.", "Give another folder, by --out or folder=."
            ) from error

    def _taken(self) -> bool:
        """Whether the file could be made; if not, its holder has released it or was removed just now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            disk.write_file(self.path, [json.dumps(self._me).encode()], os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        except FileNotFoundError:  # another job has just removed the empty folder
            return False
        except FileExistsError:
            if (holder := _holder(self.path)) is None:
                return False
            if why := why_held(holder, self._me, age(self.path)):
                raise ConfigError(
                    f"{self.path.parent} is being written by another job: {told(holder)}; {why}.",
                    "Wait for its end, or give another folder, by --out or folder=.",
                ) from None
            self._remove(holder)
            return False
        return True

    def _remove(self, holder: dict[str, Any]) -> None:
        """Removes the lock of ``holder``, but not one that another job has just put in its place."""
        taken = self.path.with_name(f".{LOCK}.{secrets.token_hex(4)}")
        try:
            os.rename(self.path, taken)
        except FileNotFoundError:
            return
        if _read(taken) != holder:
            # If a third job came first, the owner of this lock notices: see `check`.
            with contextlib.suppress(FileExistsError):
                os.link(taken, self.path)
        taken.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the file system may come back
                if self.mine():
                    os.utime(self.path)

    def mine(self) -> bool:
        """Whether this job still holds the folder."""
        with contextlib.suppress(FileNotFoundError):
            return _read(self.path) == self._me
        return False

    def check(self) -> None:
        """Raises ConfigError where another job has taken the folder over."""
        if not self.mine():
            holder = _holder(self.path)
            by = told(holder) if holder else "somebody who removed its lock"
            raise ConfigError(
                f"{self.path.parent} was taken over by another job while this one did not run or"
                f" could not reach it: {by}.",
                "Nothing more is written; resume from there when the other has ended.",
            )

    def release(self) -> None:
        """Gives the folder up, and removes it if it was made and is empty."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if self.mine():
                self.path.unlink()
                if self._new:
                    self.path.parent.rmdir()  # fails if it is not empty


_held: dict[Path, RunLock] = {}
"""Locks that this process holds, by the path of the folder without links."""


@contextlib.contextmanager
def held(mesh: AnyMesh, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the folder of a run while it is open; rank 0 does so for all.  Collective.

    Raises:
        ConfigError: Another job writes it.
    """
    key = Path(folder).resolve()
    from_first(mesh, lambda: _held.update({key: RunLock(key)}))
    try:
        yield
    finally:
        if key in _held:
            _held.pop(key).release()


def check_held(folder: str | os.PathLike[str]) -> None:
    """`RunLock.check`, if this process holds the folder."""
    key = Path(folder).resolve()
    if key in _held:
        _held[key].check()


def renamed(folder: Path, new: Path) -> None:
    """The folder has become ``new``; if this process held it, it holds a folder of the old name again."""
    key = folder.resolve()
    if key in _held:
        _held[key].take()
        Path(new, LOCK).unlink(missing_ok=True)


# ---- who holds it ----------------------------------------------------------------------------


def myself() -> dict[str, Any]:
    """What this process writes into its lock."""
    pid = os.getpid()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = str(os.getuid())
    return {
        "token": secrets.token_hex(8),
        "user": user,
        "host": socket.gethostname(),
        "boot": processes.boot(),
        "pid": pid,
        "start": processes.start_time(pid),
        "job": os.environ.get(RUN_VARIABLE, "") or os.environ.get("PMIX_NAMESPACE", ""),
        "slurm": os.environ.get("SLURM_JOB_ID", ""),
        "slurm_restart": int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def told(holder: dict[str, Any]) -> str:
    """A holder in words."""
    slurm = f"Slurm job {holder['slurm']}, " if holder.get("slurm") else ""
    who = f"process {holder.get('pid', '?')} of {holder.get('user', '?')}"
    return f"{slurm}{who} on host {holder.get('host', '?')} since {holder.get('since', '?')}"


def why_held(holder: dict[str, Any], me: dict[str, Any], seconds: float) -> str:
    """Why ``me`` may not take a lock that was touched ``seconds`` ago (``holder`` is empty if unreadable), or empty."""
    same = ("job", "slurm", "slurm_restart")
    if holder.get("job") and all(holder.get(k) == me[k] for k in same):
        return ""  # ranks of one job take turns, as after a loss
    if (holder.get("host"), holder.get("boot")) == (me["host"], me["boot"]):
        gone = processes.state(holder["pid"], holder["start"]) == "gone"
        return "" if gone else "it runs"
    if seconds >= STALE_SECONDS:
        return ""
    slurm = holder.get("slurm", "")
    if slurm and slurm == me["slurm"] and holder.get("slurm_restart", 0) < me["slurm_restart"]:
        return ""  # this is the same job, which was requeued
    if slurm and slurm_state(slurm) == _OVER:
        return ""
    return f"it was there {seconds:.0f} s ago, and is given up after {STALE_SECONDS:.0f} s"


def slurm_state(job: str) -> str:
    """The state of a Slurm job, `_OVER`, or empty where Slurm does not say."""
    done = squeue("--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    if done is None:
        return ""
    if done.returncode:
        return _OVER if "Invalid job id" in done.stderr else ""
    state = done.stdout.strip()
    return _OVER if not state or state in _SLURM_OVER else state


def age(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system."""
    beside = path.with_name(f".{path.name}.now-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        try:
            beside.touch()
            return beside.stat().st_mtime - path.stat().st_mtime
        finally:
            beside.unlink(missing_ok=True)
    return 0.0


def _holder(path: Path) -> dict[str, Any] | None:
    """The content of a lock, empty if the file is not a lock of ours; None without a file."""
    limit = time.monotonic() + _WRITING_SECONDS
    while True:
        try:
            found = _read(path)
        except FileNotFoundError:
            return None
        if found or time.monotonic() > limit:
            return found
        time.sleep(0.05)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = plain.json_table(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return {}
    return found if all(isinstance(found.get(name), kind) for name, kind in _FIELDS.items()) else {}
