"""A program in float64: the same instructions on the same blocks, with every rounding made small.

Layouts, collectives and what passes decided stay as they are, so that a difference which is more
than float64 rounding is no rounding at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshmpi.program import Instruction, LocalType, Program
from meshmpi.scalar import FLOATS, Expr, Step


def widened(program: Program) -> Program:
    """``program`` with every floating-point value in float64.

    Random numbers are drawn in their own type first, since those of another type are other numbers.
    Feeds and variables are float64 as well.
    """
    numbers = [*program.types, *(v for i in program.instructions for v in i.inner_types())]
    fresh = iter(range(max(numbers, default=-1) + 1, 1 << 62))
    types = {v: _wide(t) for v, t in program.types.items()}
    instructions = _all(program.instructions, program.types, types, fresh)
    return replace(
        program, types=types, instructions=tuple(instructions),
        variables={n: replace(v, type=_wide(v.type)) for n, v in program.variables.items()},
        feeds={n: _wide(t) for n, t in program.feeds.items()},
    )  # fmt: skip


def _wide(t: LocalType) -> LocalType:
    return replace(t, dtype="float64") if t.dtype in FLOATS else t


def _all(
    instructions: Iterable[Instruction], old: Mapping[int, LocalType], types: dict[int, LocalType],
    fresh: Iterable[int],
) -> list[Instruction]:  # fmt: skip
    """The instructions in float64; types of values made on the way are added to ``types``."""
    out: list[Instruction] = []
    for i in instructions:
        attrs = dict(i.attrs)
        if "expr" in attrs:
            attrs["expr"] = _expression(attrs["expr"])
        if "body" in attrs:
            inside = {**old, **attrs.get("inner", {})}
            inner = {v: _wide(t) for v, t in attrs.get("inner", {}).items()}
            attrs["body"] = tuple(_all(attrs["body"], inside, inner, fresh))
            if "inner" in attrs:
                attrs["inner"] = inner
        i = i.replaced(attrs=attrs)
        if i.kind == "random" and old[i.outputs[0]].dtype != "float64":
            out += _drawn_and_cast(i, old[i.outputs[0]], types, fresh)
        else:
            out.append(i)
    return out


def _drawn_and_cast(
    i: Instruction, t: LocalType, types: dict[int, LocalType], fresh: Iterable[int]
) -> list[Instruction]:
    (y,), drawn = i.outputs, next(iter(fresh))
    types[drawn] = t
    expr = Expr((Step("cast", ("i0",), "float64"),), ("t0",))
    cast = Instruction("map", (drawn,), (y,), {"expr": expr}, i.source)
    return [i.replaced(outputs=(drawn,)), cast]


def _expression(expr: Expr) -> Expr:
    """The tape in float64.  Numbers in it stay exact: a float literal is what the user wrote."""
    steps = [
        s._replace(dtype="float64") if s.dtype in FLOATS else s for s in expr.steps
    ]  # fmt: skip
    return expr._replace(steps=tuple(steps))
