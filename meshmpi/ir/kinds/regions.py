"""Kinds with a body: fused kernels and tiled regions; and the tiles of a region.

Kernels, FLOP and memory all read the tile ranges from here. Integers only: no arrays, no rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshmpi.dims import Ranges, Shape
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds.checks import require
from meshmpi.ir.kinds.computing import Contract, Reduce
from meshmpi.ir.program import Instruction, LocalType, Program, Region, Traits, Violation
from meshmpi.ir.types import held_differently

MOST_ENDS = 16
"""Places where the columns of a block may end in a band: each needs kernels of its own.  Status:
assumption; what is computed for nothing is a sixteenth at most."""


class TileDim(NamedTuple):
    """A dim that a tiled region walks along, ``size`` elements at a time."""

    dim: str
    size: int

    def __str__(self) -> str:
        return f"{self.dim}:{self.size}"


@dataclass(frozen=True, eq=False, repr=False)
class Fused(
    Region,
    kind="fused",
    traits=Traits(repeatable=True, tileable=True, native=True, hides_network=True, carries_gradient=True),
):
    """Maps, reductions and random numbers over the same ``rows`` as one loop nest."""

    rows: Shape
    body: tuple[Instruction, ...]
    inner: Mapping[int, LocalType]

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        types, over_rows = region_types(i, program), set[int]()  # sums over rows are whole behind the last row
        for one in _checked_body(program, i, types):
            require(one.traits.fusible, f"has {one.kind} in its body")
            require(over_rows.isdisjoint(one.inputs), "uses a sum over rows before the last row")
            y = types[one.outputs[0]].shape
            if isinstance(one.attrs, Reduce) and any(y.find(n) < 0 for n in self.rows.names):
                over_rows.update(one.outputs)
        two = held_differently(types.values())
        require(two is None, f"mixes blocks of {two and two[0]} and of {two and two[1]}")


@dataclass(frozen=True, eq=False, repr=False)
class Tiled(Region, kind="tiled", traits=Traits(repeatable=True, hides_network=True, product=True, by_place=True)):
    """What its ``body`` computes, a block of the dims ``over`` at a time; in a ``band`` less.

    Types are those that the values would have outside.  Only ``inner`` ones live in scratch memory of one block, and
    sums over a dim of ``over`` add up over its blocks.
    """

    over: tuple[TileDim, ...]
    band: Band | None = None
    body: tuple[Instruction, ...] = ()
    inner: Mapping[int, LocalType] = field(default_factory=dict[int, LocalType])

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        types = region_types(i, program)
        for one in _checked_body(program, i, types):
            require(one.traits.tileable, f"has {one.kind} in its body")
        for problem in broken_tile_rules(i, types):
            raise Violation(problem)

    def flops_at(self, program: Program, i: Instruction, at: Mapping[str, int]) -> dict[str, int]:
        types, table = region_types(i, program), dict[str, int]()
        for count, ranges in iteration_counts(i, program, at):
            for one in i.leaves():
                ins, outs = ([extents_in(types[v].shape, ranges) for v in vs] for vs in (one.inputs, one.outputs))
                if flops := one.attrs.flops(ins, outs):
                    table[one.kind] = table.get(one.kind, 0) + count * flops
        return table

    @property
    def compared_dims(self) -> tuple[str, ...]:
        return () if self.band is None else (self.band.rows, self.band.columns)


def _checked_body(program: Program, i: Instruction, types: Mapping[int, LocalType]) -> Iterator[Instruction]:
    """The instructions in a body, each checked behind what the caller demands of it."""
    inside, known = replace(program, types=types), set(i.inputs)
    for one in i.body:
        require(known.issuperset(one.inputs), "has a body that uses an undefined value")
        yield one
        one.attrs.check(inside, one, [types[v] for v in one.inputs])
        known.update(one.outputs)
    require(known.issuperset(i.outputs), "returns an undefined value")
    require(not set(i.inputs) & set(i.outputs), "returns what it was given")


def region_types(i: Instruction, program: Program) -> dict[int, LocalType]:
    """Types of everything that an instruction with a body reads, makes and keeps inside."""
    used = {v: program.types[v] for v in (*i.inputs, *i.outputs)}
    return {**used, **i.inner_types()}


def own_ranges(i: Instruction, program: Program, coordinates: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Every dim of the region -> the range that the rank at ``coordinates`` holds of it."""
    out: dict[str, tuple[int, int]] = {}
    for t in region_types(i, program).values():
        out.update(zip(t.shape.names, t.block(program.mesh, coordinates), strict=True))
    return out


def iterations(
    i: Instruction, program: Program, coordinates: Mapping[str, int]
) -> Iterator[dict[str, tuple[int, int]]]:
    """The ranges of all dims in each iteration, in order.

    With a ``band``, columns that no row of a block is paired with are left out.  Rows run backwards
    there: in a causal region the first block has the most columns.
    """
    own = own_ranges(i, program, coordinates)
    band = i.of(Tiled).band
    step = 1 if band is None else _columns_step(i, own, band)
    cuts = []
    for dim, size in i.of(Tiled).over:
        start, stop = own[dim]
        parts = [(dim, (k, min(k + size, stop))) for k in range(start, stop, size)]
        cuts.append(parts[::-1] if band is not None and dim == band.rows else parts)
    for chosen in itertools.product(*cuts):
        ranges = {**own, **dict(chosen)}
        if band is not None:
            ranges[band.columns] = _seen(band, ranges[band.rows], own[band.columns], step)
        yield ranges


