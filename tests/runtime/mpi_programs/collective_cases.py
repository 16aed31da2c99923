"""The table of collective calls, with their inputs: the same for the simulated and the MPI mesh.

Values are small integers, so that sums are exact and every order of reduction gives the same bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from meshmpi.dims import Axes, MeshShape, block_range
from meshmpi.ir import collective_bytes as cost
from meshmpi.ir.halos import HaloExchange, HaloRegion
from meshmpi.runtime.operands import replaced

MESHES = {
    1: ("rows:1", "rows:1;cols:1", ""),
    2: ("rows:2", "rows:1;cols:2"),
    3: ("rows:3",),
    4: ("rows:4", "rows:2;cols:2"),
    6: ("rows:2;cols:3", "rows:3;cols:2;planes:1"),
}
"""Number of ranks -> meshes of as many."""
DTYPES = ("float32", "float64", "bfloat16", "int32", "int64", "uint8", "bool")
OPS = ("sum", "max", "min", "prod")
SHAPES = ((6, 4, 6), (7, 5, 13), (1, 2, 1), (1, 1, 9), (3, 0, 2))
"""Even and uneven cuts, blocks without elements, arrays without elements."""


@dataclass(frozen=True)
class Move:
    """What a shift does along its axis of n elements; ``size`` of the result is relative to n."""

    offsets: tuple[int, ...]
    more: int = 0
    stride: int = 1
    wrap: bool = False
    halo: HaloRegion | None = None


MOVES = (
    Move((-2,)),
    Move((1,)),
    Move((3,), wrap=True),
    Move((-40,), wrap=True),
    Move((0,)),
    Move((0,), more=-1, stride=2),
    Move((-3,), more=5),
    Move((2,), more=-2),
    Move((50,)),
    Move((0,), halo=HaloRegion(5, 1, -1, 1)),
    Move((0,), halo=HaloRegion(6, 1, -9, 8), wrap=True),
    Move((0,), halo=HaloRegion(3, 2, -1, 2)),
    Move((0,), halo=HaloRegion(9, 1, -2, 1, 2)),
    Move((0,), halo=HaloRegion(4, -2, 0, 6)),
)
"""Neighbours and farther, rings longer than the dimension, slices, padding, halos wider than a
block, halos with strides of both signs and with gaps."""


@dataclass(frozen=True)
class Case:
    """One collective call on global arrays of ``shape``; ``axis`` is cut or joined."""

    kind: str
    mesh: MeshShape
    axes: Axes
    shape: tuple[int, ...]
    dtype: str
    axis: int = 0
    concat_axis: int = 0
    op: str = "sum"
    move: Move | None = None

    @property
    def n(self) -> int:
        return self.mesh.count(self.axes)

    def sizes(self, axis: int) -> list[int]:
        cuts = (block_range(self.shape[axis], self.n, i) for i in range(self.n))
        return [stop - start for start, stop in cuts]

    def index(self, rank: int) -> int:
        return self.mesh.block_index(self.axes, self.mesh.coordinates(rank))

    @property
    def exchange(self) -> HaloExchange:
        move, n = self.move, self.shape[self.axis]
        assert move is not None
        size = max(n + move.more, 0)
        return HaloExchange(self.n, (n,) * len(move.offsets), move.offsets, size, move.stride, move.wrap, move.halo)

    def block(self, whole: np.ndarray, axis: int, rank: int) -> np.ndarray:
        start, stop = block_range(self.shape[axis], self.n, self.index(rank))
        return np.ascontiguousarray(np.moveaxis(np.moveaxis(whole, axis, 0)[start:stop], 0, axis))

    def whole(self, key: int) -> np.ndarray:
        """A global array of small integers; ``key`` tells one rank or group from another."""
        values = np.random.default_rng([key, *self.shape]).integers(-3, 4, self.shape)
        return values.astype(np_dtype(self.dtype))


def np_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def group_key(case: Case, rank: int) -> int:
    """The number of the group of ``rank``: equal on its ranks only."""
    return min(case.mesh.group(rank, case.axes))


def inputs(case: Case) -> list[np.ndarray]:
    """What each rank hands in."""
    ranks = range(case.mesh.size)
    if case.kind in ("all_reduce", "reduce_scatter"):
        return [case.whole(r) for r in ranks]
    if case.kind == "all_gather":
        return [case.block(case.whole(group_key(case, r)), case.axis, r) for r in ranks]
    if case.kind == "all_to_all":
        return [case.block(case.whole(group_key(case, r)), case.concat_axis, r) for r in ranks]
    return [case.block(case.whole(group_key(case, r)), case.axis, r) for r in ranks]


def outputs(case: Case) -> list[np.ndarray]:
    """Arrays for what each rank receives, full of nonsense."""
    whole, ranks = case.whole(0), range(case.mesh.size)
    if case.kind == "all_gather":
        outs = [whole for _ in ranks]
    elif case.kind in ("reduce_scatter", "all_to_all"):
        outs = [case.block(whole, case.axis, r) for r in ranks]
    elif case.kind == "shift":
        targets = (case.exchange.target(case.index(r)) for r in ranks)
        shapes = [replaced(case.shape, case.axis, end - start) for start, end in targets]
        outs = [np.zeros(shape, whole.dtype) for shape in shapes]
    else:
        outs = [whole[:0] for _ in ranks]
    return [np.full_like(out, 77 if case.dtype != "bool" else 1) for out in outs]


def call(case: Case, mesh: Any, x: Any, out: Any, workspace: np.ndarray | None = None) -> None:
    """Makes the call on either kind of mesh: ``x`` and ``out`` are arrays or lists of arrays."""
    if case.kind == "all_reduce":
        mesh.all_reduce(x, case.axes, case.op, workspace)
    elif case.kind == "all_gather":
        mesh.all_gather(x, out, case.axis, case.sizes(case.axis), case.axes, workspace)
    elif case.kind == "reduce_scatter":
        sizes = case.sizes(case.axis)
        mesh.reduce_scatter(x, out, case.axis, sizes, case.axes, case.op, workspace)
    elif case.kind == "all_to_all":
        split, concat = case.sizes(case.axis), case.sizes(case.concat_axis)
        mesh.all_to_all(x, out, case.axis, case.concat_axis, split, concat, case.axes, workspace)
    else:
        xs = [x] * len(case.exchange.sizes)
        mesh.shift(xs, out, case.axis, case.exchange, case.axes, 1, workspace)


def workspace_bytes(case: Case, x: np.ndarray, rank: int) -> int:
    """What the pure functions say this call needs on ``rank``."""
    if case.kind == "all_reduce":
        return cost.all_reduce_workspace_bytes(x.shape, x.dtype)
    if case.kind == "all_gather":
        return cost.all_gather_workspace_bytes(x.shape, x.dtype, case.axis, case.sizes(case.axis))
    if case.kind == "reduce_scatter":
        return cost.reduce_scatter_workspace_bytes(x.shape, x.dtype, case.axis, case.sizes(case.axis))
    if case.kind == "all_to_all":
        return cost.all_to_all_workspace_bytes(
            x.shape,
            x.dtype,
            case.axis,
            case.concat_axis,
            case.sizes(case.axis),
            case.sizes(case.concat_axis),
            case.index(rank),
        )
    start, end = case.exchange.target(case.index(rank))
    shape = replaced(case.shape, case.axis, end - start)
    return cost.shift_workspace_bytes(shape, x.dtype, case.axis, case.exchange)


def ordered_subsets(mesh: MeshShape) -> list[Axes]:
    """Every subset of the axes in every order, the empty one included."""
    return [p for k in range(len(mesh.names) + 1) for p in itertools.permutations(mesh.names, k)]


def cases(mesh_text: str) -> list[Case]:
    """All cases of one mesh.  Data types and operations take turns over the other parameters."""
    mesh = MeshShape(mesh_text)
    dtypes, ops = itertools.cycle(DTYPES), itertools.cycle(OPS)
    out = []
    shapes = SHAPES if len(mesh.names) < 3 else SHAPES[1:3]  # 16 ordered subsets are enough work
    for axes, shape in itertools.product(ordered_subsets(mesh), shapes):
        out += [Case("all_reduce", mesh, axes, shape, d, op=next(ops)) for d in DTYPES]
        for axis in range(3):
            out.append(Case("all_gather", mesh, axes, shape, next(dtypes), axis))
            out.append(Case("reduce_scatter", mesh, axes, shape, next(dtypes), axis, op=next(ops)))
        for split, concat in itertools.permutations(range(3), 2):
            out.append(Case("all_to_all", mesh, axes, shape, next(dtypes), split, concat))
        moves = [*MOVES, Move((0, -shape[0]), more=shape[0])]  # the last joins two
        for k, move in enumerate(moves):
            axis = 0 if len(move.offsets) > 1 else k % 3
            out.append(Case("shift", mesh, axes, shape, next(dtypes), axis, move=move))
    return out
