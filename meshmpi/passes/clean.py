"""Dead code and repeated code: `dce` and `cse`."""

from __future__ import annotations

from meshmpi.passes.rewrite import substituted, with_substitution
from meshmpi.program import Instruction, Program


def dce(program: Program) -> Program:
    """Drops instructions whose results nothing needs; feeds stay, the step's signature."""
    needed = set(program.fetches.values())
    kept: list[Instruction] = []
    for i in reversed(program.instructions):
        if i.kind in ("write", "feed") or any(v in needed for v in i.outputs):
            kept.append(i)
            needed.update(i.inputs)
    return program.with_instructions(kept[::-1])


def cse(program: Program) -> Program:
    """Computes equal instructions once.

    Random instructions are equal only when their keys are, and then they make equal numbers.
    """
    seen: dict[tuple[object, ...], tuple[int, ...]] = {}
    instead: dict[int, int] = {}
    kept: list[Instruction] = []
    for i in program.instructions:
        i = substituted(i, instead)
        key = (i.kind, i.inputs, str(sorted(i.attrs.items(), key=lambda kv: kv[0])),
               tuple(str(program.types[v]) for v in i.outputs))  # fmt: skip
        if i.kind != "write" and key in seen:
            instead.update(zip(i.outputs, seen[key], strict=True))
            continue
        seen[key] = i.outputs
        kept.append(i)
    return with_substitution(program, kept, instead)
