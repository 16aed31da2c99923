"""Detects ranks that do not join a new mesh, before a watchdog knows all ranks.

Ranks that make a mesh poll each other, and a rank that leaves the program without a mesh answers those that wait
(`leave`). They also check that all want the same mesh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshmpi.errors import HangError, MeshError
from meshmpi.guard import deadlock, ending, flight, watchdog
from meshmpi.guard.rings import Reader
from meshmpi.hashes import blake2b
from meshmpi.runtime import processes

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

NOTICE_SECONDS = 10.0
"""After this time a rank that waits for the first mesh says so, once."""
MOST_NAP = 0.01
LEAVE_SECONDS = 1.0
"""How long a rank that leaves by status 0, and was in no mesh of all ranks, waits for the others.
No longer: they may be programs that know nothing of meshmpi, and go straight to MPI_Finalize."""
HERE, UNKNOWN = -1, 256
"""What a rank tells the others, unless it is its exit status: it makes a mesh; it leaves, and nobody
knows by which status."""
_met_all = False
_leaving: list[Any] = []


def wait_for_all(comm: MPI.Intracomm, shape: str, members: Sequence[int], line: str, ring: flight.Ring | None) -> None:
    """Returns when all ranks are here; ends the job when one has left instead."""
    global _met_all
    digest = int.from_bytes(blake2b(shape.encode(), digest_size=7).digest(), "little")
    request, told = _tell(comm, HERE, digest)
    began, nap, quiet = time.monotonic(), 1e-4, watchdog.current() is not None
    while not request.Test():  # type: ignore[attr-defined]
        time.sleep(nap)  # others may build their graph for long: leave them the core
        nap = min(2 * nap, MOST_NAP)
        if not quiet and time.monotonic() - began > NOTICE_SECONDS:
            quiet = True
            _say_who_waits(ring, comm.size, line)
    from meshmpi.runtime.mpi import MPI

    _met_all = _met_all or MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.IDENT
    if (told[:, 0] != HERE).any():
        _end(told[:, 0], members, line)
    if (told[:, 1] != told[0, 1]).any():
        _refuse(comm.allgather(shape), members)


def _tell(comm: MPI.Intracomm, state: int, digest: int = 0) -> tuple[Any, np.ndarray]:
    told = np.zeros((comm.size, 2), np.int64)
    return comm.Iallgather(np.array([state, digest], np.int64), told), told


def _refuse(shapes: Sequence[str], members: Sequence[int]) -> None:
    groups = deadlock.grouped(zip(shapes, members, strict=True))
    told = "; ".join(f"{deadlock.named(ranks, 'make')} {shape}" for shape, ranks in groups.items())
    raise MeshError(f"ranks make different meshes at the same time: {told}.", "Give all of them the same shape.")


def _end(states: np.ndarray, members: Sequence[int], line: str) -> None:
    """Ends the job: some ranks have left, and those that are here would wait for ever."""
    left = [r for r, s in zip(members, states, strict=True) if s != HERE]
    here = [r for r, s in zip(members, states, strict=True) if s == HERE]
    status = int(states[states != HERE][0])
    how = "" if status == UNKNOWN else f" by exit status {status}"
    ending.end_job(
        f"{HangError.__name__}: {deadlock.named(left)} left the program{how} without a mesh,"
        f" while {deadlock.named(here, 'wait')} in mm.Mesh() at"
        f" {line}. All ranks must come to the same collectives: look for a return, an exit or a"
        " caught exception that only some ranks meet.\n",
        status if 0 < status < UNKNOWN else 1,
    )


def _say_who_waits(ring: flight.Ring | None, size: int, line: str) -> None:
    """One line from the lowest rank of this host that waits; of other hosts nothing is known."""
    if ring is None:
        return
    found = [Reader(path).look("", "running", 1) for path in flight.neighbours(ring)]
    here = sorted(
        s.rank
        for s in found
        if s is not None
        and s.waiting is not None
        and s.waiting.kind.kind == "mm.Mesh"
        and processes.is_of_this_job(s.pid)
    )
    rank = ring.rank
    if here and here[0] < rank:
        return
    sys.stderr.write(
        f"meshmpi: {deadlock.named(here or [rank])} of this host"
        f" {'wait' if len(here) > 1 else 'waits'} for {NOTICE_SECONDS:.0f} s in mm.Mesh() at {line}"
        f" until all {size} ranks have come to it; the others have not.\n"
    )
    sys.stderr.flush()


def leave(status: int | None, seconds: float, give_up: Callable[[], None]) -> None:
    """Tells ranks that may wait for this one that it leaves; for one that made no mesh with them."""
    from meshmpi.runtime.mpi import MPI

    if _met_all or _leaving:
        return
    request, told = _tell(MPI.COMM_WORLD, UNKNOWN if status is None else status)
    _leaving.extend((request, told))  # kept: MPI may use both until the end of the process
    limit = time.monotonic() + (seconds if status else LEAVE_SECONDS)
    nap = 1e-4
    while not request.Test():
        if time.monotonic() > limit:
            if status:
                give_up()
            return
        time.sleep(nap)
        nap = min(2 * nap, MOST_NAP)
