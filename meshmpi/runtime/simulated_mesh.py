"""A mesh whose ranks all live in one object: the meaning of every collective, and their oracle.

The methods are those of `Mesh` in the same argument order, but arrays are given and returned as
lists indexed by rank.  NumPy only: no MPI, no programs, no tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from meshmpi.dims import Axes, MeshShape, MeshShapeLike
from meshmpi.errors import MeshError, ProgramError
from meshmpi.graph.arguments import checked
from meshmpi.ir.halos import HaloExchange, pieces_to
from meshmpi.ir.kinds import bytes_sent, wire_bytes
from meshmpi.runtime.blocks import (
    block,
    check_array,
    check_axes,
    check_op,
    check_out,
    check_shift,
    check_sizes,
    piece_source,
    piece_target,
    replaced,
    starts,
)
from meshmpi.runtime.mesh import Counters

_OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
Arrays = Sequence[np.ndarray]
T = TypeVar("T")


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
    def __init__(self, shape: MeshShapeLike):
        self.shape = MeshShape(shape)
        self.size, self.rank = self.shape.size, 0
        self.coordinates = [self.shape.coordinates(r) for r in range(self.size)]
        self.counters: list[Counters] = [{} for _ in range(self.size)]

    simulated, comm, hosts, freed, checks = True, None, 1, False, False
    """As of `Mesh`; one process cannot differ from itself, so nothing is checked."""

    def free(self) -> None:
        """Does nothing; `Mesh.free` gives communicators back."""

    def bind(self, collective: str, *arguments: Any, **named: Any) -> Callable[[], None]:
        """A collective as a function without arguments.  See `Mesh.bind`."""
        return functools.partial(getattr(self, collective), *arguments, **named)

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

    def _by_block(self, axes: Iterable[str]) -> Iterator[list[int]]:
        """For each group its ranks, in the order of the blocks that they hold."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        check_axes(self.shape, axes)
        for group in self.shape.groups(axes):
            yield sorted(group, key=lambda r: self.shape.block_index(axes, self.coordinates[r]))

    def _count(self, kind: str, axes: Iterable[str], rank: int, x: np.ndarray) -> None:
        self._count_elements(kind, axes, rank, x.size, x.dtype)

    def _count_elements(self, kind: str, axes: Iterable[str], rank: int, elements: int, dtype: np.dtype) -> None:
        names: Axes = (axes,) if isinstance(axes, str) else tuple(axes)
        row = self.counters[rank].setdefault(kind, {}).setdefault("+".join(names), [0, 0, 0, 0.0])
        row[0] += 1
        row[1] += elements
        row[2] += bytes_sent(kind, elements, wire_bytes(kind, dtype), self.shape.count(names))

    def all_reduce(self, xs: Arrays, axes: Iterable[str], op: str = "sum", workspace: object = None) -> None:
        """Reduces in place over each group, in ascending order of rank.  See `Mesh.all_reduce`."""
        check_op(op)
        for ranks in self._by_block(axes):
            for r in ranks:
                check_array("all_reduce", "array", xs[r])
                self._count("all_reduce", axes, r, xs[r])
            total = _reduced([xs[r] for r in sorted(ranks)], op)
            for r in ranks:
                xs[r][...] = total

    def all_gather(
        self, xs: Arrays, outs: Arrays, axis: int, sizes: Sequence[int], axes: Iterable[str], workspace: object = None
    ) -> None:
        """Joins the blocks of each group.  See `Mesh.all_gather`."""
        for ranks in self._by_block(axes):
            for i, r in enumerate(ranks):
                check_out("all_gather", xs[r], outs[r], replaced(xs[r].shape, axis, sum(sizes)))
                check_sizes("all_gather", sizes, len(ranks), outs[r].shape[axis], "an output")
                check_sizes("all_gather", [xs[r].shape[axis]], 1, sizes[i], "a block")
                self._count("all_gather", axes, r, xs[r])
            whole = np.concatenate([xs[r] for r in ranks], axis)
            for r in ranks:
                outs[r][...] = whole

    def reduce_scatter(
        self,
        xs: Arrays,
        outs: Arrays,
        axis: int,
        sizes: Sequence[int],
        axes: Iterable[str],
        op: str = "sum",
        workspace: object = None,
    ) -> None:
        """Reduces over each group and cuts the result.  See `Mesh.reduce_scatter`."""
        check_op(op)
        for ranks in self._by_block(axes):
            for i, r in enumerate(ranks):
                check_sizes("reduce_scatter", sizes, len(ranks), xs[r].shape[axis], "an input")
                check_out("reduce_scatter", xs[r], outs[r], replaced(xs[r].shape, axis, sizes[i]))
                self._count("reduce_scatter", axes, r, xs[r])
            total, begin = _reduced([xs[r] for r in sorted(ranks)], op), starts(sizes)
            for i, r in enumerate(ranks):
                outs[r][...] = block(total, axis, begin[i], begin[i + 1])

    def all_to_all(
        self,
        xs: Arrays,
        outs: Arrays,
        split_axis: int,
        concat_axis: int,
        split_sizes: Sequence[int],
        concat_sizes: Sequence[int],
        axes: Iterable[str],
        workspace: object = None,
    ) -> None:
        """Moves a cut from one array axis to another.  See `Mesh.all_to_all`."""
        if split_axis == concat_axis:
            raise ProgramError(f"all_to_all from axis {split_axis} to itself.", "Give two axes.")
        for ranks in self._by_block(axes):
            n = len(ranks)
            for i, r in enumerate(ranks):
                x, out = xs[r], outs[r]
                check_sizes("all_to_all", split_sizes, n, x.shape[split_axis], "an input")
                check_sizes("all_to_all", concat_sizes, n, out.shape[concat_axis], "an output")
                check_sizes("all_to_all", [x.shape[concat_axis]], 1, concat_sizes[i], "a block")
                shape = replaced(x.shape, split_axis, split_sizes[i])
                check_out("all_to_all", x, out, replaced(shape, concat_axis, sum(concat_sizes)))
                self._count("all_to_all", axes, r, x)
            whole = np.concatenate([xs[r] for r in ranks], concat_axis)
            begin = starts(split_sizes)
            for i, r in enumerate(ranks):
                outs[r][...] = block(whole, split_axis, begin[i], begin[i + 1])

    def shift(
        self,
        xs: Sequence[Arrays],
        outs: Arrays,
        axis: int,
        exchange: HaloExchange,
        axes: Iterable[str],
        value: float = 0,
        workspace: object = None,
    ) -> None:
        """Exchanges parts of blocks; ``xs[k]`` is a list by rank.  See `Mesh.shift`."""
        for ranks in self._by_block(axes):
            for b, r in enumerate(ranks):
                check_shift([x[r] for x in xs], outs[r], axis, exchange, b)
                others = math.prod(replaced(outs[r].shape, axis, 1))
                sent = exchange.rows_sent(b) * others
                self._count_elements("shift", axes, r, sent, outs[r].dtype)
                outs[r][...] = value
            for b, r in enumerate(ranks):
                for p in pieces_to(exchange, b):
                    blocks = [x[ranks[p.source]] for x in xs]
                    to = piece_target(outs[r], axis, exchange, p)
                    to[...] = piece_source(blocks, axis, exchange, p)

    def start_all_reduce(self, xs: Arrays, axes: Iterable[str], op: str = "sum") -> list[Any]:
        """An `all_reduce`, which is done at once: nothing runs in the background here."""
        self.all_reduce(xs, axes, op)
        return []

    def advance(self, requests: list[Any]) -> None:
        """Does nothing; see `Mesh.advance`."""

    def wait(self, requests: list[Any], axes: Iterable[str]) -> None:
        """Does nothing; see `Mesh.wait`."""

    def __repr__(self) -> str:
        return f"<SimulatedMesh {self.shape}>"


def _reduced(xs: Arrays, op: str) -> np.ndarray:
    """The reduction of ``xs`` from first to last; bfloat16 in float32, rounded once."""
    dtype = xs[0].dtype
    wide = np.float32 if dtype.name == "bfloat16" else dtype
    with np.errstate(all="ignore"):  # as MPI, which knows no warnings
        total = xs[0].astype(wide)
        for x in xs[1:]:
            _OPS[op](total, x.astype(wide, copy=False), out=total)
        return total.astype(dtype)
