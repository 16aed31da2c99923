"""What this rank does, in a file mapped into memory: its last collectives and its phase.

Others read the file while the rank runs, hangs or has died: the watchdog (`watchdog`) and ``meshmpi
status``.  A record is a few integers, written by one call; what the integers mean is appended to a
text file beside, once for each kind of call.  Files lie in memory (/dev/shm) and go with the rank.

Knows no MPI and no meshes; layout of the file: constants below, read by `rings`.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from meshmpi.runtime import processes

MAGIC, VERSION = 0x6D657368666C6974, 1
HEADER_BYTES, RECORD_BYTES, RECORDS = 2048, 64, 512
MAGIC_AT, VERSION_AT, RANK, SIZE, PID, START, COUNT, STATE, STATUS, PHASE, STEP = range(11)
SINCE, HEARTBEAT, WALL = 11, 12, 13
"""Words of 8 bytes of the header; the last three are floats: when the phase began, when the
watchdog's thread last ran (both by the monotonic clock) and what to add to that clock for the time
of day."""
SLOTS_AT, SLOTS = 32, 64
"""From this word on, for each of the first communicators: calls begun, digest of all of them."""
RECORD = struct.Struct("<qqqqqdd")
"""Number of the record from 1 on, communicator, call of the communicator from 1 on, entry of the
table, digest of the communicator's calls so far, began, ended."""
_ENDED_WORD = 6  # of a record
RUNNING, LEAVING = 0, 1
UNKNOWN_STATUS = -1
FOLDER_VARIABLE = "MESHMPI_FLIGHT_DIR"
"""Where the files go, in place of a folder of the user's in /dev/shm."""
LAUNCHED = "job-"
"""A launcher's folder begins so; it removes it with all that killed ranks have left."""
SWEEP_SECONDS = 60.0
"""What has been dead for so long, no watchdog looks at any more."""
MOST_ENTRIES = 1 << 14
"""Of the table.  A program that makes ever other calls gets one entry for all that come later."""
OTHER = "other"
"""Kind of that entry, the first of every table.  Digests tell even those calls apart."""
_ESCAPED = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})
_DIGEST_PRIME = 2**31 - 1

T = TypeVar("T")


class Kind(NamedTuple):
    """What a collective is: ranks whose calls differ in this do not belong together.

    Attributes:
        kind: all_reduce, ..., wait, broadcast, agree.
        op: Reduction, root, or empty.
        dtype: Of the elements.
        axes: Mesh axes joined by +.
        elements: A count that must be equal on all ranks of the group.
        shape: Extents that must be equal on all ranks of the group, joined by x.
        about: Digest of the program and number of the instruction, or empty.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    axes: str = ""
    elements: int = 0
    shape: str = ""
    about: str = ""

    @property
    def signature(self) -> int:
        """31 bits of it."""
        return _signature(self)


@functools.lru_cache(4096)
def _signature(kind: Kind) -> int:
    return zlib.crc32("\t".join(map(str, kind)).encode()) & 0x7FFFFFFF


class Channel:
    """The calls of one communicator.

    Attributes:
        number: Of the communicator on this rank.
        count: Calls begun.
        digest: Of all of them, in order.
    """

    __slots__ = ("count", "digest", "number")

    def __init__(self, number: int):
        self.number, self.count, self.digest = number, 0, 0


class Tally:
    """Calls of collectives that are alike, and seconds spent in them."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0


def counted(run: Callable[[], T], tally: Tally) -> Callable[[], T]:
    """``run``, which counts itself: two numbers, as a short message takes a microsecond."""
    clock = time.perf_counter

    def counting() -> T:
        began = clock()
        try:
            return run()
        finally:
            tally.seconds += clock() - began
            tally.calls += 1

    return counting


