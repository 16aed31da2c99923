"""Elementwise operations: one primitive, and one table row per function: meaning, data types, derivative.

The expression of a function is its row in `meshmpi.ir.scalar`. A Python number takes the data type of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Union

from meshmpi.dims import Shape, ShapeLike
from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, call_of, check_dtype
from meshmpi.graph.arguments import named
from meshmpi.graph.ops.sources import zeros_like
from meshmpi.ir import kinds as ir
from meshmpi.ir.scalar import FLOATS, SCALAR_FUNCTIONS, DType, Expr, Step, fits

Number = Union[int, float, bool]
TensorLike = Union[Tensor, Number]


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The longest shape if it holds the dims of the others in order, else dims in order met."""
    longest = max(shapes, key=len, default=Shape())
    if all([d for d in longest if d in s] == [*s] for s in shapes):
        return longest
    return Shape(list(dict.fromkeys(d for s in shapes for d in s)))


class Elementwise(Operation):
    """y = f(x1, x2, ...) at every point; f is a row of scalar.SCALAR_FUNCTIONS.

    Shapes: dims of the inputs are united by name; ``output_shape`` may order them or add more.
    Lowers: one local `map`; communicates nothing.
    """

    follows = True

    def __init__(
        self,
        function: str,
        args: Sequence[TensorLike],
        *,
        dtype: str | None = None,
        output_shape: ShapeLike | None = None,
        name: str | None = None,
    ):
        self.function = function
        self.args = tuple(args)
        self.cast_to = dtype
        self.output_shape = None if output_shape is None else Shape(output_shape)
        super().__init__([a for a in args if isinstance(a, Tensor)], name or function)

    def infer(self) -> Sequence[tuple[Shape, str]]:
        shapes = [x.shape for x in self.inputs]
        self.sizes(shapes)
        shape = broadcast_shape(shapes)
        if self.output_shape is not None:
            for d in shape:
                if d not in self.output_shape:
                    raise self.fail(
                        f"output shape {self.output_shape} lacks {d} of the inputs.",
                        "Name every dimension of the inputs, or reduce it first.",
                    )
            shape = self.output_shape
        return [(shape, self._result_dtype())]

    def _result_dtype(self) -> str:
        result = SCALAR_FUNCTIONS[self.function].result
        operands = self.inputs[1:] if self.function == "where" else self.inputs
        dtype = self.one_dtype(operands)
        self._check_dtype(dtype)
        if result == "cast":
            return check_dtype(self.cast_to, "cast")
        return "bool" if result == "bool" else dtype

    def _check_dtype(self, dtype: str) -> None:
        takes = _TAKES.get(self.function)
        if takes == "float" and dtype not in FLOATS:
            raise self.fail(f"the input has data type {dtype}.", "Convert it with mm.cast(x, 'float32').")
        if takes == "bool" and dtype != "bool":
            raise self.fail(f"the input has data type {dtype}.", "Compare it first, as in x > 0.")
        if takes == "number" and dtype == "bool":
            raise self.fail("the input is bool.", "Convert it with mm.cast(x, 'int32'), or use mm.where().")
        for a in self.args:
            if not isinstance(a, Tensor) and not fits(a, dtype):
                raise self.fail(
                    f"the number {a} does not fit data type {dtype}.",
                    "Convert the tensor, as in mm.cast(x, 'float32')."
                    if isinstance(a, float)
                    else f"Give a number of data type {dtype}.",
                )

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (dy,) = dys
        if self.function not in _DERIVATIVES:
            return [None] * len(self.inputs)
        partials = _DERIVATIVES[self.function](dy, self.output, *self.args)
        return [dx for a, dx in zip(self.args, partials, strict=True) if isinstance(a, Tensor)]

    def lower(self, lowering: Any) -> None:
        number = iter(range(len(self.inputs)))
        args = tuple(f"i{next(number)}" if isinstance(a, Tensor) else a for a in self.args)
        expr = Expr((Step(self.function, args, self.output.dtype),), ("t0",))
        out = lowering.type_of(self.output)
        splits = dict(zip(out.shape.names, out.splits, strict=True))
        inputs = [lowering.fit(x, splits) for x in self.inputs]
        lowering.define(self.output, lowering.emit(ir.Map(expr), inputs, out))


def _apply(function: str, *args: TensorLike, **options: Any) -> Tensor:
    if not any(isinstance(a, Tensor) for a in args):
        raise ShapeError(
            f"{function}: none of {args} is a tensor.", "Use mm.constant() or Python's math.", call_of(function)
        )
    return Elementwise(function, args, **options).output


