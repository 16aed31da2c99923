"""The type of a value, the same on every rank: its global shape, its blocks, pending sums.

Names and integers only: no arrays, no instructions, no rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from meshmpi.dims import Axes, Dimension, MeshShape, Shape, block_range
from meshmpi.errors import place
from meshmpi.ir.halos import HaloRegion
from meshmpi.ir.scalar import ITEM_BYTES

REDUCTIONS = ("sum", "max", "min", "prod")


class ByFields:
    """Comparison and text of frozen dataclasses with ``eq=False, repr=False``, of the same class, by all fields.

    `dataclass` compiles such methods for each class, in every rank's start: 0.3 ms.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Source(NamedTuple):
    """Where a tensor was made: its name and the user's file and line."""

    name: str
    file: str
    line: int

    @property
    def short(self) -> str:
        """File without folders, and line."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    def __str__(self) -> str:
        return f"{self.name} made at {place(self.file, self.line)}"


NOWHERE = Source("", "", 0)


class LocalDim(NamedTuple):
    """One dimension of a value as the ranks hold it.

    A global size alone does not say how many elements a rank has, or which.  So two values may go
    through one loop along a dimension only where these are equal.
    """

    dim: Dimension
    axes: Axes = ()
    halo: HaloRegion | None = None

    def __str__(self) -> str:
        return (f"{self.dim}/{'+'.join(self.axes)}" if self.axes else str(self.dim)) + (
            str(self.halo) if self.halo else ""
        )


@dataclass(frozen=True)
class LocalType:
    """What every rank knows about a value.

    Programs hold few distinct types many times, so what follows from one is computed once.

    Attributes:
        shape: The *global* shape.
        dtype: One of scalar.DTYPES.
        splits: For each dimension the mesh axes it is split over, major first.
        partial: Axes over which a reduction is still pending, in mesh order.
        pending: Which reduction: sum, max, min or prod.
        halos: Empty, or for each dimension a HaloRegion where a rank holds not its block but the
            elements that the blocks of another dimension need; these overlap.  Only `shift` makes
            such values, only `conv` and `shift` along another dimension take them.
    """

    shape: Shape
    dtype: str
    splits: tuple[Axes, ...]
    partial: Axes = ()
    pending: str = "sum"
    halos: tuple[HaloRegion | None, ...] = ()

    def __hash__(self) -> int:
        if "hash" not in self.__dict__:
            parts = (self.shape, self.dtype, self.splits, self.partial, self.pending, self.halos)
            self.__dict__["hash"] = hash(parts)
        return self.__dict__["hash"]

    def __getstate__(self) -> dict[str, object]:
        """Only the fields: another process hashes strings differently."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def local_dims(self) -> tuple[LocalDim, ...]:
        """Its dimensions, outermost in memory first.

        Where they are equal, each rank holds equal blocks of two values: the same elements in the
        same order.  What is pending, and the data type, may differ.
        """
        halos = self.halos or (None,) * len(self.shape)
        return tuple(map(LocalDim, self.shape, self.splits, halos))

    def halo(self, dim: str) -> HaloRegion | None:
        """The halo in which a rank holds the dimension called ``dim``, if it does."""
        i = self.shape.find(dim)
        return self.halos[i] if self.halos and i >= 0 else None

    def split(self, dim: str) -> Axes:
        """Axes of the dimension called ``dim``; empty when there is no such dimension."""
        i = self.shape.find(dim)
        return self.splits[i] if i >= 0 else ()

    @cached_property
    def used_axes(self) -> Axes:
        return tuple([a for s in self.splits for a in s])

    def with_split(self, dim: str, axes: Axes) -> LocalType:
        i = self.shape.position(dim)
        splits = (*self.splits[:i], tuple(axes), *self.splits[i + 1 :])
        return replace(self, splits=splits)

    def finished(self, axes: Iterable[str] | None = None) -> LocalType:
        """The same without the reduction pending over ``axes`` (default: over any)."""
        left = () if axes is None else tuple(a for a in self.partial if a not in tuple(axes))
        return replace(self, partial=left, pending=self.pending if left else "sum")

    def block(self, mesh: MeshShape, coordinates: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each dimension of the block held at ``coordinates``.

        A halo may begin before 0 and end behind the last element.
        """
        blocks = tuple(
            block_range(d.size, mesh.count(s), mesh.block_index(s, coordinates)) if s else (0, d.size)
            for d, s in zip(self.shape, self.splits, strict=True)
        )
        if not self.halos:
            return blocks
        return tuple(
            b if w is None else w.range(*block_range(w.of, mesh.count(s), mesh.block_index(s, coordinates)))
            for b, w, s in zip(blocks, self.halos, self.splits, strict=True)
        )

    def local_sizes(self, mesh: MeshShape, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.block(mesh, coordinates))

    def max_sizes(self, mesh: MeshShape) -> tuple[int, ...]:
        """Sizes of the largest block: that of the rank whose coordinates are all 0."""
        if self.halos:
            return self.local_sizes(mesh, dict.fromkeys(mesh.names, 0))
        return tuple(-(-d.size // mesh.count(s)) if s else d.size for d, s in zip(self.shape, self.splits, strict=True))

    def max_elements(self, mesh: MeshShape) -> int:
        return math.prod(self.max_sizes(mesh))

    def max_bytes(self, mesh: MeshShape) -> int:
        return self.max_elements(mesh) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.local_dims))
        pending = f"{{{self.pending} pending over {'+'.join(self.partial)}}}" if self.partial else ""
        return f"{self.dtype}[{dims}]{pending}"


def held_differently(types: Iterable[LocalType]) -> tuple[LocalDim, LocalDim] | None:
    """Two ways in which values hold a dimension of one name; None where all agree.

    Only values that agree can share a loop nest.
    """
    found: dict[str, LocalDim] = {}
    for t in types:
        for one in t.local_dims:
            other = found.setdefault(one.dim.name, one)
            if other != one:
                return other, one
    return None