class Ring:
    """The files of this rank.

    Args:
        folder: Where they are made.
        rank: In MPI.COMM_WORLD.
        size: Of it.

    Attributes:
        path: Of the ring; the table has the suffix ``.txt``.
        count: Collectives called.
        rank: In MPI.COMM_WORLD.
        size: Of MPI.COMM_WORLD.

    Raises:
        OSError: They cannot be made there, or there is no room.
    """

    def __init__(self, folder: Path, rank: int, size: int):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        pid, start = os.getpid(), processes.start_time(os.getpid())
        self.path = folder / f"{pid}-{start}.ring"
        nbytes = HEADER_BYTES + RECORDS * RECORD_BYTES
        with open(self.path, "w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a store must not meet a full disk
            except OSError:
                self.path.unlink()
                raise
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._words = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        self._table = os.open(
            self.path.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )  # fmt: skip
        self._entries: dict[tuple[Any, ...], int] = {}
        self._phases: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        self.count, self.rank, self.size = 0, rank, size
        self._other = self.entry(Kind(OTHER), 0, "")
        words = self._words
        words[RANK], words[SIZE], words[PID], words[START] = rank, size, pid, start
        words[STATE], words[STATUS] = RUNNING, UNKNOWN_STATUS
        self._floats[WALL] = time.time() - time.perf_counter()
        words[VERSION_AT], words[MAGIC_AT] = VERSION, MAGIC

    def _say(self, *fields: object) -> None:
        # Names of files may hold anything: what would end a field or a line, and bytes of no text.
        row = "\t".join(str(f).translate(_ESCAPED) for f in fields) + "\n"
        os.write(self._table, row.encode(errors="backslashreplace"))

    def channel(self, key: str, members: Sequence[int]) -> Channel:
        """The calls of a communicator, which has the same ``key`` on all its ranks.

        Args:
            key: Unique in the job.
            members: Its ranks in MPI.COMM_WORLD.
        """
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = Channel(len(self._channels))
            self._say("C", found.number, key, ",".join(map(str, members)))
        return found

    def entry(self, kind: Kind, nbytes: int, line: str) -> int:
        """The number of a call in the table, which is made at the first time.

        Args:
            kind: What it is.
            nbytes: Bytes that this rank sends.
            line: ``file:line`` of the user's code, or empty.
        """
        key = (*kind, nbytes, line)
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= MOST_ENTRIES:
                return self._other
            found = self._entries[key] = len(self._entries)
            self._say("E", found, kind.signature, *kind, nbytes, line)
        return found

    def recorded(
        self, run: Callable[[], T], tally: Tally, channel: Channel, kind: Kind, entry: int
    ) -> Callable[[], T]:
        """``run``, which records and counts itself; all in one function, as calls cost time."""
        pack, file, words, floats = RECORD.pack_into, self._map, self._words, self._floats
        clock, signature, number = time.perf_counter, kind.signature, channel.number
        slot = SLOTS_AT + 2 * number if number < SLOTS else 0

        def recorded() -> T:
            channel.count = call = channel.count + 1
            channel.digest = digest = (channel.digest * 31 + signature) % _DIGEST_PRIME
            self.count = n = self.count + 1
            at = HEADER_BYTES + n % RECORDS * RECORD_BYTES
            began = clock()
            pack(file, at, n, number, call, entry, digest, began, 0.0)
            words[COUNT] = n
            if slot:
                words[slot + 1], words[slot] = digest, call
            try:
                return run()
            finally:
                floats[at // 8 + _ENDED_WORD] = ended = clock()
                tally.seconds += ended - began
                tally.calls += 1

        return recorded

    def phase(self, name: str, step: int | None) -> None:
        """Notes what the rank does now."""
        number = self._phases.get(name)
        if number is None:
            number = self._phases[name] = len(self._phases) + 1
            self._say("P", number, name)
        self._words[PHASE], self._words[STEP] = number, -1 if step is None else step
        self._floats[SINCE] = time.perf_counter()

    def leaving(self, status: int | None) -> None:
        """Notes that the program is over."""
        self._words[STATUS] = UNKNOWN_STATUS if status is None else status
        self._words[STATE] = LEAVING

    def beat(self) -> None:
        """Notes that this process runs."""
        self._floats[HEARTBEAT] = time.perf_counter()

    def remove(self) -> None:
        """Removes the files; the ring can still be written to, unseen."""
        for path in (self.path, self.path.with_suffix(".txt")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others still have files there
            self.path.parent.rmdir()


_ring: Ring | None = None
_owner = 0
_early: tuple[str, int | None] | None = None
_line: list[tuple[str, str]] = []


def start(rank: int, size: int) -> Ring | None:
    """Makes the files of this rank; further calls return them.  None where they cannot be made."""
    global _ring, _owner
    if _ring is not None and _owner == os.getpid():
        return _ring
    problems = []
    for folder in folders():
        try:
            _ring = Ring(folder, rank, size)
            for one in (folder, *folder.parent.glob(f"{LAUNCHED}*"), *folder.glob(f"{LAUNCHED}*")):
                with contextlib.suppress(OSError):  # of another job, which has just removed it
                    sweep(one)
            break
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    else:
        sys.stderr.write(
            f"meshmpi: rank {rank} keeps no record of its collectives, so hangs are not found"
            f" ({'; '.join(problems)}).  Name a folder in {FOLDER_VARIABLE}.\n"
        )
        return None
    _owner = os.getpid()
    if _early is not None:
        _ring.phase(*_early)
    return _ring


def sweep(folder: Path) -> None:
    """Removes what processes have left that were killed `SWEEP_SECONDS` ago or earlier."""
    for path in folder.iterdir():
        stem = path.name.split(".")[0]
        pid, _, started = stem.partition("-")
        if not (pid.isdigit() and started.isdigit()):
            continue
        if processes.state(int(pid), int(started)) != "gone":
            continue
        with contextlib.suppress(OSError, struct.error):  # another rank has just removed it
            if time.time() - path.stat().st_mtime < SWEEP_SECONDS:
                continue
            ring = path.with_name(f"{stem}.ring")
            if ring.exists():
                (beat,) = struct.unpack("<d", ring.read_bytes()[8 * HEARTBEAT : 8 * HEARTBEAT + 8])
                if 0 <= time.perf_counter() - beat < SWEEP_SECONDS:
                    continue  # its own job may yet look at it
            path.unlink()
    if folder.name.startswith(LAUNCHED):
        with contextlib.suppress(OSError):  # not empty, or it has just been removed
            folder.rmdir()


def folders() -> list[Path]:
    """Where the files may be made, best first."""
    named = os.environ.get(FOLDER_VARIABLE)
    roots = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    found = [r / f"meshmpi-{os.getuid()}" for r in roots if r.is_dir() and os.access(r, os.W_OK)]
    return [Path(named), *found] if named else found


def ring() -> Ring | None:
    """The files of this rank; None before `start`, and in a forked child."""
    return _ring if _owner == os.getpid() else None


def phase(name: str, step: int | None = None) -> None:
    """Says what this rank does outside of collectives, for ``meshmpi status`` and reports.

    Args:
        name: Such as load, compile, step, evaluate, save.
        step: The step it belongs to.
    """
    global _early
    _early = (name, step)
    if _ring is not None and _owner == os.getpid():
        _ring.phase(name, step)


@contextlib.contextmanager
def folder_of_job(variables: dict[str, str]) -> Iterator[None]:
    """A folder for the files of a job's ranks on this host, which goes with the job.

    Args:
        variables: Environment of the ranks; takes the folder's name.
    """
    roots = folders()
    if FOLDER_VARIABLE in variables or not roots:
        yield
        return
    folder = roots[0] / f"{LAUNCHED}{os.getpid()}-{time.perf_counter_ns()}"
    variables[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others' files are there, or nobody's ever were
            folder.parent.rmdir()


@contextlib.contextmanager
def described(line: str, about: str) -> Iterator[None]:
    """Calls that are bound in here are those of ``line``, of an instruction of a program.

    Args:
        line: ``file:line`` of the user's code.
        about: Digest of the program and number of the instruction.
    """
    _line.append((line, about))
    try:
        yield
    finally:
        _line.pop()


def description() -> tuple[str, str]:
    """Line and program of the call that is being bound: by `described`, or the caller's line."""
    if _line:
        return _line[-1]
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_RUNTIME):
        frame = frame.f_back
    inner = frame  # where meshmpi itself is the program, as in `meshmpi train`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    found = inner if frame.f_code.co_filename.startswith(("<", _PACKAGE)) else frame
    return f"{found.f_code.co_filename}:{found.f_lineno}", ""


_RUNTIME = str(Path(__file__).resolve().parent) + os.sep
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
