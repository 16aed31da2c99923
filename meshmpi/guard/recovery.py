"""Continues without lost ranks, by MPI's user-level failure mitigation (ULFM; Open MPI 5 ``--with-ft ulfm``).

When a process dies, calls that need it return an error. A rank that gets this error revokes all communicators, so
that no rank waits for one that has turned back; then the survivors agree and shrink.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from meshmpi.dims import Axes, MeshShape
from meshmpi.errors import ConfigError
from meshmpi.guard import flight, watchdog
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.calls import CallKind, Tally, description

if TYPE_CHECKING:
    from meshmpi.guard.deadlock import Finding
    from meshmpi.runtime.mpi import MPI

T = TypeVar("T")
ENABLED_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Set by Open MPI's launcher when it was told ``--with-ft ulfm``."""
NOTICE_SECONDS = 8.0
"""How long MPI may take to notice a process that the watchdog knows to be gone.  Measured with Open
MPI 5.0.11 on one machine: less than 0.1 s; a host that MPI never hears of again takes for ever."""
START_SECONDS = 300.0
"""Most time until MPI has started on all ranks.  One that is killed before is waited for by the
others for ever: only what has started can be revoked."""
FINISHED, TO_THE_END = 1, 2
"""Bits on which survivors agree: nobody lost anybody; nobody was asked to stop."""


class LostRank(NamedTuple):
    """A rank that was lost."""

    rank: int  # in MPI.COMM_WORLD
    host: str  # name of its host
    pid: int  # its process there

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


# ---- communicators that can be revoked -------------------------------------------------------

_made: list[MPI.Intracomm] | None = None
_lost_some = False
_at_shrinking: list[Callable[[], None]] = []


def at_shrinking(forget: Callable[[], None]) -> None:
    """Names what is called when ranks were lost and communicators of them are of no use any more."""
    _at_shrinking.append(forget)


def watching() -> bool:
    """Whether communicators must be made by `made`: this job goes on when ranks are lost."""
    return _made is not None


def lost_some() -> bool:
    """Whether ranks were left behind in this job."""
    return _lost_some


def made(parent: MPI.Intracomm, make: Callable[[], T]) -> T:
    """A new communicator, noted for the day when it must be revoked.

    After this returns, every rank has noted it: one that failed in ``make`` revokes the parent, in
    whose barrier the others wait.
    """
    comm = make()
    if _made is not None:
        if comm:  # MPI.COMM_NULL on ranks that are not in it
            _made.append(comm)  # type: ignore[arg-type]
        parent.Barrier()
    return comm


