"""A mesh whose ranks all live in one process: the meaning of every collective, and their oracle.

The methods are those of `Mesh`, but arrays are given and returned as lists indexed by rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from meshmpi.dims import Axes, MeshShape, MeshShapeLike
from meshmpi.errors import MeshError
from meshmpi.graph.arguments import checked
from meshmpi.ir.halos import pieces_to
from meshmpi.ir.kinds import bytes_sent, wire_bytes
from meshmpi.kernels.views import aligned_empty
from meshmpi.runtime.mesh import Counters
from meshmpi.runtime.operands import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Handed,
    ReduceScatter,
    Shift,
    as_method,
    block,
    checked_axes,
    piece_source,
    piece_target,
    starts,
)

_OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
T = TypeVar("T")


def _at_once(collective: Callable[..., Collective]) -> Callable[..., None]:
    """The method that does a collective once, on lists by rank."""

    def run(self: SimulatedMesh, *arguments: Any, **named: Any) -> None:
        call = collective(*arguments, **named)
        self.bind(*(call.of_rank(r) for r in range(self.size)))()

    as_method(run, collective)
    return run


class SimulatedMesh:
    """All ranks of a mesh in one process, without MPI.

    Args:
        shape: As for `Mesh`.

    Attributes:
        shape: The MeshShape.
        size: Number of ranks.
        rank: 0: one process speaks for all, as rank 0 does of a real mesh.
        coordinates: For each rank, axis name -> coordinate.
        counters: For each rank, what `Mesh.counters` would hold there; seconds stay 0.

    Example:
        >>> mesh = SimulatedMesh("rows:2")
        >>> xs = [np.array([1.0]), np.array([2.0])]
        >>> mesh.all_reduce(xs, ("rows",))
        >>> float(xs[0][0]), float(xs[1][0])
        (3.0, 3.0)
    """

    @functools.partial(checked, name="SimulatedMesh")
    def __init__(self, shape: MeshShapeLike, shared: Sequence[str] = ()):
        self.shape = MeshShape(shape)
        self._shared_axes = checked_axes(self.shape, shared)
        self.size, self.rank = self.shape.size, 0
        self.coordinates = [self.shape.coordinates(r) for r in range(self.size)]
        self.counters: list[Counters] = [{} for _ in range(self.size)]
        self.host_of: tuple[int, ...] = (0,) * self.size

    simulated, comm, hosts, freed, checks, axes_between_hosts = True, None, 1, False, False, ()
    """As in `Mesh`; one process cannot differ from itself, so nothing is checked."""

    def allocate(self, nbytes: int, owner: int | None = None) -> np.ndarray:
        """Bytes on a cache line; those of an owner are kept by who asks, as all ranks are played here."""
        return aligned_empty(nbytes)

    def shared_axes(self) -> Axes:
        """The axes given as ``shared``."""
        return self._shared_axes

    def in_background(self, axes: Iterable[str]) -> bool:
        """Nothing runs in the background here."""
        return False

    def bind(self, *calls: Collective, planned: bool = False) -> Callable[[], None]:
        """A collective as a function without arguments; of each rank one of `meshmpi.runtime.operands`."""
        first, groups = calls[0], []
        axes = checked_axes(self.shape, first.axes)
        for ranks in self._by_block(axes):
            group = [calls[r] for r in ranks]
            handed = [call.check(len(ranks), k) for k, call in enumerate(group)]
            groups.append((list(zip(ranks, handed, strict=True)), group, [calls[r] for r in sorted(ranks)]))

        def run() -> None:
            for handed, group, by_rank in groups:
                for rank, what in handed:
                    self._count(first.kind, axes, rank, what)
                MEANINGS[first.kind](group, by_rank)

        return run

    all_reduce = _at_once(AllReduce)
    all_gather = _at_once(AllGather)
    reduce_scatter = _at_once(ReduceScatter)
    all_to_all = _at_once(AllToAll)
    shift = _at_once(Shift)

    def start_all_reduce(self, xs: Sequence[np.ndarray], axes: Iterable[str], op: str = "sum") -> list[Any]:
        """An `all_reduce`, which is done at once: nothing runs in the background here."""
        self.all_reduce(xs, axes, op)
        return []

    def advance(self, requests: list[Any]) -> None:
        """Does nothing; see `Mesh.advance`."""

    def wait(self, requests: list[Any], axes: Iterable[str]) -> None:
        """Does nothing; see `Mesh.wait`."""

    def free(self) -> None:
        """Does nothing; `Mesh.free` gives communicators back."""

    def outside(self, kind: str, run: Callable[[], T], op: str = "", axes: Axes | None = None) -> Callable[[], T]:
        """``run`` itself: there is nobody to show it to."""
        return run

    def checking(self, debug: bool) -> contextlib.AbstractContextManager[None]:
        """Does nothing; see `Mesh.checking`."""
        return contextlib.nullcontext()

    def __enter__(self) -> SimulatedMesh:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.free()

    def communicator(self, axes: Iterable[str]) -> NoReturn:
        """Raises MeshError: there is none."""
        raise MeshError(f"simulated mesh {self.shape} has no communicators.", "Use a Mesh under mpirun.")

    def group(self, axes: Iterable[str], rank: int = 0) -> tuple[int, ...]:
        """Ranks of the group of ``rank`` over ``axes``, ascending."""
        return self.shape.group(rank, axes)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``; each rank is in exactly one."""
        return self.shape.groups(axes)

    def _by_block(self, axes: Axes) -> Iterator[list[int]]:
        for group in self.shape.groups(axes):
            yield sorted(group, key=lambda r: self.shape.block_index(axes, self.coordinates[r]))

    def _count(self, kind: str, axes: Axes, rank: int, handed: Handed) -> None:
        row = self.counters[rank].setdefault(kind, {}).setdefault("+".join(axes), [0, 0, 0, 0.0])
        row[0] += 1
        row[1] += handed.elements
        row[2] += bytes_sent(kind, handed.elements, wire_bytes(kind, handed.dtype), self.shape.count(axes))

    def __repr__(self) -> str:
        return f"<SimulatedMesh {self.shape}>"


