"""A program in float64: the same instructions on the same blocks, with every rounding made small.

Layouts, collectives and the decisions of passes stay as they are.  So a difference that exceeds
float64 rounding is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshmpi.ir.kinds import Map, Random, Region
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import FLOATS, Expr, Step


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
        program,
        types=types,
        instructions=tuple(instructions),
        variables={n: replace(v, type=_wide(v.type)) for n, v in program.variables.items()},
        feeds={n: _wide(t) for n, t in program.feeds.items()},
    )


def _wide(t: LocalType) -> LocalType:
    return replace(t, dtype="float64") if t.dtype in FLOATS else t


def _all(
    instructions: Iterable[Instruction], old: Mapping[int, LocalType], types: dict[int, LocalType], fresh: Iterable[int]
) -> list[Instruction]:
    """The instructions in float64; types of values made on the way are added to ``types``."""
    out: list[Instruction] = []
    for i in instructions:
        if isinstance(i.attrs, Map):
            i = i.replaced(expr=_expression(i.attrs.expr))
        if isinstance(i.attrs, Region):
            inner = {v: _wide(t) for v, t in i.attrs.inner.items()}
            body = _all(i.attrs.body, {**old, **i.attrs.inner}, inner, fresh)
            i = i.replaced(body=tuple(body), inner=inner)
        if isinstance(i.attrs, Random) and old[i.outputs[0]].dtype != "float64":
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
    cast = Instruction(Map(expr), (drawn,), (y,), i.source)
    return [i.replaced(outputs=(drawn,)), cast]


def _expression(expr: Expr) -> Expr:
    """The expression in float64.  Numbers in it stay exact: a float literal is what the user wrote."""
    steps = [s._replace(dtype="float64") if s.dtype in FLOATS else s for s in expr.steps]
    return expr._replace(steps=tuple(steps))
