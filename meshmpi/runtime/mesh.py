"""A mesh of MPI ranks: coordinates, groups, communicators, and counted collectives.

mpi4py is imported when a `Mesh` is made, not before.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np

from meshmpi.amounts import amount
from meshmpi.dims import Axes, MeshShape, MeshShapeLike
from meshmpi.errors import MeshError, ProgramError
from meshmpi.graph.arguments import checked
from meshmpi.ir.collective_bytes import REDUCED_IN
from meshmpi.ir.kinds import bytes_sent, wire_bytes
from meshmpi.kernels.views import aligned_empty
from meshmpi.runtime import hooks
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.calls import Call, CallKind, Channel, Tally, counted, description, kind_of
from meshmpi.runtime.operands import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Handed,
    ReduceScatter,
    Shift,
    as_method,
    check_array,
    checked_axes,
)
from meshmpi.runtime.world import refuse_singletons, size_error, without_networks

if TYPE_CHECKING:
    from mpi4py import MPI

    from meshmpi.kernels.steps import Bound
    from meshmpi.runtime.collectives import Group
    from meshmpi.runtime.lanes import Lanes
    from meshmpi.runtime.shared import SharedMemory

P = ParamSpec("P")
T = TypeVar("T")
Counters = dict[str, dict[str, list]]
"""Kind -> axes joined by + -> [calls, elements handed, bytes sent by the formulas, seconds]."""


_wire_bytes = functools.lru_cache(wire_bytes)  # naming a dtype takes longer than a short message


def _at_once(collective: Callable[P, Collective]) -> Callable[Concatenate[Mesh, P], None]:
    """The method that does a collective once; `Mesh.bind` prepares one that is called often."""

    def run(self: Mesh, *arguments: P.args, **named: P.kwargs) -> None:
        self.bind(collective(*arguments, **named))()

    as_method(run, collective)
    return run


class Mesh:
    """An n-dimensional array of MPI ranks whose axes have names.

    The ranks are those of a new Cartesian communicator, numbered row-major as in `MeshShape`, host by host
    whatever the launcher did: ranks that differ in the last axes only share a host where that is possible.
    Making a mesh is collective; so is the first use of each set of axes.  With more than one rank
    it also sees to it that an error on one rank ends the job on all (`meshmpi.runtime.hooks`).

    Args:
        shape: ``"rows:2;cols:2"``, a MeshShape, a mapping, or (name, size) pairs.
        comm: Any mpi4py intracommunicator; default MPI.COMM_WORLD.  It is duplicated.
        debug: Whether ranks compare every collective before they do it, and raise where they
            differ; default: whether the variable MESHMPI_DEBUG is ``collectives``.  One rank that
            asks for it is enough.
        order: ``"hosts"``, or ``"given"``: as the communicator numbers its ranks; or the rank in the communicator of
            each rank of the mesh.

    Attributes:
        shape: The MeshShape.
        size: Number of ranks.
        rank: This rank.
        coordinates: Axis name -> coordinate of this rank.
        comm: The communicator, of its own: Cartesian, unless the job goes on when ranks are lost.
        host_of: For each rank, the number of its host; hosts are numbered by their first rank.

    Raises:
        MeshError: The communicator has another number of ranks, or is an intercommunicator; the order is not one.

    Example:
        >>> Mesh("rows:1;cols:1").coordinates
        {'rows': 0, 'cols': 0}
    """

    @functools.partial(checked, name="Mesh")
    def __init__(
        self,
        shape: MeshShapeLike,
        comm: MPI.Intracomm | None = None,
        debug: bool | None = None,
        order: str | Sequence[int] = "hosts",
    ):
        with without_networks():
            from mpi4py import MPI

        from meshmpi.runtime import collectives

        self.shape = MeshShape(shape)
        if comm is None:
            comm = MPI.COMM_WORLD
            refuse_singletons(comm.size)
        if comm.Is_inter():
            raise MeshError(
                f"mesh {self.shape} was given an intercommunicator.",
                "Give an intracommunicator, for instance its Merge().",
            )
        self._watch = hooks.watch()
        if comm.size > 1:
            self._watch.mesh_begins()
        if comm.size != self.shape.size:
            raise size_error(self.shape, comm.size)
        self.comm: MPI.Intracomm
        own = functools.partial(_own, comm, self.shape.sizes, order)
        self.comm, self._key, self._members = self._watch.meet(comm, str(self.shape), description()[0], own)
        self.size, self.rank = self.comm.size, self.comm.rank
        self.coordinates = self.shape.coordinates(self.rank)
        self._tallies: dict[tuple[str, str, int, int], Tally] = {}
        self._collectives = collectives
        self.checks = False
        self._communicators: dict[Axes, MPI.Intracomm] = {}
        self._groups: dict[Axes, Group] = {}
        self._lanes: dict[Axes, Group] = {}
        self._channels: dict[str, Channel] = {}
        self._shared: SharedMemory | Literal[False] | None = None
        rows = gathered(
            self, (MPI.Get_processor_name(), self._watch.wants_checks() if debug is None else debug), "mesh"
        )
        self.host_of = _numbered([name for name, _ in rows])
        self.checks = any(asked for _, asked in rows)

    simulated = False

    @property
    def freed(self) -> bool:
        """Whether `free` was called."""
        return not self.comm  # a freed communicator is MPI_COMM_NULL, which counts as false

    def free(self) -> None:
        """Gives its communicators back to MPI, which has not many.  Collective.

        For programs that make many meshes; ``with mm.Mesh(...) as mesh:`` calls it at the end.  Steps
        compiled for a freed mesh can no longer be called, nor their results gathered.
        """
        if not self.freed:
            self.outside("free", self._free)()

    def _free(self) -> None:
        for comm in (*self._communicators.values(), *(lane.comm for lane in self._lanes.values())):
            if comm and comm is not self.comm:
                comm.Free()
        self._communicators.clear()
        self._groups.clear()
        self._lanes.clear()
        self.comm.Free()
        if self.size > 1:
            self._watch.mesh_ends()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:  # after an error other ranks may be elsewhere, and never come here
            self.free()

    def communicator(self, axes: Iterable[str]) -> MPI.Intracomm:
        """The communicator of the ranks that differ from this one only in ``axes``.

        Made at the first call for a set of axes, which all ranks must make alike, then kept.  Its
        ranks are numbered in the order of the mesh, whatever the order of ``axes``.
        """
        axes = self.shape.in_mesh_order((axes,) if isinstance(axes, str) else axes)
        if self.freed:
            raise MeshError(f"mesh {self.shape} was freed.", "Make a new mm.Mesh().")
        if axes not in self._communicators:
            self._communicators[axes] = self._sub(axes)
        return self._communicators[axes]

    def _sub(self, axes: Axes) -> MPI.Intracomm:
        from mpi4py import MPI

        if axes == self.shape.names:
            return self.comm
        if not axes:  # not Cart_sub, which need not know meshes without an axis
            return MPI.COMM_SELF.Dup()
        if self.comm.Get_topology() == MPI.CART:
            make = functools.partial(self.comm.Sub, [n in axes for n in self.shape.names])  # type: ignore
        else:
            make = functools.partial(self.comm.Split, self.group(axes)[0], self.rank)
        made = functools.partial(self._watch.made, self.comm, make)
        return cast("MPI.Intracomm", self.outside("communicator", made, "+".join(axes))())

    @property
    def hosts(self) -> int:
        """Number of hosts that the ranks run on."""
        return len(set(self.host_of))

    @property
    def axes_between_hosts(self) -> Axes:
        """The axes along which some neighbours are on different hosts: what they send crosses the network."""
        return self.shape.axes_between(self.host_of)

    def group(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks of this rank's group over ``axes``, ascending."""
        return self.shape.group(self.rank, axes)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``; each rank is in exactly one."""
        return self.shape.groups(axes)

    def _group(self, axes: Iterable[str]) -> Group:
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        group = self._groups.get(axes)
        if group is None:
            checked_axes(self.shape, axes)
            numbers = [self.shape.block_index(axes, self.shape.coordinates(r)) for r in self.group(axes)]
            index = self.shape.block_index(axes, self.coordinates)
            group = self._collectives.Group(axes, self.communicator(axes), tuple(numbers), index)
            self._groups[axes] = group
        return group

    def allocate(self, nbytes: int, owner: int | None = None) -> np.ndarray:
        """Bytes on a cache line, which the other ranks of the host can read where they can.  Collective.

        With an ``owner`` those of that rank; MeshError where this one cannot read them.
        """
        memory, problem = self._memory(), f"ranks {self.rank} and {owner} share no memory"
        if memory is not None:
            try:  # it fails on all ranks of the host, or on none
                own = self.outside("allocate", functools.partial(memory.allocate, nbytes))()
                return own if owner is None else memory.held_by(owner, own)
            except OSError as e:
                problem = f"ranks of a host cannot share {amount(nbytes, 'B')} of memory: {e}"
        if owner in (None, self.rank):
            return aligned_empty(nbytes)
        raise MeshError(f"{problem}.", "Start with MESHMPI_SHARED=off, which does not share memory.")

    def _memory(self, what: str = "allocate") -> SharedMemory | None:
        """What the ranks of a host share.  Collective; those who wait for it wait in ``what``.

        Nothing in a job that goes on without lost ranks: only MPI tells those who wait for one that it is gone.
        """
        if self._shared is None and self.size > 1 and not self._watch.outlives_ranks():
            from meshmpi.runtime import shared

            opened = functools.partial(shared.opened, self.comm, self.host_of, 1 << len(self.shape.names))
            self._shared = self.outside(what, opened)() or False
        return self._shared or None

    def shared_axes(self) -> Axes:
        """The axes along which ranks share memory.  Collective."""
        between = self.axes_between_hosts
        return tuple(a for a in self.shape.names if a not in between) if self._memory("compile") is not None else ()

    def bind(self, *calls: Collective, planned: bool = False) -> Bound:
        """A collective as a function without arguments, prepared once for arrays that stay.

        Args:
            calls: One object of `meshmpi.runtime.operands`: what this rank hands in.
            planned: Whether the arrays lie at the same place in what every rank got of `allocate`.

        Example:
            >>> x = np.ones(3)
            >>> Mesh("rows:1").bind(AllReduce(x, "rows"))()
        """
        (call,) = calls
        group = self._group(call.axes)
        handed = call.check(group.n, group.index)
        run = self._shared_bound(group, call) if planned and self._shared and group.n > 1 else None
        run = run or self._collectives.BINDERS[call.kind](group, call)
        return self._counted(call, group, handed, run, call.op)

    def _shared_bound(self, group: Group, call: Collective) -> Bound | None:
        """By memory that ranks share; None where that cannot be, on all ranks of the group."""
        members, memory = self.group(group.axes), self._shared
        if not memory:
            return None
        number = sum(1 << self.shape.names.index(a) for a in group.axes)
        if set(members) <= set(memory.ranks):
            return memory.bind(number, members, group, call)
        reduces = isinstance(call, AllReduce | ReduceScatter)
        if isinstance(call, Shift | AllToAll) or (reduces and (str(call.x.dtype) in REDUCED_IN or call.x.size == 0)):
            return None
        lanes = self._lanes_of(group)
        if lanes is None:
            return None
        # Hosts that could not share this memory have told nobody yet.
        able = functools.partial(group.comm.allgather, memory.can_divide(lanes, call))
        if not all(self.outside("lanes", able, axes=self.shape.in_mesh_order(group.axes))()):
            return None
        lane = self._lanes[group.axes]
        if isinstance(call, AllGather | ReduceScatter):
            return memory.bind_divided(number, lanes, lane.comm, call)
        assert isinstance(call, AllReduce)

        def reduce(part: np.ndarray) -> Bound:
            return self._collectives.BINDERS["all_reduce"](lane, AllReduce(part, group.axes, call.op))

        return memory.bind_lanes(number, lanes._replace(op=call.op), call.x, reduce)

    def _lanes_of(self, group: Group) -> Lanes | None:
        """How a group that spans hosts divides a collective; None where each of its ranks is alone on its host."""
        from mpi4py import MPI

        from meshmpi.runtime.lanes import lanes_of

        lanes = lanes_of(self.group(group.axes), group.blocks, self.host_of, self.rank)
        if lanes is not None and group.axes not in self._lanes:
            color = lanes.split.place if lanes.split.has_lane else MPI.UNDEFINED
            split = functools.partial(group.comm.Split, color, lanes.split.here)
            made = functools.partial(self._watch.made, group.comm, split)
            comm = self.outside("communicator", made, "lanes", self.shape.in_mesh_order(group.axes))()
            numbers = tuple(range(len(lanes.split.hosts)))
            self._lanes[group.axes] = self._collectives.Group(group.axes, cast("MPI.Intracomm", comm), numbers, 0)
        return lanes

    def _counted(self, call: Collective, group: Group, handed: Handed, run: Bound, op: str) -> Bound:
        """``run``, which counts and records itself; a short message takes a microsecond."""
        # One tally for all collectives which hand in as much, over the same axes.
        elements, dtype, shared = handed
        sent = bytes_sent(call.kind, elements, _wire_bytes(call.kind, dtype), group.n)
        tally = self._tallies.setdefault((call.kind, group.name, elements, sent), Tally())
        return self._recorded(kind_of(call.kind, op, dtype, group.name, shared), sent, run, tally)

    all_reduce = _at_once(AllReduce)
    all_gather = _at_once(AllGather)
    reduce_scatter = _at_once(ReduceScatter)
    all_to_all = _at_once(AllToAll)
    shift = _at_once(Shift)

    def _recorded(self, kind: CallKind, nbytes: int, run: Callable[[], T], tally: Tally) -> Callable[[], T]:
        """``run``, counted in ``tally`` and shown to whoever watches; checked first in debug mode."""
        channel = self._channels.get(kind.axes) or self._channel(kind.axes)
        if len(channel.members) == 1:
            return counted(run, tally)
        line, about = description()
        kind = kind._replace(about=about) if about else kind
        if self.checks:
            run = self._watch.checked(self.communicator(channel.axes), channel.members, kind, line, run)
        return self._watch.recorded(channel.key, channel.members, Call(kind, nbytes, line), run, tally)

    def _channel(self, name: str) -> Channel:
        """The communicator over axes joined by +, in any order, as others know it."""
        axes = self.shape.in_mesh_order(name.split("+")) if name else ()
        members = self._world(axes)
        found = Channel(axes, f"{self._key}/{'+'.join(axes)}/{members[0]}", members)
        self._channels[name] = found
        return found

    def _world(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self._members[r] for r in self.group(axes))

    def outside(self, kind: str, run: Callable[[], T], op: str = "", axes: Axes | None = None) -> Callable[[], T]:
        """``run``, a collective that is not a method, recorded like those.

        Args:
            kind: What to call it in reports, as ``agree``.
            run: Calls MPI.
            op: A detail that is the same on all ranks, as ``root 0``.
            axes: The communicator that it is on; default: ``comm``.
        """
        over = "+".join(self.shape.names if axes is None else axes)
        return self._recorded(CallKind(kind, op, "", over), 0, run, Tally())

    @contextlib.contextmanager
    def checking(self, debug: bool) -> Iterator[None]:
        """Collectives that are bound in here are checked too when ``debug`` is true."""
        before, self.checks = self.checks, self.checks or debug
        try:
            yield
        finally:
            self.checks = before

    @property
    def counters(self) -> Counters:
        """What the collectives did so far on this rank, see `Counters`; a new table each time."""
        table: Counters = {}
        for (kind, axes, elements, sent), tally in self._tallies.items():
            calls, seconds = tally.total()
            if calls or seconds:
                row = table.setdefault(kind, {}).setdefault(axes, [0, 0, 0, 0.0])
                row[0] += calls
                row[1] += calls * elements
                row[2] += calls * sent
                row[3] += seconds
        return table

    def in_background(self, axes: Iterable[str]) -> bool:
        """Whether an all_reduce over ``axes`` gains by `start_all_reduce`: not one that shared memory makes short."""
        hosts = [self.host_of[r] for r in self.group(axes)]
        return not self._shared or len(set(hosts)) == len(hosts)

    def start_all_reduce(self, x: np.ndarray, axes: Iterable[str], op: str = "sum") -> list[MPI.Request]:
        """Begins an `all_reduce`; ``x`` must not be touched before `wait` of what is returned.

        Raises:
            ProgramError: The data type is reduced in another one (`REDUCED_IN`).
        """
        call = AllReduce(x, axes, op)
        group, requests = self._group(axes), list[Any]()
        handed = call.check(group.n, group.index)
        if str(x.dtype) in REDUCED_IN:
            raise ProgramError(
                f"an all_reduce of {x.dtype} cannot run in the background: it is reduced in"
                f" {REDUCED_IN[str(x.dtype)]}.",
                "Use all_reduce().",
            )
        start = functools.partial(self._collectives.start_all_reduce, group, x, op, requests)
        self._counted(call, group, handed, start, f"start {op}")()
        return requests

    def advance(self, requests: list[MPI.Request]) -> None:
        """Lets MPI work on ``requests``, without waiting: most libraries only do when called."""
        if requests:
            self._collectives.MPI.Request.Testall(requests)

    def wait(self, requests: list[MPI.Request], axes: Iterable[str]) -> None:
        """Waits until all ``requests`` of `start_all_reduce` over ``axes`` are complete."""
        group, began = self._group(axes), time.perf_counter()
        finish = functools.partial(self._collectives.MPI.Request.Waitall, requests)
        self._recorded(CallKind("wait", "", "", group.name), 0, finish, Tally())()
        key = ("all_reduce", group.name, 0, 0)
        self._tallies.setdefault(key, Tally()).seconds += time.perf_counter() - began

    def broadcast(self, x: np.ndarray, axes: Iterable[str], root: int = 0) -> None:
        """Copies ``x`` of one rank into that of all ranks that differ from it only in ``axes``.

        Not an instruction of programs, and not in `counters`.

        Args:
            x: C-contiguous array of the same shape on all ranks of the group.
            axes: Mesh axes, major first: they number the ranks of the group.
            root: Number of the rank that gives.
        """
        check_array("broadcast", "array", x)
        group = self._group(axes)
        if not 0 <= root < group.n:
            raise MeshError(f"broadcast from rank {root} of {group.n} over {group.name}.", f"Give 0 to {group.n - 1}.")
        kind = kind_of("broadcast", f"root {root}", x.dtype, group.name, x.shape)
        giver = group.blocks.index(root)
        bits = x.reshape(-1).view(np.uint8)
        run = functools.partial(group.comm.Bcast, bits, giver)
        self._recorded(kind, x.nbytes if group.index == root else 0, run, Tally())()

    def __repr__(self) -> str:
        return f"<Mesh {self.shape}, rank {self.rank}>"


def _own(comm: MPI.Intracomm, sizes: Sequence[int], order: str | Sequence[int]) -> MPI.Intracomm:
    """A communicator of the same ranks, in this order; Cartesian, where that is safe.

    It is our own either way: the user's messages on ``comm`` cannot match ours.
    """
    ranks = _in_order(comm, order)
    same = ranks == list(range(comm.size))
    ordered = comm if same else cast("MPI.Intracomm", comm.Split(0, ranks.index(comm.rank)))
    # Open MPI's topologies are not made for lost ranks.
    plain = not sizes or hooks.watch().outlives_ranks()
    own = ordered.Dup() if plain else ordered.Create_cart(sizes, [False] * len(sizes), reorder=False)
    if ordered is not comm:
        ordered.Free()
    return own


def _in_order(comm: MPI.Intracomm, order: str | Sequence[int]) -> list[int]:
    """The ranks of a communicator as a mesh numbers them.  Collective."""
    everyone = list(range(comm.size))
    if order == "given" or (order == "hosts" and comm.size == 1):
        return everyone
    if order == "hosts":
        from mpi4py import MPI

        hosts = _numbered(comm.allgather(MPI.Get_processor_name()))
        return sorted(everyone, key=lambda r: (hosts[r], r))
    if isinstance(order, str) or sorted(order) != everyone:
        raise MeshError(
            f"order {order!r} does not number the {comm.size} ranks of the mesh.",
            f"Give 'hosts', 'given', or each of 0 to {comm.size - 1} once.",
        )
    return list(order)


def _numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Each name as the number of its first occurrence among the different ones."""
    first = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return tuple(first[name] for name in names)
