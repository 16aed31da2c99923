"""The flight recorder: the last collectives and the phase of this rank, in a memory-mapped file.

A record is a few integers; their meaning is appended to a text file next to it, once per kind of call. Both files lie
in a private folder in /dev/shm and are removed with the rank; the user's next job removes those of killed processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from meshmpi.files import cache
from meshmpi.files.private import Folder, read_plain, why_not_private
from meshmpi.runtime import processes
from meshmpi.runtime.calls import CallKind, Place, SelfRecording, Tally

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
"""Where folders are made, in place of /dev/shm; a launcher names one that goes with its job."""
MOST_ENTRIES = 1 << 14
"""Maximum number of entries in a rank's table of calls.  Once it is full, all further distinct calls share
the entry `OTHER`."""
OTHER = "other"
"""CallKind of that entry, the first of every table.  Digests tell even those calls apart."""
_ESCAPED = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})
_DIGEST_PRIME = 2**31 - 1

T = TypeVar("T")


class Channel:
    """The calls of one communicator.

    Attributes:
        number: The communicator's number on this rank.
        state: Calls begun, and a digest of all of them in order; of the first communicators in the rank's file.
    """

    __slots__ = ("number", "state")

    def __init__(self, number: int, state: memoryview):
        self.number, self.state = number, state


class Ring:
    """The files of this rank.

    Attributes:
        path: The ring's file; the table has the suffix ``.txt``.
        rank: In MPI.COMM_WORLD.
        size: Number of ranks in MPI.COMM_WORLD.
        pid: The process that made them; a forked child is not the rank.
    """

    def __init__(self, place: Path, rank: int, size: int):
        pid, start = os.getpid(), processes.start_time(os.getpid())
        nbytes = HEADER_BYTES + RECORDS * RECORD_BYTES
        with Folder.new(place, _beginning()) as folder:
            self.path = folder.path / f"{pid}-{start}.ring"
            try:
                with open(folder.create(self.path.name), "w+b") as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # stores must not meet a full disk
                    self._map = mmap.mmap(file.fileno(), nbytes)
                self._table = folder.create(self.path.with_suffix(".txt").name)
            except OSError:
                _remove(folder.path)
                raise
        self._words = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        self._entries: dict[tuple[Any, ...], int] = {}
        self._phases: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        self.rank, self.size, self.pid = rank, size, pid
        self._other = self.entry(CallKind(OTHER), 0, "")
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
        """The calls of a communicator, which has the same ``key`` on all its ranks."""
        found = self._channels.get(key)
        if found is None:
            number = len(self._channels)
            slot = SLOTS_AT + 2 * number
            state = self._words[slot : slot + 2] if number < SLOTS else memoryview(bytearray(16)).cast("q")
            found = self._channels[key] = Channel(number, state)
            self._say("C", found.number, key, ",".join(map(str, members)))
        return found

    def entry(self, kind: CallKind, nbytes: int, line: str) -> int:
        """The number of a call in the table, which is made at the first time."""
        key = (*kind, nbytes, line)
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= MOST_ENTRIES:
                return self._other
            found = self._entries[key] = len(self._entries)
            self._say("E", found, kind.signature, *kind, nbytes, line)
        return found

    def recorded(
        self, run: Callable[[], T], tally: Tally, channel: Channel, kind: CallKind, entry: int
    ) -> Callable[[], T]:
        """``run``, which records and counts itself; all in one function, as calls cost time."""
        signature, number, state, words = kind.signature, channel.number, channel.state, self._words
        if isinstance(run, SelfRecording):
            begin = _address(words)
            place = begin + 8 * COUNT, begin + HEADER_BYTES, RECORDS, _address(state)
            return cast("Callable[[], T]", run.recorded(Place(*place, number, signature, entry), tally))
        pack, file, floats, clock = RECORD.pack_into, self._map, self._floats, time.perf_counter

        def recorded() -> T:
            call = state[0] + 1
            digest = (state[1] * 31 + signature) % _DIGEST_PRIME
            n = words[COUNT] + 1
            at = HEADER_BYTES + n % RECORDS * RECORD_BYTES
            began = clock()
            pack(file, at, n, number, call, entry, digest, began, 0.0)
            words[COUNT] = n
            state[1], state[0] = digest, call
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

    def beside(self, others: Sequence[tuple[int, int]]) -> None:
        """Notes ranks of the job on this host: while one runs, it may look at these files."""
        self._say("M", 0, ",".join(f"{pid}-{start}" for pid, start in others))

    def remove(self) -> None:
        """Removes the files; the ring can still be written to, unseen."""
        remove(self.path)


def _address(words: memoryview) -> int:
    return ctypes.addressof(ctypes.c_int64.from_buffer(words))  # the doctor comes here where there is no NumPy


_ring: Ring | None = None
_early: tuple[str, int | None] | None = None


def start(rank: int, size: int) -> Ring | None:
    """Makes the files of this rank; further calls return them.  None where they cannot be made."""
    global _ring
    if (found := ring()) is not None:
        return found
    problems = []
    for place in places():
        try:
            _ring = Ring(place, rank, size)
            if cache.first_here():  # else each rank would look at the folders of all others
                sweep(place)
            break
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
    else:
        sys.stderr.write(
            f"meshmpi: rank {rank} keeps no record of its collectives, so hangs are not found"
            f" ({'; '.join(problems)}).  Name a folder in {FOLDER_VARIABLE}.\n"
        )
        return None
    if _early is not None:
        _ring.phase(*_early)
    return _ring


def remove(ring: Path) -> None:
    """Removes all files of a rank but the claim of the job's end, and the folder if that is all."""
    for suffix in (".ring", ".txt", ".stacks"):
        ring.with_suffix(suffix).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the claim is there, or somebody else has just removed it
        ring.parent.rmdir()