Derivative = Callable[..., Sequence[Tensor | None]]
"""(dy, y, *args) -> dx per argument, not yet summed over broadcast dims."""
_DERIVATIVES: dict[str, Derivative] = {}
"""Function -> derivative; the others have none."""
_TAKES = {"power": "number"}
"""Function -> "float", "bool", "number" (no bool) or "" (all): the data types that it takes."""


def _binary(function: str, doc: str, takes: str = "", derivative: Derivative | None = None):
    """A function of two tensors or numbers, whose dims are united by name."""
    _TAKES[function] = takes
    if derivative is not None:
        _DERIVATIVES[function] = derivative

    def apply(x1: TensorLike, x2: TensorLike, output_shape: ShapeLike | None = None) -> Tensor:
        return _apply(function, x1, x2, output_shape=output_shape)

    return named(apply, function, doc)


def _unary(function: str, doc: str, takes: str = "", derivative: Callable[..., Tensor] | None = None):
    """A function of one tensor."""
    _TAKES[function] = takes
    if derivative is not None:
        _DERIVATIVES[function] = lambda dy, y, x: (derivative(dy, y, x),)

    def apply(x: Tensor) -> Tensor:
        return _apply(function, x)

    return named(apply, function, doc)


def _half_on_ties(wins: Callable[[TensorLike, TensorLike], Tensor]) -> Derivative:
    def derivative(dy: Tensor, y: Tensor, a: TensorLike, b: TensorLike) -> tuple[Tensor, Tensor]:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            # Against a number a tie counts as a loss, so that relu has gradient 0 at 0.  The result
            # tells who won, so that the input need not be kept for the backward pass.
            number = b if isinstance(a, Tensor) else a
            dx = where(wins(y, number), dy, 0.0)
            return dx, dx
        weight = where(equal(a, b), 0.5 * dy, 0.0)
        return (
            where(wins(a, b), dy, weight, output_shape=dy.shape),
            where(wins(b, a), dy, weight, output_shape=dy.shape),
        )

    return derivative


def _no_slope(dy: Tensor, y: Tensor, *args: TensorLike) -> Sequence[Tensor | None]:
    return [zeros_like(x) if isinstance(x, Tensor) else None for x in args]


add = _binary("add", "x1 + x2, dims united by name.", "number", lambda dy, y, a, b: (dy, dy))
subtract = sub = _binary(
    "subtract", "x1 - x2.", "number", lambda dy, y, a, b: (dy, -dy if isinstance(b, Tensor) else None)
)
multiply = _binary(
    "multiply",
    "x1 * x2 at every point (`einsum` multiplies and sums).",
    "number",
    lambda dy, y, a, b: (dy * b if isinstance(a, Tensor) else None, dy * a if isinstance(b, Tensor) else None),
)
divide = _binary(
    "divide",
    "x1 / x2 for floating-point types.",
    "float",
    lambda dy, y, a, b: (dy / b if isinstance(a, Tensor) else None, -(dy * y / b) if isinstance(b, Tensor) else None),
)
floordiv = _binary("floordiv", "Largest integer <= x1 / x2, as Python's //; the gradient is 0.", "number", _no_slope)
mod = _binary(
    "mod",
    """x1 - x2 * floor(x1 / x2), as Python's %: the sign is that of x2.

    Gradient: dy, and -floor(x1 / x2) dy, as between the jumps.
    """,
    "number",
    lambda dy, y, a, b: (dy, -(dy * floordiv(a, b)) if isinstance(b, Tensor) else None),
)
less = _binary("less", "x1 < x2 as bool.")
less_equal = _binary("less_equal", "x1 <= x2 as bool.")
greater = _binary("greater", "x1 > x2 as bool.")
greater_equal = _binary("greater_equal", "x1 >= x2 as bool.")
equal = _binary("equal", "x1 == x2 as bool.")
not_equal = _binary("not_equal", "x1 != x2 as bool.")
_TIES = "a NaN wins.  Tied tensors take half of the gradient each; a tie with a number gives 0."
minimum = _binary("minimum", f"The smaller; {_TIES}", derivative=_half_on_ties(less))
maximum = _binary("maximum", f"The larger; {_TIES}", derivative=_half_on_ties(greater))
logical_and = _binary("logical_and", "Both, as bool.", "bool")
logical_or = _binary("logical_or", "Either, as bool.", "bool")
logical_not = _unary("logical_not", "Not, as bool.", "bool")
negative = _unary("negative", "-x.", "number", lambda dy, y, x: -dy)
abs = _unary("abs", "Absolute value; gradient 0 at 0.", "number", lambda dy, y, x: dy * sign(x))
sign = _unary("sign", "-1, 0 or 1; the gradient is 0.", "number", lambda dy, y, x: zeros_like(x))
square = _unary("square", "x * x.", "number", lambda dy, y, x: dy * (2.0 * x))
sqrt = _unary("sqrt", "Square root.", "float", lambda dy, y, x: 0.5 * dy / y)
rsqrt = _unary("rsqrt", "1 / sqrt(x).", "float", lambda dy, y, x: dy * (-0.5 * (y / x)))
reciprocal = _unary("reciprocal", "1 / x.", "float", lambda dy, y, x: -(dy * square(y)))
exp = _unary("exp", "e ** x.", "float", lambda dy, y, x: dy * y)
log = _unary("log", "Natural logarithm.", "float", lambda dy, y, x: dy / x)
log1p = _unary("log1p", "log(1 + x), exact near 0.", "float", lambda dy, y, x: dy / (1.0 + x))
sin = _unary("sin", "Sine; x in radians.", "float", lambda dy, y, x: dy * cos(x))
cos = _unary("cos", "Cosine; x in radians.", "float", lambda dy, y, x: -(dy * sin(x)))
tanh = _unary("tanh", "Hyperbolic tangent.", "float", lambda dy, y, x: dy * (1.0 - square(y)))
sigmoid = _unary("sigmoid", "1 / (1 + e ** -x).", "float", lambda dy, y, x: dy * (y * (1.0 - y)))
erf = _unary("erf", "Error function.", "float", lambda dy, y, x: dy * (2 / math.sqrt(math.pi) * exp(-square(x))))
floor = _unary("floor", "Largest whole number <= x; the gradient is 0.", "float", lambda dy, y, x: zeros_like(x))
isfinite = _unary("isfinite", "Neither NaN nor infinite, as bool.", "float")
identity = _unary("identity", "x.", derivative=lambda dy, y, x: dy)


