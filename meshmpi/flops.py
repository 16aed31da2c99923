"""Floating-point operations of local instructions: the one place of these formulas.

Functions of extents and types only, so that kernels and cost model count the same.  Nothing here
knows arrays or ranks of a running job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshmpi.loops import extents_in, iteration_counts, loop_types
from meshmpi.program import Instruction, Program
from meshmpi.slides import Range

Extents = Mapping[str, int]
"""Dimension name -> number of elements of the block."""


def instruction_flops(
    instruction: Instruction, inputs: Sequence[Extents], outputs: Sequence[Extents]
) -> int:
    """Floating-point operations of one instruction on blocks of the given extents.

    map: operations of the expression x elements of the output; reduce: elements of the input;
    contract: 2 x product of the extents of all its dims; scatter_add: elements of the updates;
    block_sum: elements of the input; cumsum: the same, twice where it goes on from other blocks;
    every other kind: 0 (conv has a formula of its own, see `conv_flops`).
    """
    kind = instruction.kind
    if kind == "map":
        return instruction.attrs["expr"].flops * math.prod(outputs[0].values())
    if kind == "reduce":
        return math.prod(inputs[0].values())
    if kind == "contract":
        return 2 * math.prod({**inputs[0], **inputs[1]}.values())
    if kind in ("scatter_add", "block_sum"):
        return math.prod(inputs[0].values())
    if kind == "cumsum":
        return len(inputs) * math.prod(inputs[0].values())
    return 0


def local_flops(
    instruction: Instruction, program: Program, coordinates: Mapping[str, int] | None = None
) -> int:
    """Floating-point operations of one instruction on one rank.

    Args:
        instruction: Of ``program``.
        program: Supplies types and mesh.
        coordinates: Of the rank; None means the largest blocks.
    """
    if instruction.kind == "loop":
        return sum(loop_flops(instruction, program, coordinates).values())
    if instruction.kind == "conv":
        return conv_flops(instruction, program, coordinates)
    inner = instruction.inner_types()

    def extents(v: int) -> Extents:
        t = inner[v] if v in inner else program.types[v]
        sizes = (
            t.max_sizes(program.mesh) if coordinates is None
            else t.local_sizes(program.mesh, coordinates)
        )  # fmt: skip
        return dict(zip(t.shape.names, sizes, strict=True))

    return sum(
        instruction_flops(i, [extents(v) for v in i.inputs], [extents(v) for v in i.outputs])
        for i in instruction.leaves()
    )


def loop_flops(
    loop: Instruction, program: Program, coordinates: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Kind of instruction -> floating-point operations of all iterations of a loop on one rank."""
    types, table = loop_types(loop, program), dict[str, int]()
    here = dict.fromkeys(program.mesh.names, 0) if coordinates is None else coordinates
    for count, ranges in iteration_counts(loop, program, here):
        for i in loop.leaves():
            ins, outs = (
                [extents_in(types[v].shape, ranges) for v in vs] for vs in (i.inputs, i.outputs)
            )
            if flops := instruction_flops(i, ins, outs):
                table[i.kind] = table.get(i.kind, 0) + count * flops
    return table


def conv_flops(
    conv: Instruction, program: Program, coordinates: Mapping[str, int] | None = None
) -> int:
    """2 x products of elements that meet inside the borders, exactly, of one rank's blocks.

    The extents of all other dims, times for each slide the triples of indices that meet.
    """
    here = dict.fromkeys(program.mesh.names, 0) if coordinates is None else coordinates

    def ranges(v: int) -> dict[str, Range]:
        t = program.types[v]
        blocks = zip(t.shape, t.block(program.mesh, here), strict=True)
        return {d.name: (max(0, start), min(stop, d.size)) for d, (start, stop) in blocks}

    a, b, y = (ranges(v) for v in (*conv.inputs, *conv.outputs))
    products = 2
    for s in conv.attrs["slides"]:
        products *= s.meetings(a.pop(s.x), b.pop(s.w), y[s.y])
    return products * math.prod(stop - start for start, stop in {**a, **b}.values())