# ---- what each collective does to a group: its calls in the order of blocks, and in that of ranks ----


def _all_reduce(group: Sequence[AllReduce], by_rank: Sequence[AllReduce]) -> None:
    total = _reduced([c.x for c in by_rank], by_rank[0].op)
    for c in group:
        c.x[...] = total


def _all_gather(group: Sequence[AllGather], by_rank: Sequence[AllGather]) -> None:
    whole = np.concatenate([c.x for c in group], group[0].axis)
    for c in group:
        c.out[...] = whole


def _reduce_scatter(group: Sequence[ReduceScatter], by_rank: Sequence[ReduceScatter]) -> None:
    total, begin = _reduced([c.x for c in by_rank], by_rank[0].op), starts(group[0].sizes)
    for k, c in enumerate(group):
        c.out[...] = block(total, c.axis, begin[k], begin[k + 1])


def _all_to_all(group: Sequence[AllToAll], by_rank: Sequence[AllToAll]) -> None:
    whole = np.concatenate([c.x for c in group], group[0].concat_axis)
    begin = starts(group[0].split_sizes)
    for k, c in enumerate(group):
        c.out[...] = block(whole, c.split_axis, begin[k], begin[k + 1])


def _shift(group: Sequence[Shift], by_rank: Sequence[Shift]) -> None:
    for c in group:
        c.out[...] = c.value
    for k, c in enumerate(group):
        for p in pieces_to(c.exchange, k):
            to = piece_target(c.out, c.axis, c.exchange, p)
            to[...] = piece_source(group[p.source].xs, c.axis, c.exchange, p)


def _reduced(xs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """The reduction of ``xs`` from first to last; bfloat16 in float32, rounded once."""
    dtype = xs[0].dtype
    wide = np.float32 if dtype.name == "bfloat16" else dtype
    with np.errstate(all="ignore"):  # as MPI, which knows no warnings
        total = xs[0].astype(wide)
        for x in xs[1:]:
            _OPS[op](total, x.astype(wide, copy=False), out=total)
        return total.astype(dtype)


MEANINGS: dict[str, Callable[[Any, Any], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shift": _shift,
}