def pow(x: TensorLike, y: TensorLike, output_shape: ShapeLike | None = None) -> Tensor:
    """x ** y, right for negative x with whole y (the reference gives NaN).

    Gradient: that by x is 0 where y is 0, also at x = 0; that by y is 0 where x <= 0, since the
    function of y is not defined around whole y there.
    """
    return _apply("power", x, y, output_shape=output_shape)


def where(
    condition: Tensor, if_true: TensorLike, if_false: TensorLike, output_shape: ShapeLike | None = None
) -> Tensor:
    """``if_true`` where condition holds, else ``if_false``; the other side's NaN does not leak."""
    if condition.dtype != "bool":
        raise ShapeError(
            f"where: the condition {condition!r} is not bool.", "Compare it, as in x > 0.", call_of("where", condition)
        )
    return _apply("where", condition, if_true, if_false, output_shape=output_shape)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """x in another data type; between floating-point types the gradient is cast back."""
    return x if x.dtype == dtype else _apply("cast", x, dtype=dtype)


def to_float(x: Tensor) -> Tensor:
    """x as float32."""
    return cast(x, "float32")


def to_bfloat16(x: Tensor) -> Tensor:
    """x as bfloat16, rounded to even."""
    return cast(x, "bfloat16")


def to_int32(x: Tensor) -> Tensor:
    """x as int32, rounded towards 0."""
    return cast(x, "int32")


def broadcast(x: Tensor, new_shape: ShapeLike) -> Tensor:
    """x repeated along the dims of ``new_shape`` that it lacks."""
    return _apply("identity", x, output_shape=new_shape, name="broadcast")


def add_n(xs: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors."""
    if not xs:
        raise ShapeError("add_n: there are no tensors.", "Give at least one.")
    total = xs[0]
    for x in xs[1:]:
        total = add(total, x)
    return total


def _power_grads(dy: Tensor, y: Tensor, a: TensorLike, b: TensorLike) -> tuple[Tensor | None, Tensor | None]:
    da = db = None
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            # Where b is 0, b * a ** (b - 1) is 0 and not 0 * inf.
            da = dy * (b * pow(a, where(not_equal(b, 0.0), b - 1.0, 0.0)))
        else:
            da = dy * (b * pow(a, b - 1)) if b else zeros_like(a)
    if isinstance(b, Tensor):
        db = dy * (y * _log_of_positive(a))
    return da, db


def _log_of_positive(a: TensorLike) -> TensorLike:
    """log a where a > 0, else 0; no infinity arises in between."""
    if isinstance(a, Tensor):
        return log(where(greater(a, 0.0), a, 1.0))
    return math.log(a) if a > 0 else 0.0


def _where_grads(dy: Tensor, y: Tensor, c: Tensor, a: TensorLike, b: TensorLike) -> tuple[None, Tensor, Tensor]:
    shape = dy.shape
    return None, where(c, dy, 0.0, output_shape=shape), where(c, 0.0, dy, output_shape=shape)


_DERIVATIVES.update(
    power=_power_grads, where=_where_grads, cast=lambda dy, y, x: (cast(dy, x.dtype) if x.dtype in FLOATS else None,)
)
