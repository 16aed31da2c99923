"""What meshes are told and asked: the guard's answer to `meshmpi.runtime.hooks`.

Knows communicators, names and ranks; no mesh, no program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshmpi.guard import abort, crosscheck, flight, meeting, recovery, watchdog
from meshmpi.runtime.calls import Call, CallKind, Tally, counted
from meshmpi.runtime.hooks import Met

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

T = TypeVar("T")


class MeshWatch:
    """Records what ranks do, has them watched, and ends or goes on together."""

    mesh_begins = staticmethod(abort.mesh_begins)
    mesh_ends = staticmethod(abort.mesh_ends)
    made = staticmethod(recovery.made)
    outlives_ranks = staticmethod(recovery.watching)
    wants_checks = staticmethod(crosscheck.wanted)
    checked = staticmethod(crosscheck.checked)

    def meet(self, comm: MPI.Intracomm, shape: str, line: str, make: Callable[[], MPI.Intracomm]) -> Met:
        """Makes the communicator of a mesh, whose ranks are watched from then on.  Collective.

        Raises:
            MeshError: On all ranks alike, where they want different meshes.
        """
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
        name = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
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
