"""Dead code and repeated code: `dce` and `cse`."""

from __future__ import annotations

from meshmpi.compiler.passes.rewrite import needed_for, substituted, with_substitution
from meshmpi.ir.program import Instruction, Program


def dce(program: Program) -> Program:
    """Drops instructions whose results nothing needs; feeds stay, the step's signature."""
    return program.with_instructions(needed_for(program.instructions, program.fetches.values()))


def cse(program: Program) -> Program:
    """Computes equal instructions once; random ones are equal where their keys are."""
    first: dict[tuple[object, ...], Instruction | None] = {}  # None: compared with others already
    seen: dict[tuple[object, ...], tuple[int, ...]] = {}
    instead: dict[int, int] = {}
    kept: list[Instruction] = []
    for i in program.instructions:
        i = substituted(i, instead)
        place = (i.kind, i.inputs)
        if place in first and i.outputs:
            other, first[place] = first[place], None
            if other is not None:
                seen[_meaning(program, other)] = other.outputs
            meaning = _meaning(program, i)
            if meaning in seen:
                instead.update(zip(i.outputs, seen[meaning], strict=True))
                continue
            seen[meaning] = i.outputs
        else:
            first[place] = i
        kept.append(i)
    return with_substitution(program, kept, instead)


def _meaning(program: Program, i: Instruction) -> tuple[object, ...]:
    """Equal for instructions that compute the same."""
    return i.kind, i.inputs, repr(i.attrs), *[program.types[v] for v in i.outputs]
