"""Helpers of all passes: users of a value, and replacing values."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from meshmpi.ir.kinds import Region, Write
from meshmpi.ir.program import Instruction, LocalType, Program


def users(program: Program) -> dict[int, list[Instruction]]:
    """Value -> the instructions that use it, in order (once per use)."""
    out: defaultdict[int, list[Instruction]] = defaultdict(list)
    for i in program.instructions:
        for v in i.inputs:
            out[v].append(i)
    return out


def only_user(program: Program) -> dict[int, Instruction]:
    """Value -> the instruction that uses it, for values that are used once and not fetched."""
    uses = Counter(v for i in program.instructions for v in i.inputs)
    uses.update(program.fetches.values())
    return {v: i for i in program.instructions for v in i.inputs if uses[v] == 1}


def needed_for(instructions: Sequence[Instruction], wanted: Iterable[int]) -> list[Instruction]:
    """The instructions that the wanted values need, or that stay anyway."""
    needed, kept = set(wanted), list[Instruction]()
    for i in reversed(instructions):
        if i.traits.kept or not needed.isdisjoint(i.outputs):
            kept.append(i)
            needed.update(i.inputs)
    return kept[::-1]


def producers(program: Program) -> dict[int, Instruction]:
    """Value -> the instruction that makes it."""
    return {v: i for i in program.instructions for v in i.outputs}


def fetched(program: Program) -> set[int]:
    """Values that are fetched; for membership tests only."""
    return set(program.fetches.values())


def substituted(i: Instruction, instead: Mapping[int, int]) -> Instruction:
    """The instruction with inputs replaced."""
    if instead.keys().isdisjoint(i.inputs):
        return i
    return i.replaced(inputs=tuple([instead.get(v, v) for v in i.inputs]))


def with_substitution(program: Program, instructions: Iterable[Instruction], instead: Mapping[int, int]) -> Program:
    """A program of ``instructions`` whose uses and fetches follow ``instead`` (chains resolved)."""

    def final(v: int) -> int:
        while v in instead:
            v = instead[v]
        return v

    resolved = {v: final(v) for v in instead}
    fetches = {name: final(v) for name, v in program.fetches.items()}
    return program.with_instructions([substituted(i, resolved) for i in instructions], fetches=fetches)


def fresh(program: Program) -> int:
    """A value number that the program does not use yet; larger ones are free too."""
    inner = (v for i in program.instructions if isinstance(i.attrs, Region) for v in i.inner_types())
    return max(itertools.chain(program.types, inner), default=-1) + 1


def enclosed(
    body: Iterable[Instruction], outputs: Sequence[int], types: Mapping[int, LocalType]
) -> tuple[tuple[int, ...], dict[int, LocalType]]:
    """Inputs of a region with this body and these results, and the types of what only it uses."""
    body = list(body)
    made = dict.fromkeys(v for i in body for v in i.outputs)
    inputs = dict.fromkeys(v for i in body for v in i.inputs if v not in made)
    return tuple(inputs), {v: types[v] for v in made if v not in outputs}


def writes_last(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The instructions in their order, but all writes of variables behind the others."""
    return sorted(instructions, key=lambda i: isinstance(i.attrs, Write))