def sweep(place: Path) -> None:
    """Removes the folders in a place whose processes were killed, this user's only."""
    for folder in _folders_in(place):
        if _is_over(folder):
            _remove(folder)  # another rank may be at it


def neighbours(ring: Ring) -> list[Path]:
    """Rings of all ranks that keep theirs in the same place, of other jobs too."""
    return [found for f in _folders_in(ring.path.parent.parent) for found in f.glob("*.ring")]


def _beginning() -> str:
    return f"meshmpi-{os.geteuid()}-{processes.mark()}-"


_NAME = re.compile(rf"meshmpi-(\d+)-({processes.MARK})-[0-9a-f]{{16}}")


def _folders_in(place: Path) -> list[Path]:
    """This user's folders there; links and folders of others are none, whatever their name."""
    found = []
    with contextlib.suppress(OSError):  # the place, or one of them, has just been removed
        for entry in os.scandir(place):
            name = _NAME.fullmatch(entry.name)
            if name is None or int(name[1]) != os.geteuid():
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and not why_not_private(status):
                found.append(Path(entry.path))
    return found


def _is_over(folder: Path) -> bool:
    """Whether the process that made a folder has ended, and those that may look at its files."""
    name = _NAME.fullmatch(folder.name)
    if name is None or not processes.is_over(name[2]):
        return False
    where = name[2].split("-", 2)[2]
    others = [
        f"{other}-{where}"
        for table in folder.glob("*.txt")
        for line in (read_plain(table) or b"").decode(errors="replace").splitlines()
        if line.startswith("M\t")
        for other in line.split("\t")[-1].split(",")
    ]
    known = (m for m in others if re.fullmatch(processes.MARK, m))
    return all(map(processes.is_over, known)) and all(map(_is_over, _folders_in(folder)))


def places() -> Iterator[Path]:
    """Where folders may be made, best first."""
    if named := os.environ.get(FOLDER_VARIABLE):
        place = Path(named)
        if not place.is_dir() and not _NAME.fullmatch(place.name):  # else the launcher's, which is on another host
            with contextlib.suppress(OSError):  # told when the ring cannot be made there
                Folder.at(place).close()
            yield place
        elif place.is_dir():
            yield place
    if _takes_files(Path("/dev/shm")):
        yield Path("/dev/shm")
    import tempfile  # late, as it is seldom needed

    if _takes_files(Path(tempfile.gettempdir())):
        yield Path(tempfile.gettempdir())


def _takes_files(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def _remove(folder: Path) -> None:
    import shutil  # late, as it is seldom needed

    shutil.rmtree(folder, ignore_errors=True)


def ring() -> Ring | None:
    """The files of this rank; None before `start`, and in a forked child."""
    return _ring if _ring is not None and _ring.pid == os.getpid() else None


def phase(name: str, step: int | None = None) -> None:
    """Says what this rank does outside of collectives, for ``meshmpi status`` and reports."""
    global _early
    _early = (name, step)
    if (found := ring()) is not None:
        found.phase(name, step)


@contextlib.contextmanager
def folder_of_job(variables: dict[str, str]) -> Iterator[None]:
    """A folder for the files of a job's ranks on this host, which goes with the job."""
    if FOLDER_VARIABLE in variables:
        yield
        return
    with contextlib.ExitStack() as stack:
        for place in places():
            try:
                folder = stack.enter_context(Folder.new(place, _beginning()))
            except OSError:
                continue
            stack.callback(_remove, folder.path)
            variables[FOLDER_VARIABLE] = str(folder.path)
            break
        yield
