"""Processes: whether one is running, and how to end a job with all its processes.

Reads /proc, so it works on Linux only. Independent of MPI; also runs as a program without meshmpi on its path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

MARK = r"\d+-\d+-[0-9a-f]{8}-\d+"
"""Pattern of what `mark` returns."""
_LEAVING = "meshmpi leaves"  # the kernel keeps 15 characters
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL; assumption: mpirun cleans up within it


class _Stat(NamedTuple):
    """What /proc/PID/stat says of a process: state letter, parent, session, start in ticks of the kernel."""

    state: str
    parent: int
    session: int
    start: int


def _stat(pid: int) -> _Stat:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def _all(but_this: bool = True) -> Iterator[tuple[int, _Stat]]:
    """The processes that can be seen; those that end meanwhile are left out."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and not (but_this and int(entry.name) == os.getpid()):
            with contextlib.suppress(OSError):
                yield int(entry.name), _stat(int(entry.name))


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def start_time(pid: int) -> int:
    """When a process began, in ticks of the kernel; 0 where it is not known.

    Numbers of processes are used again: both together name one for ever.
    """
    try:
        return _stat(pid).start
    except OSError:
        return 0


def state(pid: int, started: int) -> str:
    """``running``, ``stopped`` (by SIGSTOP or a debugger) or ``gone``; ``started`` is its `start_time`."""
    try:
        found = _stat(pid)
    except OSError:
        return "gone"
    if found.start != started or found.state in "ZX":
        return "gone"
    return "stopped" if found.state in "Tt" else "running"


def mark() -> str:
    """What names this process among all of a host's, also after its end.

    Number and start time, and where both are counted: the boot of the kernel and the namespace.
    """
    return f"{os.getpid()}-{start_time(os.getpid())}-{_where()}"


def is_over(its_mark: str) -> bool:
    """Whether a process, named by its `mark`, is known to have ended; False where it cannot be seen from here."""
    pid, started, where = its_mark.split("-", 2)
    return where == _where() and state(int(pid), int(started)) == "gone"


def _where() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux
        return "00000000-0"


def boot() -> str:
    """Names this boot of this host, and the container: what numbers of processes belong to."""
    found = []
    for read, path in ((Path.read_text, "/proc/sys/kernel/random/boot_id"), (os.readlink, "/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            found.append(read(Path(path)).strip())
    return "|".join(found)


def is_of_this_job(pid: int) -> bool:
    """Whether an MPI launcher started a process of this host together with this one."""
    return _job(pid) == _job(os.getpid())


def _job(pid: int) -> tuple[object, ...]:
    """What tells jobs apart: names that launchers give, else the parent, which is theirs."""
    try:
        variables, parent = _environment(pid), _stat(pid).parent
    except OSError:  # of another user, or gone
        return ("gone", pid)
    names = (b"PMIX_NAMESPACE=", b"SLURM_JOB_ID=", b"SLURM_STEP_ID=")
    return tuple(v for v in variables if v.startswith(names)) or (parent,)


def starter(identity: Sequence[str]) -> tuple[int, int] | None:
    """The process that started this rank, and its start time: mpirun, or a daemon of its.

    It is the nearest ancestor that is not of the rank itself, as a script around the program is: one that
    differs in the variables ``identity``.  None where there is none, or it is the first process of a container.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in identity if name in os.environ}
    pid = os.getppid()
    while mine and pid > 1:
        try:
            theirs = _environment(pid)
        except PermissionError:  # of Slurm, which is root's
            theirs = []
        except OSError:
            return None
        if not mine.issubset(theirs):
            return pid, start_time(pid)
        pid = _stat(pid).parent
    return None


def call_leaving() -> None:
    """Has others see that this process is about to end."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_LEAVING)


def others_below(ancestor: int) -> list[int]:
    """Processes that descend from ``ancestor``, but not from this one or from one that leaves."""
    parents = dict[int, int]()
    for pid, found in _all():
        with contextlib.suppress(OSError):
            leaves = Path(f"/proc/{pid}/comm").read_text().strip() == _LEAVING
            if found.state not in "ZX" and not leaves:
                parents[pid] = found.parent
    return sorted(_with_descendants({ancestor}, parents) - {ancestor})


def _with_descendants(found: set[int], parents: Mapping[int, int]) -> set[int]:
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def has_mapped(pid: int, name: str) -> bool:
    """Whether a process of this user has a file whose path contains ``name`` in its memory."""
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


def stop_session(process: subprocess.Popen[str]) -> None:
    """Ends a job, started with ``start_new_session=True``, and waits for it.

    Its launcher gets SIGTERM, then whatever is left of its session SIGKILL.
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


def _family(root: int) -> set[tuple[int, int]]:
    """Processes of the session led by ``root`` and all its descendants, as (pid, start time)."""
    table = dict(_all(but_this=False))
    first = {pid for pid, found in table.items() if found.session == root or pid == root}
    members = _with_descendants(first, {pid: found.parent for pid, found in table.items()})
    return {(pid, table[pid].start) for pid in members}


def _alive(members: set[tuple[int, int]]) -> set[int]:
    """Those of ``members`` that still run; the start time guards against reused numbers."""
    return {pid for pid, started in members if state(pid, started) != "gone"}


@contextlib.contextmanager
def guarded(mark: str) -> Iterator[None]:
    """While it is open, the death of this process ends all that have ``mark`` in their environment.

    A process of its own sees to it: it reads a pipe that only this process can write to.  ``mark`` is
    an unguessable ``NAME=value``, so that nobody else has it.
    """
    import subprocess  # late: launchers only come here

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
    found, parents = marked(mark), {pid: stat.parent for pid, stat in _all()}
    for pid in found:
        if parents.get(pid) not in found:
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
    for pid, _ in _all():
        with contextlib.suppress(OSError):
            if wanted in _environment(pid):
                found.append(pid)
    return sorted(found)


def main(mark: str) -> None:
    """Waits for the end of the process that has the other end of stdin, and ends what it left."""
    while os.read(0, 4096):
        pass
    if end_marked(mark):
        sys.stderr.write("meshmpi: the launching process is gone: its job was ended\n")


if __name__ == "__main__":
    main(sys.argv[1])