def is_loss(error: BaseException) -> bool:
    """Whether an error says that a rank was lost, or that others have noticed it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    return error.Get_error_class() in classes  # type: ignore[attr-defined]


# ---- the next mesh ---------------------------------------------------------------------------


def smaller_mesh(wanted: MeshShape, ranks: int, spared: Axes = ()) -> MeshShape:
    """The mesh that at most ``ranks`` ranks make, in the place of ``wanted``.

    No axis becomes larger.  Of such meshes that with the most ranks is taken; among equals the one
    whose ``spared`` axes keep most ranks, then that whose earlier axes are larger.

    Args:
        wanted: The mesh of all ranks.
        ranks: Those there are, at least 1.
        spared: Axes to shrink last: over which no batch is split, so that a rank would have to
            hold more of the model.

    Example:
        >>> smaller_mesh(MeshShape("rows:2;cols:2"), 3, ("cols",))
        MeshShape(rows:1;cols:2)
    """

    def merit(sizes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        total, kept = 1, 1
        for name, size in zip(wanted.names, sizes, strict=True):
            total *= size
            kept *= size if name in spared else 1
        return (total if total <= ranks else 0, kept, sizes)

    choices = itertools.product(*(range(1, size + 1) for size in wanted.sizes))
    best = max(choices, key=merit, default=())
    return MeshShape(list(zip(wanted.names, best, strict=True)))


@contextlib.contextmanager
def _limited_start() -> Iterator[None]:
    """Ends this process by SIGALRM, with its stacks shown, when MPI does not start in time.

    Both work while MPI_Init holds the interpreter.
    """
    faulthandler.dump_traceback_later(START_SECONDS, exit=False)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS + 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()


# ---- the survivors ---------------------------------------------------------------------------


def check_possible() -> None:
    """Raises ConfigError where this MPI job would not outlive a rank."""
    from meshmpi.runtime.mpi import MPI

    if MPI.COMM_WORLD.size == 1 or os.environ.get(ENABLED_VARIABLE, "") in ("1", "true", "enabled"):
        return
    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    raise ConfigError(
        f"mesh.recover is on, but this job of {MPI.COMM_WORLD.size} ranks, started by {name},"
        " ends when a rank is lost.",
        "Start it by `meshmpi train ... --ranks N --recover` or `mpirun --with-ft ulfm` of Open MPI"
        " 5; with another MPI use `meshmpi train ... --ranks N --restarts K`, which starts the job"
        " again.",
    )


class Survivors:
    """The ranks of this job that are still there, numbered anew.  Making it is collective."""

    def __init__(self) -> None:
        with _limited_start():
            from meshmpi.runtime.mpi import MPI

        global _made
        check_possible()
        self._mpi = MPI
        if MPI.COMM_WORLD.size > 1:
            _made = []
        here = LostRank(MPI.COMM_WORLD.rank, os.uname().nodename, os.getpid())
        self._comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self._ranks: list[LostRank] = self._comm.allgather(here)
        self._generation = 0
        self._noticed: dict[tuple[int, ...], float] = {}
        if MPI.COMM_WORLD.size > 1:
            _noted().append(self._comm)

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the survivors; a loss in it is raised, see `is_loss`."""
        return self._comm

    def outside(self, kind: str, run: Callable[[], T], op: str = "") -> Callable[[], T]:
        """``run``, a collective of the survivors, recorded like those of a `Mesh`."""
        # Also on ranks to spare: one that takes part in a later mesh has made the same calls.
        ring = flight.start(self._mpi.COMM_WORLD.rank, self._mpi.COMM_WORLD.size)
        if ring is None or self.size == 1:
            return run
        members = tuple(member.rank for member in self._ranks)
        channel = ring.channel(f"survivors/{self._generation}", members)
        what, line = CallKind(kind, op, axes="survivors"), description()[0]
        return ring.recorded(run, Tally(), channel, what, ring.entry(what, 0, line))

    def gathered(self, value: T) -> list[T]:
        """The values of all survivors, on all of them.  Collective; a loss in it is raised."""
        return gathered(self, value)

    def given_by(self, rank: int, value: Any) -> Any:
        """The value of one survivor, on all of them.  Collective; a loss in it is raised."""
        give = functools.partial(self._comm.bcast, value, rank)
        return self.outside("broadcast", give, f"root {rank}")()

    def first(self, size: int, use: Callable[[MPI.Intracomm], T]) -> T | None:
        """What ``use`` makes of the first survivors; None on those that are left over.  Collective."""
        comm = self._comm
        color = 0 if comm.rank < size else self._mpi.UNDEFINED
        split = functools.partial(comm.Split, color, comm.rank)
        active = self.outside("communicator", functools.partial(made, comm, split))()
        if not active:
            return None
        result = use(cast("MPI.Intracomm", active))
        if (dog := watchdog.current()) is not None:
            dog.handler = self._decide
        return result

    def turn_back(self) -> None:
        """Wakes every rank that waits for this one, which will not come any more."""
        for comm in _noted():
            if comm:  # not MPI_COMM_NULL, as one of a mesh that was freed
                comm.Revoke()

    def agree(self, bits: int) -> int:
        """The bits that all survivors give, equal on all of them.  Collective; outlives losses."""
        value = np.array([bits], np.int32)
        nap, request = 1e-4, self._comm.Iagree(value)
        try:
            while not request.Test():
                time.sleep(nap)  # a rank to spare waits for hours: do not burn its core
                nap = min(2 * nap, 0.05)
        except self._mpi.Exception as error:  # somebody is lost; the agreed value is there
            if not is_loss(error):
                raise
        return int(value[0])

    def shrink(self) -> list[LostRank]:
        """Leaves the lost ranks behind; returns them.  Collective."""
        global _lost_some
        before = self._comm.Get_group()
        self._comm = cast("MPI.Intracomm", self._comm.Shrink())
        places = before.Translate_ranks(list(range(before.size)), self._comm.Get_group())
        lost = [member for member, place in zip(self._ranks, places, strict=True) if place == self._mpi.UNDEFINED]
        self._ranks = [member for member in self._ranks if member not in lost]
        self._generation += 1  # calls that a loss has cut short are not counted alike
        _lost_some = _lost_some or bool(lost)
        _noted()[:] = [self._comm]  # the others are revoked
        for forget in _at_shrinking:
            forget()
        if (dog := watchdog.current()) is not None:
            dog.forget([member.rank for member in lost])
        return lost

    def _decide(self, finding: Finding) -> bool:
        """Whether the job goes on with a finding; on the watchdog's thread, which must not call MPI."""
        if finding.kind != "lost":
            return False
        now = time.monotonic()
        return now - self._noticed.setdefault(finding.ranks, now) < NOTICE_SECONDS


def _noted() -> list[Any]:
    return [] if _made is None else _made


def named(lost: Sequence[LostRank]) -> str:
    """The lost ranks for a message, those of one host together."""
    if len(lost) <= 3:
        return " and ".join(map(str, lost))
    hosts = list(dict.fromkeys(member.host for member in lost))
    numbers = ", ".join(str(member.rank) for member in lost)
    return f"ranks {numbers} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)})"
