"""From the block of a variable that a rank holds to the pieces of an array in a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshmpi.dims import Shape
from meshmpi.transformer.pretrained.architectures import Entry, FileDim

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """What one entry contributes to a block.

    Attributes:
        pieces: Along each dim of the file's array the (start, stop) that belong to the block.
    """

    pieces: tuple[tuple[Range, ...], ...]
    place: tuple[slice | int, ...]  # index of the entry's part in the block
    sizes: tuple[int, ...]  # sizes of that part, in the order of the file's dims
    order: tuple[int, ...]  # position in ``sizes`` of each dim of the part, in the variable's order

    def to_block(self, array: np.ndarray) -> np.ndarray:
        """The pieces as the file has them, in the variable's order."""
        return array.reshape(self.sizes).transpose(self.order)

    def from_block(self, block: np.ndarray) -> np.ndarray:
        """The entry's part of a block, in the order of the file; C-contiguous."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return np.ascontiguousarray(block[self.place].transpose(back))


def part_of(entry: Entry, order: Shape, block: tuple[Range, ...]) -> Part | None:
    """What ``entry`` contributes to a block of its variable; None if nothing.

    ``order`` is the shape of the variable, ``block`` has (start, stop) along each of its dims.
    """
    ranges = dict(zip(order.names, block, strict=True))
    fixed = {dim.name: index for dim, index in entry.at}
    if any(not ranges[name][0] <= index < ranges[name][1] for name, index in fixed.items()):
        return None
    names = [d.name for d in entry.dims]
    if any(ranges[name][0] >= ranges[name][1] for name in names):
        return None
    place = tuple(fixed[name] - a if name in fixed else slice(None) for name, (a, _) in ranges.items())
    return Part(
        tuple(file_pieces(d, ranges) for d in entry.file_dims),
        place,
        tuple(ranges[n][1] - ranges[n][0] for n in names),
        tuple(names.index(n) for n in order.names if n not in fixed),
    )


def file_pieces(dim: FileDim, ranges: Mapping[str, Range]) -> tuple[Range, ...]:
    """The (start, stop) along a dim of a file that a block takes, those that touch joined.

    ``ranges`` has (start, stop) of the block along each of our dims that it runs over.
    """
    indices = np.zeros(1, np.int64)
    for d in dim.dims:
        a, b = ranges[d.name]
        indices = (indices[:, None] * d.size + np.arange(a, b, dtype=np.int64)).reshape(-1)
    if not indices.size:
        return ()
    cuts = np.flatnonzero(np.diff(indices) != 1)
    first, last = np.r_[0, cuts + 1], np.r_[cuts, indices.size - 1]
    return tuple(
        (int(indices[i]) + dim.start, int(indices[j]) + dim.start + 1) for i, j in zip(first, last, strict=True)
    )
