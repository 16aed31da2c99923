"""Scalar expressions: the one table of elementwise functions and the expressions made of them.

An `Expr` is data and not code, so that the NumPy kernels, the C generator, the cost model, the
verifier and the fusion pass all read the same thing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

Ref = str
"""``"i2"``: third input of the expression; ``"t0"``: result of its first step."""
Arg = Union[Ref, float, int, bool]

FLOATS = ("float64", "float32", "bfloat16")
INTEGERS = ("int64", "int32", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


DType = Any
"""A name of `DTYPES`, or what has one: ``np.float32``, ``np.dtype("float32")``, ``float``."""
_PYTHON_TYPES = {float: "float32", int: "int32", bool: "bool"}


def dtype_name(dtype: DType) -> object:
    """The name that a data type of Python, NumPy or another library has in `DTYPES`.

    Python's own ``float`` and ``int`` are float32 and int32, the defaults here.  What has no such
    name is returned as it is.
    """
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type) and dtype in _PYTHON_TYPES:
        return _PYTHON_TYPES[dtype]
    names = (getattr(dtype, "name", None), getattr(dtype, "__name__", None), str(dtype))
    short = (n.rpartition(".")[2] for n in names if isinstance(n, str))
    return next((n for n in short if n in DTYPES), dtype)


class ScalarFunction(NamedTuple):
    """A row of the table.

    ``result`` is ``"same"`` (as the arguments), ``"bool"`` or ``"cast"`` (the step says);
    ``flops`` is the cost of one evaluation in the cost model (transcendentals count as one, as in
    the usual operation counts); ``c`` is its C99 expression for float arguments.
    """

    arity: int
    result: str
    flops: int
    c: str


SCALAR_FUNCTIONS: dict[str, ScalarFunction] = {
    "add": ScalarFunction(2, "same", 1, "({0} + {1})"),
    "subtract": ScalarFunction(2, "same", 1, "({0} - {1})"),
    "multiply": ScalarFunction(2, "same", 1, "({0} * {1})"),
    "divide": ScalarFunction(2, "same", 1, "({0} / {1})"),
    "floordiv": ScalarFunction(2, "same", 1, "FLOORDIV({0}, {1})"),
    "mod": ScalarFunction(2, "same", 1, "FLOORMOD({0}, {1})"),
    "power": ScalarFunction(2, "same", 1, "POW({0}, {1})"),
    "minimum": ScalarFunction(2, "same", 1, "MINIMUM({0}, {1})"),
    "maximum": ScalarFunction(2, "same", 1, "MAXIMUM({0}, {1})"),
    "negative": ScalarFunction(1, "same", 1, "(-{0})"),
    "abs": ScalarFunction(1, "same", 1, "ABS({0})"),
    "sign": ScalarFunction(1, "same", 1, "SIGN({0})"),
    "square": ScalarFunction(1, "same", 1, "({0} * {0})"),
    "sqrt": ScalarFunction(1, "same", 1, "SQRT({0})"),
    "rsqrt": ScalarFunction(1, "same", 1, "(1 / SQRT({0}))"),
    "reciprocal": ScalarFunction(1, "same", 1, "(1 / {0})"),
    "exp": ScalarFunction(1, "same", 1, "EXP({0})"),
    "log": ScalarFunction(1, "same", 1, "LOG({0})"),
    "log1p": ScalarFunction(1, "same", 1, "LOG1P({0})"),
    "sin": ScalarFunction(1, "same", 1, "SIN({0})"),
    "cos": ScalarFunction(1, "same", 1, "COS({0})"),
    "tanh": ScalarFunction(1, "same", 1, "TANH({0})"),
    "sigmoid": ScalarFunction(1, "same", 1, "(1 / (1 + EXP(-{0})))"),
    "erf": ScalarFunction(1, "same", 1, "ERF({0})"),
    "floor": ScalarFunction(1, "same", 1, "FLOOR({0})"),
    "less": ScalarFunction(2, "bool", 1, "({0} < {1})"),
    "less_equal": ScalarFunction(2, "bool", 1, "({0} <= {1})"),
    "greater": ScalarFunction(2, "bool", 1, "({0} > {1})"),
    "greater_equal": ScalarFunction(2, "bool", 1, "({0} >= {1})"),
    "equal": ScalarFunction(2, "bool", 1, "({0} == {1})"),
    "not_equal": ScalarFunction(2, "bool", 1, "({0} != {1})"),
    "logical_and": ScalarFunction(2, "bool", 1, "({0} && {1})"),
    "logical_or": ScalarFunction(2, "bool", 1, "({0} || {1})"),
    "logical_not": ScalarFunction(1, "bool", 1, "(!{0})"),
    "isfinite": ScalarFunction(1, "bool", 1, "ISFINITE({0})"),
    "where": ScalarFunction(3, "same", 1, "({0} ? {1} : {2})"),
    "cast": ScalarFunction(1, "cast", 0, "(({type})({0}))"),
    "identity": ScalarFunction(1, "same", 0, "({0})"),
}


class Step(NamedTuple):
    """One evaluation: ``function(*args)`` with a result of type ``dtype``.

    Numeric literals among ``args`` are converted to the type of the other arguments.
    """

    function: str
    args: tuple[Arg, ...]
    dtype: str


class Expr(NamedTuple):
    """Steps in order; ``results`` are the references it returns (one per output)."""

    steps: tuple[Step, ...]
    results: tuple[Ref, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations per element."""
        return sum(SCALAR_FUNCTIONS[s.function].flops for s in self.steps)

    def __str__(self) -> str:
        lines = [
            f"t{i} = {s.function}({', '.join(map(str, s.args))})" + (f":{s.dtype}" if s.function == "cast" else "")
            for i, s in enumerate(self.steps)
        ]
        return "{" + "; ".join([*lines, "-> " + ", ".join(self.results)]) + "}"


def fits(value: Union[float, int, bool], dtype: str) -> bool:
    """Whether a number can stand beside values of type ``dtype`` without changing its value.

    Floats take every number, rounded; integers take whole numbers within their range.
    """
    if dtype in FLOATS:
        return True
    if dtype == "bool":
        return not isinstance(value, float) and value in (0, 1)
    bits = 8 * ITEM_BYTES[dtype]
    low, high = (0, 2**bits) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return not isinstance(value, float) and low <= value < high


def call(function: str, n_inputs: int, dtype: str) -> Expr:
    """The expression ``function(i0, i1, ...)``."""
    args = tuple(f"i{k}" for k in range(n_inputs))
    return Expr((Step(function, args, dtype),), ("t0",))


def fill(value: Union[float, int, bool], dtype: str) -> Expr:
    """The expression without inputs whose value is ``value`` everywhere."""
    return Expr((Step("identity", (value,), dtype),), ("t0",))
