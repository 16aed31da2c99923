"""Which values a data type can hold: one rule for initial values, feeds and loaded values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshmpi.dims import Shape
from meshmpi.errors import VariableError
from meshmpi.ir.scalar import FLOATS, INTEGERS, fits

if TYPE_CHECKING:
    import numpy as np


_FAMILIES = {"f": "float", "i": "integer", "u": "integer", "b": "bool"}
"""NumPy's kind of a data type -> what it is here."""


def unfit(array: np.ndarray, dtype: str) -> str:
    """Why the values of an array cannot be kept as ``dtype``; empty where they can.

    Floats become floats, rounded; integers become integers that have their range; bools stay bools.  Nothing else is
    converted, since a value would change silently: 1.7 would become 1, and NaN some integer.
    """
    import numpy as np  # not before there are arrays: the doctor tells of a NumPy that does not load

    wanted = "float" if dtype in FLOATS else "integer" if dtype in INTEGERS else dtype
    if _FAMILIES.get("f" if array.dtype.name == "bfloat16" else array.dtype.kind) != wanted:
        return f"data type {array.dtype}"
    if wanted == "integer" and array.size and not np.can_cast(array.dtype, dtype, "safe"):
        low, high = int(array.min()), int(array.max())
        if not (fits(low, dtype) and fits(high, dtype)):
            return f"values {low} to {high}"
    return ""


def conversion(dtype: str) -> str:
    """The remedy for an array that is `unfit`."""
    first = " (first round and clip values that have fractions or are out of range)"
    return f"Convert it with array.astype('{dtype}'){first if dtype in INTEGERS else ''}."


def first_value(name: str, shape: Shape, dtype: str, initializer: Any, source: str = "") -> Any:
    """What the initializer of a variable gives: a `Distribution` where it has one, else an array.

    Raises:
        VariableError: It gives another shape, or values that the type cannot keep; made at ``source``.
    """
    what = f"the initializer of variable '{name}'"
    if hasattr(initializer, "resolve"):
        d = initializer.resolve(shape)
        if dtype in FLOATS or (d.kind == "constant" and _is_exact(d.shift, dtype)):
            return d
        value = f"the value {d.shift}" if d.kind == "constant" else f"numbers that are {d.kind}"
        remedy = f"Give an array of {dtype}, or a constant that it can hold."
        raise VariableError(f"{what} gives {value}, the variable has {dtype}.", remedy, source)
    fitting = f"Give an array of shape {shape.sizes}, or one of mm's initializers."
    import numpy as np

    try:
        array = np.asarray(initializer)
    except ValueError as e:  # rows of different lengths
        raise VariableError(f"{what} is not an array: {e}", fitting, source) from None
    if array.shape != shape.sizes:
        raise VariableError(f"{what} has shape {array.shape}, the variable {shape}.", fitting, source)
    if why := unfit(array, dtype):
        raise VariableError(f"{what} has {why}, the variable has {dtype}.", conversion(dtype), source)
    return array


def _is_exact(value: float, dtype: str) -> bool:
    """Whether an integer or bool type has a number, which initializers keep as a float."""
    return value.is_integer() and fits(int(value), dtype)
