"""Instructions of one form have equal rules and costs: those of equal layers are looked at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any, cast

from meshmpi.ir.program import Instruction, LocalType, Program, Region


def form_of(i: Instruction, types: Mapping[int, LocalType]) -> tuple[Hashable, ...]:
    """Equal for instructions that differ in the numbers of their values only, as in equal layers.

    Rules, FLOP and workspace of equal forms are equal.  Results need not be: 0.0 and -0.0, 1 and True
    have the same form.  The type of a value that a broken program does not define is None.
    """
    if not isinstance(i.attrs, Region):
        return (i.attrs, len(i.inputs), *[types.get(v) for v in (*i.inputs, *i.outputs)])
    number: dict[int, int] = {}

    def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([number.setdefault(v, len(number)) for v in values])

    own = tuple([getattr(i.attrs, f.name) for f in fields(cast(Any, i.attrs)) if f.name not in ("body", "inner")])
    inside = {**{v: types[v] for v in (*i.inputs, *i.outputs) if v in types}, **i.attrs.inner}
    body = [(form_of(j, inside), numbers(j.inputs), numbers(j.outputs)) for j in i.body]
    return type(i.attrs), own, numbers(i.inputs), numbers(i.outputs), *body


def forms(program: Program) -> list[tuple[Instruction, int]]:
    """One instruction of each form, and how many the program has."""
    first: dict[object, Instruction] = {}
    counts = Counter[object]()
    for i in program.instructions:
        form = form_of(i, program.types)
        first.setdefault(form, i)
        counts[form] += 1
    return [(i, counts[form]) for form, i in first.items()]
