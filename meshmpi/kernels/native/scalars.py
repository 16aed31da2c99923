"""Scalars in C: types, loads and stores, literals, and the functions of the scalar table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from meshmpi.ir.scalar import SCALAR_FUNCTIONS, Step
from meshmpi.kernels.views import numpy_dtype

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "bf16",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "bool": "uint8_t",
}
COMPUTED_AS = {"bfloat16": "float32"}
"""Data types that are computed with as another."""
_TYPED_CALL = re.compile(
    r"\b(EXP|LOG|LOG1P|TANH|SIN|COS|ERF|POW|SQRT|FLOOR|ABS|FLOORDIV|FLOORMOD|ISFINITE)\("
)  # the C functions that exist once for float and once for double
_EXACT = ("where", "minimum", "maximum", "negative", "abs", "identity", "floor", "sign")
"""Functions whose result for bfloat16 arguments is a bfloat16 without rounding."""
_WHOLE = {"floordiv": "floordiv", "mod": "floormod", "power": "power"}


def number_type(dtype: str) -> str:
    """C type in which a value of ``dtype`` is computed with."""
    return C_TYPES[COMPUTED_AS.get(dtype, dtype)]


def load(dtype: str, place: str) -> str:
    """A number in memory as it is computed with."""
    return f"load_bf16({place})" if dtype == "bfloat16" else place


def store(dtype: str, source: str) -> str:
    """A number as it is kept in memory."""
    return f"store_bf16({source})" if dtype == "bfloat16" else source


def rounded(dtype: str, source: str) -> str:
    """A number computed in float as the nearest number of ``dtype``."""
    return f"round_bf16({source})" if dtype == "bfloat16" else source


def literal(value: float | int | bool, dtype: str) -> str:
    """A number as a C constant: rounded to ``dtype`` as NumPy rounds it."""
    t = number_type(dtype)
    if t in ("float", "double"):
        with np.errstate(over="ignore"):
            value = float(np.asarray(value, np.float64).astype(numpy_dtype(dtype)))
        if math.isnan(value):
            return "NAN"
        if math.isinf(value):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return f"({value!r}{'f' if t == 'float' else ''})"
    value = int(value)
    if value == -(2 ** (63 if dtype == "int64" else 31)):
        return f"({value + 1}{'LL' if dtype == 'int64' else ''} - 1)"
    return f"({value}{'LL' if dtype == 'int64' else ''})"


def identity(op: str, dtype: str) -> str:
    """The number from which a reduction starts (max and min of floats: an order-preserving key)."""
    if op in ("sum", "prod"):
        return "0" if op == "sum" else "1"
    t = number_type(dtype)
    if t in ("float", "double"):
        # key(-inf): the smallest number; min is the negated max of negated numbers.
        return "key_f32(-INFINITY)" if t == "float" else "key_f64(-INFINITY)"
    limits = {"int32": ("INT32_MIN", "INT32_MAX"), "int64": ("INT64_MIN", "INT64_MAX"), "uint8": ("0", "255")}
    return limits.get(dtype, ("0", "1"))[op == "min"]


def neutral(op: str, dtype: str) -> str:
    """The number that changes no sum, product, maximum or minimum."""
    if op in ("max", "min") and number_type(dtype) in ("float", "double"):
        return "(-INFINITY)" if op == "max" else "INFINITY"
    return identity(op, dtype)


def step_source(step: Step, names: Mapping[str, str], dtypes: Mapping[str, str]) -> str:
    """C expression of one step of a scalar expression.

    bfloat16 is computed in float and rounded after every step, as on NumPy, so that results do not
    depend on what was fused.
    """
    known = [dtypes[a] for a in step.args[step.function == "where" :] if isinstance(a, str)]
    operand = known[0] if known else step.dtype  # literals adopt it
    args = [names[a] if isinstance(a, str) else literal(a, operand) for a in step.args]
    if step.function == "where" and not isinstance(step.args[0], str):
        args[0] = literal(step.args[0], "bool")
    if step.function in ("cast", "identity"):
        source = dtypes[step.args[0]] if isinstance(step.args[0], str) else ""
        return args[0] if source == step.dtype else _cast(args[0], source, step.dtype)
    text = _call(step.function, args, operand)
    if step.dtype == "bool" and SCALAR_FUNCTIONS[step.function].result == "same":
        return f"({text} != 0)"
    return text if step.function in _EXACT else rounded(step.dtype, text)


def _call(function: str, args: list[str], operand: str) -> str:
    """C expression of a function of arguments of type ``operand``."""
    suffix = {"float": "f32", "double": "f64"}.get(number_type(operand))
    if suffix:
        text = SCALAR_FUNCTIONS[function].c.format(*args)
        return _TYPED_CALL.sub(rf"\1_{suffix}(", text)
    if function in _WHOLE:
        name = "uint8" if operand == "bool" else operand
        return f"{_WHOLE[function]}_{name}({', '.join(args)})"
    if function == "abs":
        return f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
    if function == "floor":
        return args[0]
    if function == "isfinite":
        return "1"
    return SCALAR_FUNCTIONS[function].c.format(*args)


def _cast(x: str, source: str, dtype: str) -> str:
    t = number_type(dtype)
    if dtype == "bool":
        return f"({x} != 0)"
    if source == "bool":  # gcc vectorises no other way from a comparison to a number
        x = f"({'int64_t' if t == 'double' else 'int32_t'}){x}"
    return rounded(dtype, f"(({t})({x}))")
