"""Hooks of the runtime: a `Watch` is called when meshes and collectives are made.

A `Watch` records calls, detects deadlocks, ends a job on all ranks and continues without lost ranks. The front of the
package installs one (`on_first_mesh`). A collective calls it once, when it is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshmpi.runtime.calls import Call, CallKind, Tally, counted

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Met = tuple["MPI.Intracomm", str, tuple[int, ...]]
"""Communicator of a mesh, its name in the job, and its ranks in MPI.COMM_WORLD."""


class Watch:
    """What a mesh tells and asks whoever watches its ranks.  This one watches nothing: meshes are as in plain MPI."""

    @staticmethod
    def mesh_begins() -> None:
        """A mesh of several ranks is about to be made; from now on a failing rank must end the others."""

    @staticmethod
    def mesh_ends() -> None:
        """A mesh of several ranks was freed."""

    def meet(self, comm: MPI.Intracomm, shape: str, line: str, make: Callable[[], MPI.Intracomm]) -> Met:
        """Makes the communicator of a mesh.  Collective."""
        from mpi4py import MPI

        made = make()
        group = made.Get_group()
        members = tuple(group.Translate_ranks(None, MPI.COMM_WORLD.Get_group()))
        group.Free()
        return made, "", members

    @staticmethod
    def made(parent: MPI.Intracomm, make: Callable[[], T]) -> T:
        """What ``make`` returns, a communicator of ranks of ``parent``.  Collective."""
        return make()

    @staticmethod
    def outlives_ranks() -> bool:
        """Whether the job goes on when ranks are lost; communicators then have no topology."""
        return False

    @staticmethod
    def wants_checks() -> bool:
        """Whether ranks compare collectives where the program does not say."""
        return False

    @staticmethod
    def checked(
        comm: MPI.Intracomm, members: Sequence[int], kind: CallKind, line: str, run: Callable[[], T]
    ) -> Callable[[], T]:
        """``run``, before which the ranks of ``comm`` compare what they are about to do."""
        return run

    def recorded(
        self, key: str, members: Sequence[int], call: Call, run: Callable[[], T], tally: Tally
    ) -> Callable[[], T]:
        """``run``, which counts itself in ``tally`` and notes when it begins and ends.

        ``key`` names the communicator in the whole job; ``members`` are its ranks in MPI.COMM_WORLD.
        """
        return counted(run, tally)


_watch: Watch = Watch()
_connect: Callable[[], Watch] | None = None


def on_first_mesh(connect: Callable[[], Watch] | None) -> None:
    """Names what makes the `Watch` of this process; called when it is first needed.  None: nobody watches."""
    global _watch, _connect
    _watch, _connect = Watch(), connect


def watch() -> Watch:
    """Whoever watches the meshes of this process."""
    global _watch, _connect
    if _connect is not None:
        connect, _connect = _connect, None
        _watch = connect()
    return _watch
