"""The blocks that a `loop` runs over: the one place that kernels, FLOP and memory read them from.

A loop computes what its ``body`` computes (maps, reductions, contracts, random numbers, segments,
with the types that they would have outside), a block of the dims ``over`` at a time: that changes
only where intermediate values (``inner``) live, in scratch memory of one block.  Sums over a dim
of ``over`` add up over its blocks.  Integers only; knows no arrays and no rank of a running job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshmpi.dims import Shape
from meshmpi.program import Instruction, LocalType, Program

MOST_ENDS = 16
"""Places where columns of a causal loop end: each needs kernels of its own.  Status: assumption;
what is computed in vain is a sixteenth at most."""
Ranges = Mapping[str, tuple[int, int]]
"""Dimension name -> global (start, stop)."""


class LoopDim(NamedTuple):
    """A dim that a loop walks along, ``size`` elements at a time."""

    dim: str
    size: int

    def __str__(self) -> str:
        return f"{self.dim}:{self.size}"


LOOP_KINDS = ("map", "reduce", "contract", "random", "segment")
"""What the body of a loop may hold."""


def loop_types(i: Instruction, program: Program) -> dict[int, LocalType]:
    """Types of everything the loop reads, makes and keeps inside."""
    used = {v: program.types[v] for v in (*i.inputs, *i.outputs)}
    return {**used, **i.inner_types()}


def own_ranges(
    i: Instruction, program: Program, coordinates: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Every dim of the loop -> the range that the rank at ``coordinates`` holds of it."""
    out: dict[str, tuple[int, int]] = {}
    for t in loop_types(i, program).values():
        out.update(zip(t.shape.names, t.block(program.mesh, coordinates), strict=True))
    return out


def iterations(
    i: Instruction, program: Program, coordinates: Mapping[str, int]
) -> Iterator[dict[str, tuple[int, int]]]:
    """The ranges of all dims in each iteration, in order.

    Where ``causal`` names (rows, columns), columns behind the last row of a block are left out:
    what they contribute is 0.  Rows run backwards there: the first block has the most columns.
    """
    own = own_ranges(i, program, coordinates)
    rows, columns = i.attrs.get("causal") or ("", "")
    cuts = []
    for dim, size in i.attrs["over"]:
        start, stop = own[dim]
        parts = [(dim, (k, min(k + size, stop))) for k in range(start, stop, size)]
        cuts.append(parts[::-1] if dim == rows else parts)
    for chosen in itertools.product(*cuts):
        ranges = {**own, **dict(chosen)}
        if columns:
            first, end = own[columns]
            step = -(-(end - first) // MOST_ENDS)
            needed = -(-max(1, ranges[rows][1] - first) // max(1, step)) * step
            ranges[columns] = (first, min(end, first + needed))
        yield ranges


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


def elements(t: LocalType, ranges: Ranges) -> int:
    """Elements of a value in one iteration."""
    return math.prod(extents_in(t.shape, ranges).values())


def broken_loop_rules(i: Instruction, types: Mapping[int, LocalType]) -> Iterator[str]:
    """What is wrong with the dims that a loop runs over.

    Args:
        i: The loop; its body follows the rules of its instructions.
        types: Of everything in it.
    """
    leaves = i.leaves()
    used = [types[v] for one in leaves for v in (*one.inputs, *one.outputs)]
    splits = dict.fromkeys(
        (n, s) for t in used for n, s in zip(t.shape.names, t.splits, strict=True)
    )
    if len({n for n, _ in splits}) < len(splits):
        yield "splits a dimension in two ways"
    if any(t.windows for t in used):
        yield "works on values held in windows"
    dims = [dim for dim, _ in i.attrs["over"]]
    if not dims or len(set(dims)) < len(dims) or any(size < 1 for _, size in i.attrs["over"]):
        yield "runs over no dim, twice over one, or over empty blocks"
    for dim in dims:
        if not walkable(leaves, types, i.outputs, dim):
            yield f"needs all of '{dim}' in a block"
    rows, columns = i.attrs.get("causal") or ("", "")
    if columns and (rows not in dims or columns in dims):
        yield "is causal along other dims"


def walkable(
    leaves: Sequence[Instruction], types: Mapping[int, LocalType], outputs: Container[int], dim: str
) -> bool:
    """Whether blocks of ``dim`` are independent, but for sums that only others read."""
    read = {v for i in leaves for v in i.inputs}
    for i in leaves:
        reads = any(types[v].shape.find(dim) >= 0 for v in i.inputs)
        for v in i.outputs:
            if types[v].shape.find(dim) >= 0:
                continue
            if v in outputs and not reads:
                return False  # made again in every block
            summed = i.kind == "contract" or i.attrs.get("op") == "sum"
            if reads and not (summed and v in outputs and v not in read):
                return False
    return True
