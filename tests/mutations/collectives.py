"""Collectives of the simulated mesh: which ranks, which blocks, which reduction."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshmpi.dims import MeshShape
from meshmpi.runtime import simulated_mesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.mutations.registry import Patch, mutation


@mutation("matmul_transposed")
def all_reduce_is_forgotten(m: Patch) -> None:
    m.setattr(SimulatedMesh, "all_reduce", lambda self, xs, axes, op="sum", workspace=None: None)


@mutation("matmul_transposed")
def all_reduce_takes_the_largest(m: Patch) -> None:
    right = SimulatedMesh.all_reduce
    m.setattr(
        SimulatedMesh, "all_reduce", lambda self, xs, axes, op="sum", workspace=None: right(self, xs, axes, "max")
    )


@mutation("matmul_transposed")
def all_reduce_runs_over_the_first_axis_only(m: Patch) -> None:
    right = SimulatedMesh.all_reduce
    m.setattr(
        SimulatedMesh,
        "all_reduce",
        lambda self, xs, axes, op="sum", workspace=None: right(self, xs, tuple(axes)[:1], op),
    )


@mutation("rename")
def blocks_are_ordered_by_rank(m: Patch) -> None:
    """Blocks over cols+rows are taken in the order of ranks, that of rows+cols."""
    m.setattr(SimulatedMesh, "_by_block", lambda self, axes: (list(g) for g in self.shape.groups(axes)))


@mutation("constrained_and_released")
def reduce_scatter_keeps_the_mirrored_block(m: Patch) -> None:
    right = SimulatedMesh.reduce_scatter

    def wrong(self: Any, xs: list, outs: list, axis: int, sizes: list, axes: Any, *rest: Any) -> None:
        right(self, [np.flip(x, axis).copy() for x in xs], outs, axis, sizes, axes, *rest)

    m.setattr(SimulatedMesh, "reduce_scatter", wrong)


@mutation("einsum_of_three")
def all_to_all_swaps_its_axes(m: Patch) -> None:
    right = SimulatedMesh.all_to_all

    def wrong(self: Any, xs: list, outs: list, split: int, concat: int, *rest: Any, **more: Any) -> None:
        right(self, xs, outs, split, concat, *rest, **more)
        for out in outs:
            out[...] = np.flip(out, concat)

    m.setattr(SimulatedMesh, "all_to_all", wrong)


@mutation("einsum_of_three")
def all_gather_joins_blocks_in_reverse(m: Patch) -> None:
    right = SimulatedMesh.all_gather

    def wrong(self: Any, xs: list, outs: list, axis: int, sizes: list, *rest: Any) -> None:
        right(self, xs, outs, axis, sizes, *rest)
        cuts = np.cumsum(sizes)[:-1]
        for out in outs:
            out[...] = np.concatenate(np.split(out, cuts, axis)[::-1], axis)

    m.setattr(SimulatedMesh, "all_gather", wrong)


@mutation("einsum_of_three")
def all_gather_leaves_gaps_between_uneven_blocks(m: Patch) -> None:
    """Blocks are put where blocks of equal size would begin."""
    right = SimulatedMesh.all_gather

    def wrong(self: Any, xs: list, outs: list, axis: int, sizes: list, *rest: Any) -> None:
        right(self, xs, outs, axis, sizes, *rest)
        for out in outs:
            parts, whole = np.split(out.copy(), np.cumsum(sizes)[:-1], axis), out.shape[axis]
            for k, part in enumerate(parts):
                start = min(k * max(sizes), whole - part.shape[axis])
                index = (slice(None),) * axis + (slice(start, start + part.shape[axis]),)
                out[index] = part

    m.setattr(SimulatedMesh, "all_gather", wrong)


@mutation("reduce_max_shares_ties")
def every_all_reduce_is_a_sum(m: Patch) -> None:
    right = SimulatedMesh.all_reduce
    m.setattr(SimulatedMesh, "all_reduce", lambda self, xs, axes, op="sum", workspace=None: right(self, xs, axes))


@mutation("matmul_transposed")
def all_reduce_adds_the_first_rank_twice(m: Patch) -> None:
    right = simulated_mesh._reduced

    def wrong(xs: Any, op: str) -> np.ndarray:
        return right([xs[0], *xs] if op == "sum" else xs, op)

    m.setattr(simulated_mesh, "_reduced", wrong)


@mutation("einsum_of_three")
def all_to_all_keeps_what_it_should_send(m: Patch) -> None:
    """Each rank ends up with its own block instead of those of the others."""
    right = SimulatedMesh.all_to_all

    def wrong(self: Any, xs: list, outs: list, split: int, concat: int, *rest: Any) -> None:
        right(self, xs, outs, split, concat, *rest)
        for x, out in zip(xs, outs, strict=True):
            both = tuple(slice(0, min(a, b)) for a, b in zip(x.shape, out.shape, strict=True))
            out[both] = x[both]

    m.setattr(SimulatedMesh, "all_to_all", wrong)


@mutation("matmul_transposed")
def ranks_are_numbered_with_the_first_axis_fastest(m: Patch) -> None:
    """Coordinates of a rank column-major, its number row-major as MPI_Cart_create has it."""

    def wrong(self: MeshShape, rank: int) -> dict[str, int]:
        out = {}
        for name, size in self.axes:
            rank, out[name] = divmod(rank, size)
        return out

    m.setattr(MeshShape, "coordinates", wrong)


@mutation("constrained_and_released")
def reduce_scatter_gives_every_rank_the_first_block(m: Patch) -> None:
    right = SimulatedMesh.reduce_scatter

    def wrong(
        self: Any, xs: list, outs: list, axis: int, sizes: list, axes: Any, op: str = "sum", workspace: object = None
    ) -> None:
        right(self, xs, outs, axis, sizes, axes, op)
        for group in self.shape.groups(axes):
            first = outs[group[0]].copy()
            for r in group:
                cut = (slice(None),) * axis + (slice(0, outs[r].shape[axis]),)
                outs[r][...] = first[cut]

    m.setattr(SimulatedMesh, "reduce_scatter", wrong)
