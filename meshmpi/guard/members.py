"""Ranks as others can find them: host, process, record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from meshmpi.guard import flight
from meshmpi.runtime import processes


class Member(NamedTuple):
    """A rank as others can find it.

    Attributes:
        rank: In MPI.COMM_WORLD.
        host: Name of its host, to show.
        place: Equal for ranks that see each other's processes and files.
        pid: Number of the process.
        start: Its start time.
        ring: Path of its ring, or empty.
    """

    rank: int
    host: str
    place: str
    pid: int
    start: int
    ring: str


def member(rank: int, ring: flight.Ring | None) -> Member:
    """This process as a rank that others can find."""
    pid, host = os.getpid(), os.uname().nodename
    where = [host, _text("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")]
    if ring is not None:
        where.append(str(os.stat(ring.path.parent).st_dev))
    return Member(rank, host, "|".join(where), pid, processes.start_time(pid), str(ring.path) if ring else "")


def _text(path: str) -> str:
    return Path(path).read_text().strip() if os.path.exists(path) else ""


def _link(path: str) -> str:
    return os.readlink(path) if os.path.lexists(path) else ""
