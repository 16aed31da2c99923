"""Where others attach themselves to the runtime: one object that is asked when meshes and calls are made.

The runtime makes meshes and runs collectives.  To record what ranks do, to find ranks that wait for
each other, to end a job together or to go on without lost ranks is the work of a `Watch`.  The front
of the package names one (`on_first_mesh`); it is made with the first mesh.  Without one, meshes work
as plain MPI does.

A collective costs nothing more for it: a `Watch` is asked once, when the collective is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from meshmpi.runtime.calls import Call, CallKind, Tally, counted

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Met = tuple["MPI.Intracomm", str, tuple[int, ...]]
"""Communicator of a mesh, its name in the job, and its ranks in MPI.COMM_WORLD."""


class Watch(Protocol):
    """What a mesh tells and asks whoever watches its ranks."""

    def mesh_begins(self) -> None:
        """A mesh of several ranks is about to be made; from now on a failing rank must end the others."""

    def mesh_ends(self) -> None:
        """A mesh of several ranks was freed."""

    def meet(self, comm: MPI.Intracomm, shape: str, line: str, make: Callable[[], MPI.Intracomm]) -> Met:
        """Makes the communicator of a mesh.  Collective.

        Args:
            comm: The ranks.
            shape: The mesh, which must be the same on all of them.
            line: ``file:line`` that makes the mesh.
            make: Makes the communicator.
        """
        ...

    def made(self, parent: MPI.Intracomm, make: Callable[[], T]) -> T:
        """What ``make`` returns, a communicator of ranks of ``parent``.  Collective."""
        ...

    def outlives_ranks(self) -> bool:
        """Whether the job goes on when ranks are lost; communicators then have no topology."""
        ...

    def wants_checks(self) -> bool:
        """Whether ranks compare collectives where the program does not say."""
        ...

    def checked(
        self, comm: MPI.Intracomm, members: Sequence[int], kind: CallKind, line: str, run: Callable[[], T]
    ) -> Callable[[], T]:
        """``run``, before which the ranks of ``comm`` compare what they are about to do."""
        ...

    def recorded(
        self, key: str, members: Sequence[int], call: Call, run: Callable[[], T], tally: Tally
    ) -> Callable[[], T]:
        """``run``, which counts itself in ``tally`` and notes when it begins and ends.

        Args:
            key: Name of the communicator, unique in the job.
            members: Its ranks in MPI.COMM_WORLD.
            call: What ``run`` does.
            run: A collective.
            tally: Takes number and seconds of the calls.
        """
        ...


class Unwatched:
    """Meshes alone, as plain MPI has them."""

    def mesh_begins(self) -> None:
        pass

    def mesh_ends(self) -> None:
        pass

    def meet(self, comm: MPI.Intracomm, shape: str, line: str, make: Callable[[], MPI.Intracomm]) -> Met:
        from mpi4py import MPI

        group = comm.Get_group()
        members = tuple(group.Translate_ranks(None, MPI.COMM_WORLD.Get_group()))
        group.Free()
        return make(), "", members

    def made(self, parent: MPI.Intracomm, make: Callable[[], T]) -> T:
        return make()

    def outlives_ranks(self) -> bool:
        return False

    def wants_checks(self) -> bool:
        return False

    def checked(
        self, comm: MPI.Intracomm, members: Sequence[int], kind: CallKind, line: str, run: Callable[[], T]
    ) -> Callable[[], T]:
        return run

    def recorded(
        self, key: str, members: Sequence[int], call: Call, run: Callable[[], T], tally: Tally
    ) -> Callable[[], T]:
        return counted(run, tally)


_watch: Watch = Unwatched()
_connect: Callable[[], Watch] | None = None


def on_first_mesh(connect: Callable[[], Watch] | None) -> None:
    """Names what makes the `Watch` of this process; called when it is first needed.  None: nobody watches."""
    global _watch, _connect
    _watch, _connect = Unwatched(), connect


def watch() -> Watch:
    """Whoever watches the meshes of this process."""
    global _watch, _connect
    if _connect is not None:
        connect, _connect = _connect, None
        _watch = connect()
    return _watch
