"""The loop nest of one instruction on one rank: roles, stages, extents and strides.

Rows are the outer loops, columns the inner ones.  A value is ready in a *stage*: what needs the
result of a reduction along the row comes one stage later, and every stage is one loop over the
columns.  Knows instructions and integers only; `source` writes it down in C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshmpi.dims import MeshShape, Range, Ranges
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Map, Random, Reduce
from meshmpi.ir.program import Instruction, LocalType
from meshmpi.kernels.views import collapse, contiguous

PIECE = 4096
"""Columns that a loop without rows takes at once where threads share it.  Status: assumption."""
PARALLEL_POINTS = 1 << 16
"""Threads share a loop that has at least this many points.  Status: assumption; waking a thread takes some
microseconds, the loop then about 30."""


class Unsupported(Exception):
    """The instruction has no native form; NumPy does it."""


class Site(NamedTuple):
    """An instruction on one rank: what its values are, and the part of them that it works on.

    Attributes:
        types: All values; those inside its body need not be among them.
        ranges: Dim -> (start, stop) where only a part of the block is computed, within a tiled region.
    """

    instruction: Instruction
    types: Mapping[int, LocalType]
    mesh: MeshShape
    coordinates: Mapping[str, int]
    ranges: Ranges | None = None

    def whole(self) -> Site:
        """With the types of the values inside its body."""
        i = self.instruction
        own = {v: self.types[v] for v in (*i.inputs, *i.outputs)}
        return self._replace(types={**own, **i.inner_types()})

    def block(self, v: int) -> dict[str, Range]:
        """Dimension name -> range of the elements of a value."""
        t, ranges = self.types[v], self.ranges or {}
        block = zip(t.shape.names, t.block(self.mesh, self.coordinates), strict=True)
        return {n: ranges.get(n, r) for n, r in block}

    def sizes(self, v: int) -> dict[str, int]:
        """Dimension name -> number of the elements of a value."""
        return {n: stop - start for n, (start, stop) in self.block(v).items()}


class Value:
    """A value of the loop nest.

    Attributes:
        number: Its number in C, by order of appearance: equal layers of a model have equal functions.
        role: "point" (varies along columns), "row" (one per row) or "column" (summed over rows).
        stage: The stage in which it is ready; -1 before the first.
    """

    def __init__(self, number: int, t: LocalType, sizes: Mapping[str, int]):
        self.number, self.dtype = number, t.dtype
        self.names = t.shape.names
        self.strides = contiguous(self.names, sizes)
        self.role, self.stage = "point", -1


Loops = list[tuple[int, Mapping[object, int]]]
"""(extent, value -> stride) of each loop, outermost first.  ("counter", value) is the stride of the
global index of a random value, ("index", dim) that of the index along a dim of a band."""


class LoopNest:
    """Names, extents and values of a function; merges dims that all values step through evenly.

    The body of the instruction holds maps, reductions and random instructions in order.
    """

    def __init__(self, site: Site):
        one, types = site.instruction, site.types
        self.body, self.outputs, self.operands = one.body or (one,), one.outputs, (*one.inputs, *one.outputs)
        self.inputs = tuple(dict.fromkeys(one.inputs))  # a value may come twice: x * x
        body = self.body
        spaces = [i.inputs[0] if isinstance(i.attrs, Reduce) else i.outputs[0] for i in body]
        full = max(spaces, key=lambda v: len(types[v].shape))
        self.sizes, names = site.sizes(full), types[full].shape.names
        if not all(self.sizes.values()):
            raise Unsupported("an empty block")
        self.row_names = self._rows(types, names)
        used = dict.fromkeys([*self.operands, *(v for i in body for v in i.outputs)])
        self.values = {v: Value(k, types[v], self.sizes) for k, v in enumerate(used)}
        self.keys = [i.outputs[0] for i in body if isinstance(i.attrs, Random)]
        self._counters = {v: _global_strides(types[v]) for v in self.keys}
        self.bands = bands_in(body)
        self._roles(names)
        self._loops(names)
        self.columns = math.prod(n for n, _ in self.column_dims)
        self.rows = math.prod(n for n, _ in self.row_dims)
        self.threads_pay = self.rows * self.columns >= PARALLEL_POINTS

    def role(self, i: Instruction) -> str:
        return self.values[i.outputs[0]].role

    def stage(self, i: Instruction) -> int:
        return self.values[i.outputs[0]].stage

    def in_columns(self, v: object) -> bool:
        """Whether a value in memory varies along the columns."""
        return any(strides[v] for _, strides in self.column_dims)

    def _rows(self, types: Mapping[int, LocalType], names: tuple[str, ...]) -> tuple[str, ...]:
        """The dims of the outer loops: those that the first reduction keeps, or sums over."""
        made = [types[i.outputs[0]].shape.names for i in self.body]
        for i, kept in zip(self.body, made, strict=True):
            if isinstance(i.attrs, Reduce):
                if kept == names[: len(kept)]:
                    return kept
                lead = len(names) - len(kept)
                if kept != names[lead:] or i.attrs.op != "sum":
                    raise Unsupported("a reduction of inner dims")
                return names[:lead]
        return next((kept for kept in made if kept != names), names[:-1])

    def _roles(self, names: tuple[str, ...]) -> None:
        for i in self.body:
            for v in i.outputs:
                value = self.values[v]
                stages = [self._ready(x, i) for x in i.inputs]
                if isinstance(i.attrs, Reduce):
                    value.role, value.stage = "row", max(stages)
                    if value.names != self.row_names:
                        if value.names != names[len(self.row_names) :] or i.attrs.op != "sum":
                            raise Unsupported("reductions over different rows")
                        value.role = "column"
                elif value.names != names:
                    if value.names != self.row_names:
                        raise Unsupported("a map over other dims")
                    value.role, value.stage = "row", max([-1, *stages])
                else:
                    value.stage = max([0, *stages])

    def _ready(self, x: int, i: Instruction) -> int:
        """The first stage in which instruction i can use x."""
        value = self.values[x]
        if x in self.inputs:
            return 0 if isinstance(i.attrs, Reduce) else -1
        over_rows = isinstance(i.attrs, Map) and self.values[i.outputs[0]].names == self.row_names
        return value.stage + (value.role == "row" and not over_rows)

    def _loops(self, names: tuple[str, ...]) -> None:
        columns = [n for n in names if n not in self.row_names]
        if any(isinstance(i.attrs, Reduce) for i in self.body) or any(v.role == "row" for v in self.values.values()):
            self.row_dims, self.column_dims = self._merged(self.row_names), self._merged(columns)
            return
        dims = self._merged(names)
        if len(dims) == 1:
            dims = _cut(dims[0])
        self.row_dims, self.column_dims = dims[:-1], dims[-1:]

    def _merged(self, names: Sequence[str]) -> Loops:
        """The loops over these dims."""
        keys = [*self.values, *(("counter", v) for v in self.keys)]
        keys += [("index", n) for band in self.bands for n in (band.rows, band.columns)]
        steps = [[self._stride(key, n) for n in names] for key in keys]
        sizes, merged = collapse([self.sizes[n] for n in names], steps)
        if not sizes:
            return [(1, dict.fromkeys(keys, 0))]
        return [(n, dict(zip(keys, s, strict=True))) for n, *s in zip(sizes, *merged, strict=True)]

    def _stride(self, key: object, name: str) -> int:
        if isinstance(key, tuple):
            return int(key[1] == name) if key[0] == "index" else self._counters[key[1]].get(name, 0)
        return self.values[key].strides.get(name, 0)  # type: ignore[index]


def _global_strides(t: LocalType) -> dict[str, int]:
    """Dimension name -> distance between neighbours in the global index of a tensor."""
    return contiguous(t.shape.names, dict(zip(t.shape.names, t.shape.sizes, strict=True)))


def first_counter(site: Site, v: int) -> int:
    """Global index of the first element of a value."""
    strides = _global_strides(site.types[v])
    return sum(start * strides[n] for n, (start, _) in site.block(v).items())


def bands_in(body: Iterable[Instruction]) -> list[Band]:
    """The bands over which instructions reduce, in order."""
    return list(dict.fromkeys(i.attrs.band for i in body if isinstance(i.attrs, Reduce) and i.attrs.band))


def first_distance(site: Site, band: Band) -> int:
    """Row minus column of the first element."""
    read = (v for one in site.instruction.leaves() for v in one.inputs)
    start = {n: first for v in read for n, (first, _) in site.block(v).items()}
    return start[band.rows] - start[band.columns]


def _cut(dim: tuple[int, Mapping[object, int]]) -> Loops:
    """One long loop as two, so that threads can share it; as it is where no piece fits."""
    n, strides = dim
    if n < PARALLEL_POINTS:
        return [(1, dict.fromkeys(strides, 0)), dim]
    piece = next((p for p in range(2 * PIECE, PIECE // 4, -1) if n % p == 0), n)
    return [(n // piece, {k: s * piece for k, s in strides.items()}), (piece, strides)]
