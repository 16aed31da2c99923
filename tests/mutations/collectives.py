"""Collectives of the simulated mesh: which ranks, which blocks, which reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshmpi.dims import MeshShape
from meshmpi.runtime import simulated_mesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.mutations.registry import Patch, mutation


def _spoilt(m: Patch, kind: str, calls: Callable[[Any], Any], after: Callable[[Any], None] | None = None) -> None:
    """A collective whose calls are changed before, or whose results are changed after it."""
    right = simulated_mesh.MEANINGS[kind]

    def wrong(group: Sequence[Any], by_rank: Sequence[Any]) -> None:
        right([calls(c) for c in group], [calls(c) for c in by_rank])
        if after is not None:
            after(group)

    m.setitem(simulated_mesh.MEANINGS, kind, wrong)


def _same(call: Any) -> Any:
    return call


@mutation("matmul_transposed")
def all_reduce_is_forgotten(m: Patch) -> None:
    m.setitem(simulated_mesh.MEANINGS, "all_reduce", lambda group, by_rank: None)


@mutation("matmul_transposed")
def all_reduce_takes_the_largest(m: Patch) -> None:
    _spoilt(m, "all_reduce", lambda call: replace(call, op="max"))


@mutation("matmul_transposed")
def all_reduce_runs_over_the_first_axis_only(m: Patch) -> None:
    right = SimulatedMesh.bind

    def wrong(self: Any, *calls: Any, **options: Any) -> Any:
        if calls[0].kind == "all_reduce":
            calls = tuple(replace(c, axes=tuple(c.axes)[:1]) for c in calls)
        return right(self, *calls, **options)

    m.setattr(SimulatedMesh, "bind", wrong)


@mutation("rename")
def blocks_are_ordered_by_rank(m: Patch) -> None:
    """Blocks over cols+rows are taken in the order of ranks, that of rows+cols."""
    m.setattr(SimulatedMesh, "_by_block", lambda self, axes: (list(g) for g in self.shape.groups(axes)))


@mutation("constrained_and_released")
def reduce_scatter_keeps_the_mirrored_block(m: Patch) -> None:
    _spoilt(m, "reduce_scatter", lambda call: replace(call, x=np.flip(call.x, call.axis).copy()))


@mutation("einsum_of_three")
def all_to_all_swaps_its_axes(m: Patch) -> None:
    def after(group: Any) -> None:
        for c in group:
            c.out[...] = np.flip(c.out, c.concat_axis)

    _spoilt(m, "all_to_all", _same, after)


@mutation("einsum_of_three")
def all_gather_joins_blocks_in_reverse(m: Patch) -> None:
    def after(group: Any) -> None:
        for c in group:
            c.out[...] = np.concatenate(np.split(c.out, np.cumsum(c.sizes)[:-1], c.axis)[::-1], c.axis)

    _spoilt(m, "all_gather", _same, after)


@mutation("einsum_of_three")
def all_gather_leaves_gaps_between_uneven_blocks(m: Patch) -> None:
    """Blocks are put where blocks of equal size would begin."""

    def after(group: Any) -> None:
        for c in group:
            parts, whole = np.split(c.out.copy(), np.cumsum(c.sizes)[:-1], c.axis), c.out.shape[c.axis]
            for k, part in enumerate(parts):
                start = min(k * max(c.sizes), whole - part.shape[c.axis])
                index = (slice(None),) * c.axis + (slice(start, start + part.shape[c.axis]),)
                c.out[index] = part

    _spoilt(m, "all_gather", _same, after)


@mutation("reduce_max_shares_ties")
def every_all_reduce_is_a_sum(m: Patch) -> None:
    _spoilt(m, "all_reduce", lambda call: replace(call, op="sum"))


@mutation("matmul_transposed")
def all_reduce_adds_the_first_rank_twice(m: Patch) -> None:
    right = simulated_mesh._reduced

    def wrong(xs: Any, op: str) -> np.ndarray:
        return right([xs[0], *xs] if op == "sum" else xs, op)

    m.setattr(simulated_mesh, "_reduced", wrong)


@mutation("einsum_of_three")
def all_to_all_keeps_what_it_should_send(m: Patch) -> None:
    """Each rank ends up with its own block instead of those of the others."""

    def after(group: Any) -> None:
        for c in group:
            both = tuple(slice(0, min(a, b)) for a, b in zip(c.x.shape, c.out.shape, strict=True))
            c.out[both] = c.x[both]

    _spoilt(m, "all_to_all", _same, after)


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
    def after(group: Any) -> None:
        first = group[0].out.copy()
        for c in group:
            c.out[...] = first[(slice(None),) * c.axis + (slice(0, c.out.shape[c.axis]),)]

    _spoilt(m, "reduce_scatter", _same, after)
