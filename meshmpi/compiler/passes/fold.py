"""Constant folding and copy propagation: numbers known at compile time move into expressions, copies vanish."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from meshmpi.compiler.passes.rewrite import fetched, substituted, with_substitution
from meshmpi.ir.kinds import Map, Write
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import FLOATS, Arg, Expr, Step, fill


def _square(a: float) -> float:
    return a * a


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negative": operator.neg,
    "square": _square,
    "identity": float,
}


def fold(program: Program) -> Program:
    """Puts constants into the maps that use them, evaluates constant maps, drops copies."""
    constants: dict[int, float | int | bool] = {}
    instead: dict[int, int] = {}
    kept: list[Instruction] = []
    written = {i.inputs[0] for i in program.instructions if isinstance(i.attrs, Write)}
    stored, leaving = _stored(program), written | fetched(program)  # what leaves is no memory that a write may change
    for i in program.instructions:
        i = substituted(i, instead)
        if isinstance(i.attrs, Map):
            i = _with_literals(i, constants)
            value = _constant_value(i, program)
            if value is not None:
                constants[i.outputs[0]] = value
                i = i.replaced(inputs=(), expr=fill(value, program.types[i.outputs[0]].dtype))
            elif _is_copy(i, program) and not (i.inputs[0] in stored and i.outputs[0] in leaving):
                instead[i.outputs[0]] = i.inputs[0]
                continue
        kept.append(i)
    return with_substitution(program, kept, instead)


def _stored(program: Program) -> set[int]:
    """Values that are the memory of a variable or feed; for membership tests only."""
    out: set[int] = set()
    for i in program.instructions:
        if i.traits.given or (i.traits.same_memory and i.inputs[0] in out):
            out.update(i.outputs)
    return out


def _with_literals(i: Instruction, constants: dict[int, float | int | bool]) -> Instruction:
    """The map with constant inputs written into its expression."""
    if not any(v in constants for v in i.inputs):
        return i
    renaming: dict[str, Arg] = {}
    inputs: list[int] = []
    for k, v in enumerate(i.inputs):
        if v in constants:
            renaming[f"i{k}"] = constants[v]
        else:
            renaming[f"i{k}"] = f"i{len(inputs)}"
            inputs.append(v)
    steps = tuple(
        Step(s.function, tuple(renaming.get(a, a) if isinstance(a, str) else a for a in s.args), s.dtype)
        for s in i.of(Map).expr.steps
    )
    if any(isinstance(renaming.get(r), (int, float)) for r in i.of(Map).expr.results):
        return i
    if any(s.function not in _ARITHMETIC and not any(isinstance(a, str) for a in s.args) for s in steps):
        return i
    results = tuple(str(renaming.get(r, r)) for r in i.of(Map).expr.results)
    return i.replaced(inputs=tuple(inputs), expr=Expr(steps, results))


def _constant_value(i: Instruction, program: Program) -> float | int | bool | None:
    """The value of a map of one step without tensors, if it is plain arithmetic in a float type."""
    expr = i.of(Map).expr
    if i.inputs or len(expr.steps) != 1 or len(i.outputs) != 1:
        return None
    (step,) = expr.steps
    if step.function == "identity":
        return step.args[0]  # type: ignore[return-value]
    if step.function in _ARITHMETIC and step.dtype in FLOATS:
        return _ARITHMETIC[step.function](*step.args)
    return None


def _is_copy(i: Instruction, program: Program) -> bool:
    """Whether the map returns its only input unchanged (perhaps multiplied by 1)."""
    expr = i.of(Map).expr
    if len(i.inputs) != 1 or len(i.outputs) != 1 or len(expr.steps) != 1:
        return False
    if program.types[i.inputs[0]] != program.types[i.outputs[0]]:
        return False
    (s,) = expr.steps
    by_one = s.function == "multiply" and any(a == 1 for a in s.args if not isinstance(a, str))
    return (s.function == "identity" or by_one) and "i0" in s.args
