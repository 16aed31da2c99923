"""Processes: whether one runs, and the end of a started job with all its processes.

Reads /proc, so it is for Linux.  Knows nothing of MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_LEAVING = "meshmpi leaves"  # the kernel keeps 15 characters
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


def mark() -> str:
    """What names this process among all of a host's, also after its end.

    Number and start time, and where both are counted: the boot of the kernel and the namespace.
    """
    return f"{os.getpid()}-{start_time(os.getpid())}-{_where()}"


def is_over(its_mark: str) -> bool:
    """Whether a process is known to have ended; False where it cannot be seen from here.

    Args:
        its_mark: By `mark`.
    """
    pid, started, where = its_mark.split("-", 2)
    return where == _where() and state(int(pid), int(started)) == "gone"


MARK = r"\d+-\d+-[0-9a-f]{8}-\d+"
"""Pattern of a mark."""


def _where() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux
        return "00000000-0"
    return f"{boot}-{namespace}"


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


def boot() -> str:
    """Names this boot of this host, and the container: what numbers of processes belong to."""
    found = []
    for read, path in ((Path.read_text, "/proc/sys/kernel/random/boot_id"), (os.readlink, "/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            found.append(read(Path(path)).strip())
    return "|".join(found)


def starter(identity: Sequence[str]) -> tuple[int, int] | None:
    """The process that started this rank, and its start time: mpirun, or a daemon of its.

    It is the nearest ancestor that is not of the rank itself, as a script around the program is.

    Args:
        identity: Names of variables in which ranks differ from what starts them.

    Returns:
        None where there is none, or it is the first process of a container.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in identity if name in os.environ}
    pid = os.getppid()
    while mine and pid > 1:
        try:
            theirs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except PermissionError:  # of Slurm, which is root's
            theirs = []
        except OSError:
            return None
        if not mine.issubset(theirs):
            return pid, start_time(pid)
        pid = int(_fields(pid)[1])
    return None


def call_leaving() -> None:
    """Has others see that this process is about to end."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_LEAVING)


def others_below(ancestor: int) -> list[int]:
    """Processes that descend from ``ancestor``, but not from this one or from one that leaves."""
    parents = dict[int, int]()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                fields = _fields(int(entry.name))
                leaves = Path(entry.path, "comm").read_text().strip() == _LEAVING
                if fields[0] not in "ZX" and not leaves:
                    parents[int(entry.name)] = int(fields[1])
    found = {ancestor}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {ancestor})


def has_mapped(pid: int, name: str) -> bool:
    """Whether a process of this user has a file whose path contains ``name`` in its memory."""
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


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


@contextlib.contextmanager
def guarded(mark: str) -> Iterator[None]:
    """While it is open, the death of this process ends all that have ``mark`` in their environment.

    A process of its own sees to it: it reads a pipe that only this process can write to.

    Args:
        mark: ``NAME=value``, unguessable, so that nobody else has it.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        try:
            yield
        finally:
            guard.kill()


def end_marked(mark: str, grace_seconds: float = _GRACE_SECONDS) -> list[int]:
    """Ends all processes of this user that have ``mark`` in their environment; returns them.

    Those that no other of them has started are asked first, by SIGTERM, and end the others.
    """
    found = marked(mark)
    for pid in _first_of(found):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and marked(mark):
        time.sleep(0.1)
    while left := marked(mark):  # also what was started meanwhile
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment, but this one."""
    wanted, found = mark.encode(), list[int]()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def _first_of(pids: Sequence[int]) -> list[int]:
    """Those whose parents are not among them."""
    first = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if int(_fields(pid)[1]) not in pids:
                first.append(pid)
    return first


def _alive(members: set[tuple[int, str]]) -> set[int]:
    """Those of ``members`` that still run; the start time guards against reused numbers."""
    alive = set()
    for pid, started in members:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[19] == started and fields[0] != "Z":
                alive.add(pid)
    return alive


def _guard(mark: str) -> None:
    """Waits for the end of the process that has the other end of stdin, and ends what it left."""
    while os.read(0, 4096):
        pass
    if end_marked(mark):
        sys.stderr.write("meshmpi: the launching process is gone: its job was ended\n")


if __name__ == "__main__":
    _guard(sys.argv[1])
