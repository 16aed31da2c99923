"""Processes: whether one runs, and the end of a started job with all its processes.

Reads /proc, so it is for Linux.  Knows nothing of MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL; assumption: mpirun cleans up within it


def start_time(pid: int) -> int:
    """When a process began, in ticks of the kernel; 0 where it is not known.

    Numbers of processes are used again: both together name one for ever.
    """
    try:
        return int(_fields(pid)[19])
    except OSError:
        return 0


def state(pid: int, started: int) -> str:
    """``running``, ``stopped`` (by SIGSTOP or a debugger) or ``gone``.

    Args:
        pid: Number of a process of this host.
        started: Its `start_time`.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return "gone"
    if int(fields[19]) != started or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _fields(pid: int) -> list[str]:
    """What /proc says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_of_this_job(pid: int) -> bool:
    """Whether an MPI launcher started a process of this host together with this one."""
    return _job(pid) == _job(os.getpid())


def _job(pid: int) -> tuple[object, ...]:
    """What tells jobs apart: names that launchers give, else the parent, which is theirs."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = _fields(pid)[1]
    except OSError:  # of another user, or gone
        return (pid,)
    names = (b"PMIX_NAMESPACE=", b"SLURM_JOB_ID=", b"SLURM_STEP_ID=")
    return tuple(v for v in variables if v.startswith(names)) or (parent,)


def stop_session(process: subprocess.Popen[str]) -> None:
    """Ends a job: SIGTERM to its launcher, then SIGKILL to whatever is left of its session.

    Args:
        process: A child started with ``start_new_session=True``; it is waited for.
    """
    # Open MPI puts each rank in a process group of its own, so a group is not enough.
    members = _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and (process.poll() is None or _alive(members)):
        members |= _family(process.pid)
        time.sleep(0.05)
    for pid in sorted(_alive(members | _family(process.pid))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _family(root: int) -> set[tuple[int, str]]:
    """Processes of the session led by ``root`` and all its descendants, as (pid, start time)."""
    table: dict[int, tuple[int, int, str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), int(fields[3]), fields[19])
    found = {pid for pid, (_, session, _) in table.items() if session == root or pid == root}
    while True:
        more = {pid for pid, (parent, _, _) in table.items() if parent in found} - found
        if not more:
            return {(pid, table[pid][2]) for pid in found}
        found |= more


def _alive(members: set[tuple[int, str]]) -> set[int]:
    """Those of ``members`` that still run; the start time guards against reused numbers."""
    alive = set()
    for pid, started in members:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[19] == started and fields[0] != "Z":
                alive.add(pid)
    return alive
