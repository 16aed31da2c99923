"""A collective call: its description, its counters, and the line of the user's code that made it.

No MPI and no mesh; does not know who records calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshmpi.dims import Axes

T = TypeVar("T")


class CallKind(NamedTuple):
    """What a collective is: ranks whose calls differ in this do not belong together."""

    kind: str  # all_reduce, ..., wait, broadcast, agree
    op: str = ""  # reduction, root, or empty
    dtype: str = ""  # data type of the elements
    axes: str = ""  # mesh axes joined by +
    elements: int = 0  # A count that must be equal on all ranks of the group
    shape: str = ""  # extents that must be equal on all ranks of the group, joined by x
    about: str = ""  # digest of the program and number of the instruction, or empty

    @property
    def signature(self) -> int:
        """A checksum of 31 bits."""
        return _signature(self)


@functools.lru_cache(4096)
def _signature(kind: CallKind) -> int:
    return zlib.crc32("\t".join(map(str, kind)).encode()) & 0x7FFFFFFF


@functools.lru_cache(4096)
def kind_of(kind: str, op: str, dtype: object, axes: str, shared: tuple[int, ...]) -> CallKind:
    """What a collective is; ``shared`` are extents that are equal on all ranks of the group."""
    shape = "x".join(map(str, shared))
    return CallKind(kind, op, str(dtype), axes, math.prod(shared), shape)


class Channel(NamedTuple):
    """A communicator as those who watch know it: axes, name in the job, ranks in MPI.COMM_WORLD."""

    axes: Axes
    key: str
    members: tuple[int, ...]


class Call(NamedTuple):
    """A collective that is being bound: what it is, the bytes this rank sends, the user's ``file:line``."""

    kind: CallKind
    bytes_sent: int
    line: str


class Tally:
    """Calls of collectives that are alike, and seconds spent in them.

    Attributes:
        calls, seconds: Of those that Python counts.
        native: For each collective that counts itself, these two numbers.
    """

    __slots__ = ("calls", "native", "seconds")

    def __init__(self) -> None:
        self.calls, self.seconds, self.native = 0, 0.0, list[Callable[[], tuple[int, float]]]()

    def total(self) -> tuple[int, float]:
        """Calls and seconds of all."""
        rows = [(self.calls, self.seconds), *(read() for read in self.native)]
        return sum(calls for calls, _ in rows), sum(seconds for _, seconds in rows)


class Place(NamedTuple):
    """Where a collective that records itself writes, as addresses, and what."""

    count: int  # collectives of the rank, the number of its newest record
    records: int  # a ring of records
    length: int  # of the ring
    channel: int  # calls of the communicator, and their digest
    number: int  # of the communicator
    signature: int  # of the call
    entry: int  # of the call in the rank's table


class SelfRecording(ABC):
    """A bound collective that counts and records itself, in C: Python would take longer than a short message."""

    @abstractmethod
    def recorded(self, place: Place | None, tally: Tally) -> Callable[[], None]:
        """The collective, which records itself there."""


def counted(run: Callable[[], T], tally: Tally) -> Callable[[], T]:
    """``run``, which counts itself: two numbers, as a short message takes a microsecond."""
    if isinstance(run, SelfRecording):
        return run.recorded(None, tally)  # type: ignore[return-value]
    clock = time.perf_counter

    def counting() -> T:
        began = clock()
        try:
            return run()
        finally:
            tally.seconds += clock() - began
            tally.calls += 1

    return counting


_described: list[tuple[str, str]] = []


@contextlib.contextmanager
def described(line: str, about: str) -> Iterator[None]:
    """Calls that are bound in here belong to ``line`` and to an instruction of a program."""
    _described.append((line, about))
    try:
        yield
    finally:
        _described.pop()


def description() -> tuple[str, str]:
    """Line and program of the call that is being bound: by `described`, or else the caller's line."""
    if _described:
        return _described[-1]
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
