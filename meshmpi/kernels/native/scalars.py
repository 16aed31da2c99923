"""Scalars in C: types, loads and stores, literals, and the functions of the scalar table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from meshmpi.scalar import SCALAR_FUNCTIONS, Step

C_TYPES = {
    "float32": "float", "float64": "double", "bfloat16": "bf16", "int32": "int32_t",
    "int64": "int64_t", "uint8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip
_TYPED = ("EXP", "LOG", "LOG1P", "TANH", "SIN", "COS", "ERF", "POW", "SQRT", "FLOOR", "ABS",
          "FLOORDIV", "FLOORMOD")  # fmt: skip


def number_type(dtype: str) -> str:
    """C type in which a value of ``dtype`` is computed with."""
    return "float" if dtype == "bfloat16" else C_TYPES[dtype]


def load(dtype: str, place: str) -> str:
    return f"load_bf16({place})" if dtype == "bfloat16" else place


def store(dtype: str, source: str) -> str:
    return f"store_bf16({source})" if dtype == "bfloat16" else source


def literal(value: float | int | bool, dtype: str) -> str:
    """A number as a C constant of ``dtype``."""
    if number_type(dtype) in ("float", "double"):
        value = float(value)
        if math.isnan(value):
            return "NAN"
        if math.isinf(value):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"({value!r}{'f' if number_type(dtype) == 'float' else ''})"
    return f"({int(value)})"


def identity(op: str, dtype: str) -> str:
    """The number from which a reduction starts (max and min of floats: an order-preserving key)."""
    if op == "sum":
        return "0"
    if op == "prod":
        return "1"
    t = number_type(dtype)
    if t in ("float", "double"):
        # key(-inf): the smallest number; min is the negated max of negated numbers.
        return "key_f32(-INFINITY)" if t == "float" else "key_f64(-INFINITY)"
    low, high = {
        "int32_t": ("INT32_MIN", "INT32_MAX"), "int64_t": ("INT64_MIN", "INT64_MAX"), "uint8_t": ("0", "255"),
    }[t]  # fmt: skip
    if dtype == "bool":
        low, high = "0", "1"
    return low if op == "max" else high


def step_source(step: Step, names: Mapping[str, str], dtypes: Mapping[str, str]) -> str:
    """C expression of one step of a tape."""
    operand = _operand_dtype(step, dtypes)
    args = [names[a] if isinstance(a, str) else literal(a, operand) for a in step.args]
    if step.function == "where" and not isinstance(step.args[0], str):
        args[0] = literal(step.args[0], "bool")
    if step.function == "cast":
        return _cast(args[0], step.dtype)
    text = SCALAR_FUNCTIONS[step.function].c.format(*args, type=number_type(step.dtype))
    suffix = {"float": "f32", "double": "f64"}.get(number_type(operand))
    if suffix:
        return re.sub(r"\b(" + "|".join(_TYPED) + r")\(", rf"\1_{suffix}(", text)
    if step.function == "abs":
        return text.replace("ABS(", "ABS_int(")
    if step.function in ("floordiv", "mod"):
        # Python's rule for integers: the quotient is rounded down; 0 where NumPy gives 0.
        a, b = args
        q = f"({b} == 0 ? 0 : {a} / {b} - (({a} % {b} != 0) && (({a} < 0) != ({b} < 0))))"
        return q if step.function == "floordiv" else f"({b} == 0 ? 0 : {a} - {q} * {b})"
    if step.function == "power":
        return f"({C_TYPES[step.dtype]})pow({args[0]}, {args[1]})"
    return text


def _operand_dtype(step: Step, dtypes: Mapping[str, str]) -> str:
    """Data type of the arguments that literals adopt."""
    args = step.args[1:] if step.function == "where" else step.args
    for a in args:
        if isinstance(a, str):
            return dtypes[a]
    return step.dtype


def _cast(x: str, dtype: str) -> str:
    if dtype == "bool":
        return f"({x} != 0)"
    return f"(({number_type(dtype)})({x}))"
