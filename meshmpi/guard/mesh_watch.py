"""Implements `meshmpi.runtime.hooks` for the guard, and debug mode.

In debug mode ranks compare their calls before every collective, and raise the same error if they differ. Ranks in
different communicators cannot compare; the watchdog detects that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshmpi.errors import ConfigError, ProgramError, suggest
from meshmpi.guard import abort, flight, meeting, recovery, watchdog
from meshmpi.guard.deadlock import CALL_THE_SAME, grouped, named
from meshmpi.hashes import blake2b
from meshmpi.runtime.calls import Call, CallKind, Tally, counted
from meshmpi.runtime.hooks import Met, Watch

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

T = TypeVar("T")
DEBUG_VARIABLE = "MESHMPI_DEBUG"
MODES = ("collectives",)
FIELDS = ("kind", "op", "dtype", "axes", "elements", "shape", "about")
_SAID = {"op": "operation", "dtype": "data type", "axes": "order of axes", "about": "instruction"}


def wanted() -> bool:
    """Whether MESHMPI_DEBUG asks for it."""
    modes = [m.strip() for m in os.environ.get(DEBUG_VARIABLE, "").split(",") if m.strip()]
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"{DEBUG_VARIABLE} names '{mode}'.", suggest(mode, MODES))
    return "collectives" in modes


def checked(
    comm: MPI.Intracomm, members: Sequence[int], kind: CallKind, line: str, run: Callable[[], T]
) -> Callable[[], T]:
    """``run``, before which the ranks of ``comm`` compare what they do."""
    mine = (kind, line)

    def check_and_run() -> T:
        given = comm.allgather(mine)
        if any(k != given[0][0] for k, _ in given):
            raise _difference([CallKind(*k) for k, _ in given], [at for _, at in given], members)
        return run()

    return check_and_run


def _difference(kinds: Sequence[CallKind], lines: Sequence[str], members: Sequence[int]) -> Exception:
    groups = grouped(zip(zip(kinds, lines, strict=True), members, strict=True))
    first = kinds[0]
    names = [f for f in FIELDS if any(getattr(k, f) != getattr(first, f) for k in kinds)]
    what = "kind" if "kind" in names else ", ".join(_SAID.get(n, n) for n in names)
    told = "; ".join(
        f"{named(ranks)}: {shown(kind)}{f' at {line}' if line else ''}" for (kind, line), ranks in groups.items()
    )
    return ProgramError(f"ranks of one group call collectives of different {what}: {told}.", CALL_THE_SAME)


def shown(kind: CallKind) -> str:
    """A collective in words, as ``all_reduce(sum, float32, 1000) over rows``."""
    inside = ", ".join(x for x in (kind.op, kind.dtype, kind.shape) if x)
    return f"{kind.kind}({inside})" + (f" over {kind.axes}" if kind.axes else "")


class MeshWatch(Watch):
    """Records what ranks do, has them watched, and ends or goes on together."""

    mesh_begins = staticmethod(abort.mesh_begins)
    mesh_ends = staticmethod(abort.mesh_ends)
    made = staticmethod(recovery.made)
    outlives_ranks = staticmethod(recovery.watching)
    wants_checks = staticmethod(wanted)
    checked = staticmethod(checked)

    def meet(self, comm: MPI.Intracomm, shape: str, line: str, make: Callable[[], MPI.Intracomm]) -> Met:
        """Makes the communicator of a mesh, whose ranks are watched from then on.  Collective."""
        from meshmpi.runtime.mpi import MPI

        if comm.size == 1:
            return recovery.made(comm, make), "", (0,)
        world, group = MPI.COMM_WORLD, comm.Get_group()
        members = tuple(group.Translate_ranks(None, world.Get_group()))
        group.Free()
        ring = flight.start(world.rank, world.size)

        def run() -> Met:
            meeting.wait_for_all(comm, shape, members, line, ring)
            abort.install(comm)
            made = recovery.made(comm, make)
            return made, *watchdog.join(made)

        # All meshes of the same ranks have one channel, as the communicator may be the user's.
        name = blake2b(repr(members).encode(), digest_size=8).hexdigest()
        return self.recorded(f"mesh/{name}", members, Call(CallKind("mm.Mesh"), 0, line), run, Tally())()

    def recorded(
        self, key: str, members: Sequence[int], call: Call, run: Callable[[], T], tally: Tally
    ) -> Callable[[], T]:
        """``run``, which records itself in the ring of this rank; only counted where there is none."""
        ring = flight.ring()
        if ring is None:
            return counted(run, tally)
        channel = ring.channel(key, members)
        return ring.recorded(run, tally, channel, call.kind, ring.entry(call.kind, call.bytes_sent, call.line))