def _columns_step(i: Instruction, own: Ranges, band: Band) -> int:
    """The columns of a block are a multiple of so many, so that few sizes occur."""
    first, end = own[band.columns]
    width = end - first
    if band.least is not None and band.most is not None:
        rows = next(size for dim, size in i.of(Tiled).over if dim == band.rows)
        width = min(width, rows + band.most - band.least)
    return max(1, -(-width // MOST_ENDS))


def _seen(band: Band, rows: tuple[int, int], own: tuple[int, int], step: int) -> tuple[int, int]:
    """The columns of a block of rows, at least ``step`` where there are any."""
    first, end = own
    low, high = band.seen(rows, own)
    low = first + (min(low, max(first, end - 1)) - first) // step * step
    high = max(high, min(low + 1, end))
    return low, min(end, first + -(-(high - first) // step) * step)


def widest(i: Instruction, program: Program, coordinates: Mapping[str, int]) -> dict[str, tuple[int, int]] | None:
    """Ranges of a block with the most columns that any rank may have; None where all blocks do."""
    band = i.of(Tiled).band
    largest = next(iterations(i, program, coordinates), None)
    if band is None or largest is None:
        return None
    own = own_ranges(i, program, coordinates)
    first, end = own[band.columns]
    if band.least is not None and band.most is not None:
        step = _columns_step(i, own, band)
        end = min(end, first + (MOST_ENDS + 1) * step)
    return {**largest, band.columns: (first, end)}


def extents_in(shape: Shape, ranges: Ranges) -> dict[str, int]:
    """Dimension name -> elements of a value in one iteration."""
    return {n: ranges[n][1] - ranges[n][0] for n in shape.names}


def iteration_counts(
    i: Instruction, program: Program, coordinates: Mapping[str, int]
) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """(how often, ranges of the first such) of the iterations of equal extents."""
    out: dict[tuple[int, ...], tuple[int, dict[str, tuple[int, int]]]] = {}
    for ranges in iterations(i, program, coordinates):
        key = sizes_key(ranges)
        n, first = out.get(key, (0, ranges))
        out[key] = (n + 1, first)
    return list(out.values())


def sizes_key(ranges: Ranges) -> tuple[int, ...]:
    """The extents of an iteration: equal iff the same kernels fit."""
    return tuple(stop - start for start, stop in ranges.values())


def broken_tile_rules(i: Instruction, types: Mapping[int, LocalType]) -> Iterator[str]:
    """What is wrong with the dims that a tiled region runs over."""
    leaves = i.leaves()
    used = [types[v] for one in leaves for v in (*one.inputs, *one.outputs)]
    if two := held_differently(used):
        yield f"mixes blocks of {two[0]} and of {two[1]}"
    if any(t.halos for t in used):
        yield "works on values held with halos"
    dims = [dim for dim, _ in i.of(Tiled).over]
    if not dims or len(set(dims)) < len(dims) or any(size < 1 for _, size in i.of(Tiled).over):
        yield "runs over no dim, twice over one, or over empty blocks"
    for dim in dims:
        if not walkable(leaves, types, i.outputs, dim):
            yield f"needs all of '{dim}' in a block"
    band = i.of(Tiled).band
    if band is None:
        return
    if band.rows not in dims or band.columns in dims:
        yield "has a band along other dims"
    for one in leaves:
        if not leaves_out(one, types, band, any(v in i.outputs for v in one.outputs)):
            yield f"uses pairs outside {band}"


def leaves_out(i: Instruction, types: Mapping[int, LocalType], band: Band, leaves: bool = True) -> bool:
    """Whether an instruction, whose results perhaps leave the region, gives the same without pairs outside a band."""

    def has(v: int, *dims: str) -> bool:
        return all(types[v].shape.find(d) >= 0 for d in dims)

    pair, columns = (band.rows, band.columns), band.columns
    if any(has(v, *pair) for v in i.inputs) and not any(has(v, *pair) for v in i.outputs):
        return isinstance(i.attrs, (Reduce, Contract, Tiled)) and i.attrs.band == band
    if any(has(v, columns) for v in i.outputs):
        return not leaves
    return not any(has(v, columns) for v in i.inputs)


def walkable(leaves: Sequence[Instruction], types: Mapping[int, LocalType], outputs: Container[int], dim: str) -> bool:
    """Whether blocks of ``dim`` are independent, but for sums that only others read."""
    read = {v for i in leaves for v in i.inputs}
    for i in leaves:
        reads = any(types[v].shape.find(dim) >= 0 for v in i.inputs)
        for v in i.outputs:
            if types[v].shape.find(dim) >= 0:
                continue
            if v in outputs and not reads:
                return False  # made again in every block
            summed = isinstance(i.attrs, Contract) or (isinstance(i.attrs, Reduce) and i.attrs.op == "sum")
            if reads and not (summed and v in outputs and v not in read):
                return False
    return True
