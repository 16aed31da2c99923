"""Floating-point operations of programs by the formulas in `kinds`, for kernels and cost alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from meshmpi.dims import Axes
from meshmpi.ir.kinds.regions import region_types
from meshmpi.ir.program import Extents, Instruction, Program

FEW_BLOCKS = 16
"""Every block of a dimension is tried for the busiest rank if there are at most this many."""


def local_flops(instruction: Instruction, program: Program, coordinates: Mapping[str, int] | None = None) -> int:
    """Floating-point operations of one instruction on one rank; None: on the largest blocks."""
    at = dict.fromkeys(program.mesh.names, 0) if coordinates is None else coordinates
    if (found := instruction.attrs.flops_at(program, instruction, at)) is not None:
        return sum(found.values())
    inner = instruction.inner_types()

    def extents(v: int) -> Extents:
        t = inner[v] if v in inner else program.types[v]
        sizes = t.max_sizes(program.mesh) if coordinates is None else t.local_sizes(program.mesh, coordinates)
        return dict(zip(t.shape.names, sizes, strict=True))

    return sum(
        i.attrs.flops([extents(v) for v in i.inputs], [extents(v) for v in i.outputs]) for i in instruction.leaves()
    )


def program_flops(program: Program, coordinates: Mapping[str, int]) -> int:
    """Floating-point operations of a step on the rank at ``coordinates``."""
    return sum(count * local_flops(i, program, coordinates) for i, count in program.forms)


def busiest_rank(program: Program) -> dict[str, int]:
    """Coordinates of a rank with the most floating-point operations; the first of equals.

    The rank at the origin has the largest block of everything, but not the most work where it
    counts *where* a block lies: in sums over a band, as causal attention, and at the borders of a
    convolution.  Along the axes that split such dims several places are compared, along all others
    the first is the busiest.  Of a long dim they are the first and last blocks of either size and
    the middle: work only grows or only falls along a band that is open on one side, and is the
    same inside one that is closed.
    """
    mesh, places = program.mesh, dict[str, dict[int, None]]()
    for n, _ in program.forms:
        for size, axes in _split_where_place_counts(n, program):
            for block in _telling_blocks(size, mesh.count(axes)):
                for axis in reversed(axes):
                    block, at = divmod(block, mesh.axis_size(axis))
                    places.setdefault(axis, {0: None})[at] = None
    found = [
        dict(zip(mesh.names, at, strict=True))
        for at in itertools.product(*(sorted(places.get(a, (0,))) for a in mesh.names))
    ]
    return found[0] if len(found) == 1 else max(found, key=lambda at: program_flops(program, at))


def _split_where_place_counts(i: Instruction, program: Program) -> Iterator[tuple[int, Axes]]:
    """(size, axes) of the split dims whose pairs of indices an instruction compares."""
    names = i.attrs.compared_dims
    for t in region_types(i, program).values() if names else ():
        for d, axes in zip(t.shape, t.splits, strict=True):
            if axes and d.name in names:
                yield d.size, axes


def _telling_blocks(size: int, count: int) -> Iterable[int]:
    """The blocks of a dim among which the busiest is looked for."""
    if count <= FEW_BLOCKS:
        return range(count)
    larger = size % count  # blocks that hold one element more
    found = (0, 1, larger - 1, larger, count // 2, count - 2, count - 1)
    return dict.fromkeys(n for n in found if 0 <= n < count)
