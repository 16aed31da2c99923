"""Reads the records of other ranks (`flight`), while they run or after their death.

A file may change while it is read: incomplete records are left out, and conclusions need two readings.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshmpi.files.private import open_plain, read_plain
from meshmpi.guard import flight
from meshmpi.runtime import processes
from meshmpi.runtime.calls import CallKind

_WORDS = struct.Struct("<14q")
_FLOATS = struct.Struct("<14d")
_SLOT = struct.Struct("<qq")
_RING_BYTES = flight.HEADER_BYTES + flight.RECORDS * flight.RECORD_BYTES
_MOST_TABLE_BYTES = 1 << 24  # taken in at a look; assumption: 1 KB for each of `MOST_ENTRIES`


class Member(NamedTuple):
    """A rank as others can find it."""

    rank: int  # in MPI.COMM_WORLD
    host: str  # name of its host, to show
    place: str  # equal for ranks that see each other's processes and files
    pid: int  # number of the process
    start: int  # its start time
    ring: str  # path of its ring, or empty


def member(rank: int, ring: flight.Ring | None) -> Member:
    """This process as a rank that others can find."""
    pid, host = os.getpid(), os.uname().nodename
    where = [host, processes.boot()]
    if ring is not None:
        where.append(str(os.stat(ring.path.parent).st_dev))
    return Member(rank, host, "|".join(where), pid, processes.start_time(pid), str(ring.path) if ring else "")


class Host(Protocol):
    """The ranks of this host, as `watchdog.Watchdog` knows them: what `host_link` and `ending` need of it."""

    me: Member

    def look(self) -> dict[int, Seen]: ...

    def hosts(self) -> dict[str, list[Member]]: ...

    def claim(self) -> bool: ...

    def gather_stacks(self, ranks: Sequence[int]) -> dict[int, str]: ...

    def clean(self) -> None: ...


class Call(NamedTuple):
    """One collective that a rank called."""

    group: str  # key of the communicator
    number: int  # the call's number among those of the communicator, from 1
    kind: CallKind  # what it is
    nbytes: int  # bytes that the rank sends
    line: str  # ``file:line`` of the user's code, or empty
    digest: int  # A digest of the communicator's calls up to this one
    seconds: float  # since it began, while it is not ended; else how long it took
    waits: bool  # whether it has not ended

    def __str__(self) -> str:
        k = self.kind
        if k.kind == flight.OTHER:
            return f"a collective after more than {flight.MOST_ENTRIES:,} different ones"
        size = f"{k.elements:,} elements, {self.nbytes:,} B sent" if k.dtype else ""
        details = ", ".join(x for x in (k.op, k.dtype, size) if x)
        over = f" over {k.axes}" if k.axes else ""
        at = f" at {self.line}" if self.line else ""
        return f"{k.kind}({details}){over}{at}"


@dataclass
class Seen:
    """What was seen of a rank."""

    rank: int  # in MPI.COMM_WORLD
    host: str  # its name
    pid: int  # number of the process
    life: str  # running, stopped, gone, or left: the program is over there
    status: int | None = None  # exit status where it has left; None where it is not known
    phase: str = ""  # what it does outside of collectives, or empty
    step: int | None = None  # the step that belongs to it, or None
    phase_seconds: float = 0.0  # since the phase began
    count: int = 0  # collectives called
    calls: list[Call] = field(default_factory=list)  # the last of them, oldest first
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> (calls begun, their digest)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # key of a communicator -> its ranks
    why: str = ""  # how it is known to be gone, or empty

    @property
    def waiting(self) -> Call | None:
        """The collective that has not ended, or None."""
        return next((c for c in reversed(self.calls) if c.waits), None)

    @property
    def last(self) -> Call | None:
        """The last collective called."""
        return self.calls[-1] if self.calls else None


def to_json(seen: Seen, most: int = flight.RECORDS) -> dict[str, Any]:
    """What `from_json` takes; of the calls the last ``most``."""
    return {**vars(seen), "calls": [list(c) for c in seen.calls[-most:]]}


def from_json(told: dict[str, Any]) -> Seen:
    """What `to_json` was given, after a way through JSON."""
    calls = [Call(c[0], c[1], CallKind(*c[2]), *c[3:]) for c in told["calls"]]
    reached = {k: (int(v[0]), int(v[1])) for k, v in told["reached"].items()}
    members = {k: tuple(int(r) for r in v) for k, v in told["members"].items()}
    seen = Seen(**{**told, "calls": calls, "reached": reached, "members": members})
    numbers: list[Any] = [seen.rank, seen.pid, seen.count, seen.phase_seconds, seen.step or 0, seen.status or 0]
    texts: list[Any] = [seen.host, seen.life, seen.phase, seen.why]
    for call in calls:
        numbers += [call.number, call.kind.elements, call.nbytes, call.digest, call.seconds]
        texts += [call.group, call.line, *call.kind[:4], *call.kind[5:]]
    wrong = [n for n in numbers if not isinstance(n, int | float)] + [t for t in texts if not isinstance(t, str)]
    if wrong:
        raise TypeError(f"numbers or texts are {wrong[:3]}")
    return seen


class Reader:
    """Looks at the files of one rank again and again."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._rest = b""
        self._kinds: dict[int, tuple[CallKind, int, str]] = {}
        self._groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._phases: dict[int, str] = {}

    def heartbeat(self) -> float:
        """When the rank's watchdog last ran, by this host's monotonic clock; 0 for never."""
        fd = open_plain(self.path)
        if fd is None:
            return 0.0
        with open(fd, "rb") as file:
            data = file.read(_FLOATS.size)
        return _FLOATS.unpack(data)[flight.HEARTBEAT] if len(data) == _FLOATS.size else 0.0

    def look(self, host: str, life: str, most: int = flight.RECORDS) -> Seen | None:
        """What the rank does now; None where the files are not there, or not yet whole."""
        data = read_plain(self.path, _RING_BYTES)
        if data is None or len(data) != _RING_BYTES or not self._read_table():
            return None
        words, floats = _WORDS.unpack_from(data), _FLOATS.unpack_from(data)
        if words[flight.MAGIC_AT] != flight.MAGIC or words[flight.VERSION_AT] != flight.VERSION:
            return None
        if words[flight.STATE] == flight.LEAVING:
            life = "left"
        status, step = words[flight.STATUS], words[flight.STEP]
        phase, now = words[flight.PHASE], time.perf_counter()
        seen = Seen(
            words[flight.RANK],
            host,
            words[flight.PID],
            life,
            None if status == flight.UNKNOWN_STATUS else status,
            self._phases.get(phase, ""),
            step if phase and step >= 0 else None,
            now - floats[flight.SINCE] if phase else 0.0,
            words[flight.COUNT],
        )
        self._note_calls(seen, data, now, most)
        return seen

    def _note_calls(self, seen: Seen, data: bytes, now: float, most: int) -> None:
        seen.members = dict(self._groups.values())
        for number, (group, _) in self._groups.items():
            if number < flight.SLOTS:
                slot = 8 * (flight.SLOTS_AT + 2 * number)
                seen.reached[group] = _SLOT.unpack_from(data, slot)
        first = max(1, seen.count - min(most, flight.RECORDS) + 1)
        for n in range(first, seen.count + 1):
            at = flight.HEADER_BYTES + n % flight.RECORDS * flight.RECORD_BYTES
            found, channel, call, entry, digest, began, ended = flight.RECORD.unpack_from(data, at)
            if found != n or channel not in self._groups or entry not in self._kinds:
                continue  # overwritten since, or the table was not yet written
            (group, _), (kind, nbytes, line) = self._groups[channel], self._kinds[entry]
            seconds = (ended or now) - began
            seen.calls.append(Call(group, call, kind, nbytes, line, digest, seconds, not ended))
            if seen.reached.get(group, (0, 0))[0] < call:
                seen.reached[group] = (call, digest)

    def _read_table(self) -> bool:
        """Takes in what was appended to the table since the last time; whether it is there."""
        fd = open_plain(self.path.with_suffix(".txt"))
        if fd is None:
            return False
        with open(fd, "rb") as file:
            file.seek(self._read)
            new = file.read(_MOST_TABLE_BYTES)
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, IndexError):  # damaged: its calls are left out
                self._take_in(line.decode(errors="replace"))
        return True

    def _take_in(self, line: str) -> None:
        what, number, *fields = line.split("\t")
        if what == "P":
            self._phases[int(number)] = fields[0]
        elif what == "C":
            members = tuple(int(r) for r in fields[1].split(","))
            self._groups[int(number)] = (fields[0], members)
        elif what == "E":
            _, kind, op, dtype, axes, elements, shape, about, nbytes, where = fields
            made = CallKind(kind, op, dtype, axes, int(elements), shape, about)
            self._kinds[int(number)] = (made, int(nbytes), where)
