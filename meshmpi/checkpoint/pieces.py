"""Computes which stored blocks make up a part of a tensor, and the position of each piece on both sides.

Used for loading, converting and moving to another mesh; independent of files and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from meshmpi.dims import Axes, MeshShape, block_range
from meshmpi.ir.program import LocalType

Ranges = tuple[tuple[int, int], ...]
"""(start, stop) along each dim."""


class Piece(NamedTuple):
    """What one stored block gives to a part of a tensor."""

    holder: dict[str, int]  # coordinates of the first rank that holds the block
    sizes: tuple[int, ...]  # of the block
    source: Ranges  # inside the block
    target: tuple[slice, ...]  # inside the part


def pieces(t: LocalType, mesh: MeshShape, wanted: Ranges) -> Iterator[Piece]:
    """The pieces, in the order of blocks, of the part ``wanted`` (global ranges) of a value split as ``t`` says."""
    along = [list(_along(mesh, d.size, axes, w)) for d, axes, w in zip(t.shape, t.splits, wanted, strict=True)]
    for parts in itertools.product(*along):
        holder = dict.fromkeys(mesh.names, 0)
        for where, _, _, _ in parts:
            holder |= where
        sizes = tuple(size for _, size, _, _ in parts)
        yield Piece(holder, sizes, tuple(source for _, _, source, _ in parts), tuple(target for *_, target in parts))


def _along(
    mesh: MeshShape, size: int, axes: Axes, wanted: tuple[int, int]
) -> Iterator[tuple[dict[str, int], int, tuple[int, int], slice]]:
    """Along one dim: coordinates of a block's holder, the block's size, its source and its target."""
    count, place, end = mesh.count(axes), wanted[0], min(wanted[1], size)
    while place < end:
        k = _block_at(place, size, count)
        where, rest = {}, k
        for axis in reversed(axes):  # the first axis is the major one
            rest, where[axis] = divmod(rest, mesh.axis_size(axis))
        start, stop = block_range(size, count, k)
        last = min(stop, end)
        yield where, stop - start, (place - start, last - start), slice(place - wanted[0], last - wanted[0])
        place = stop


def _block_at(place: int, size: int, count: int) -> int:
    least, longer = divmod(size, count)
    first = longer * (least + 1)  # of the blocks that have the least
    return place // (least + 1) if place < first else longer + (place - first) // least
