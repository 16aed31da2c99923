"""Elementwise operations: one primitive, and a table row (expression, derivative) per function.

The expression of a function is its row in `meshmpi.ir.scalar`; its derivative is its row in
`_DERIVATIVES` here.  Tensors broadcast by the names of their dimensions; a Python number takes the
data type of the tensors it is combined with.
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
    if all(_is_subsequence(s, longest) for s in shapes):
        return longest
    return Shape(list(dict.fromkeys(d for s in shapes for d in s)))


def _is_subsequence(short: Shape, long: Shape) -> bool:
    rest = iter(long)
    return all(d in rest for d in short)


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
        self._check_sizes(shapes)
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

    def _check_sizes(self, shapes: Sequence[Shape]) -> None:
        sizes: dict[str, int] = {}
        for s in shapes:
            for d in s:
                if sizes.setdefault(d.name, d.size) != d.size:
                    raise self.fail(
                        f"dimension '{d.name}' has size {sizes[d.name]} in one input and {d.size}"
                        f" in another: {' and '.join(map(str, shapes))}.",
                        "Rename one with mm.rename_dimension(), or make the sizes equal.",
                    )

    def _result_dtype(self) -> str:
        result = SCALAR_FUNCTIONS[self.function].result
        operands = self.inputs[1:] if self.function == "where" else self.inputs
        dtypes = list(dict.fromkeys(x.dtype for x in operands))
        if len(dtypes) > 1:
            raise self.fail(
                f"inputs have data types {' and '.join(dtypes)}.", f"Convert one, as in mm.cast(x, '{dtypes[0]}')."
            )
        dtype = dtypes[0] if dtypes else "float32"
        self._check_dtype(dtype)
        if result == "cast":
            return check_dtype(self.cast_to, "cast")
        return "bool" if result == "bool" else dtype

    def _check_dtype(self, dtype: str) -> None:
        if self.function in _FLOAT_ONLY and dtype not in FLOATS:
            raise self.fail(f"the input has data type {dtype}.", "Convert it with mm.cast(x, 'float32').")
        if self.function in _BOOL_ONLY and dtype != "bool":
            raise self.fail(f"the input has data type {dtype}.", "Compare it first, as in x > 0.")
        if self.function in _ARITHMETIC and dtype == "bool":
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


def _binary(function: str, doc: str):
    """A function of two tensors or numbers, whose dims are united by name."""

    def apply(x1: TensorLike, x2: TensorLike, output_shape: ShapeLike | None = None) -> Tensor:
        return _apply(function, x1, x2, output_shape=output_shape)

    return named(apply, function, doc)


def _unary(function: str, doc: str):
    """A function of one tensor."""

    def apply(x: Tensor) -> Tensor:
        return _apply(function, x)

    return named(apply, function, doc)


add = _binary("add", "x1 + x2, dims united by name.")
subtract = sub = _binary("subtract", "x1 - x2.")
multiply = _binary("multiply", "x1 * x2 at every point (`einsum` multiplies and sums).")
divide = _binary("divide", "x1 / x2 for floating-point types.")
floordiv = _binary("floordiv", "Largest integer <= x1 / x2, as Python's //; the gradient is 0.")
mod = _binary(
    "mod",
    """x1 - x2 * floor(x1 / x2), as Python's %: the sign is that of x2.

    Gradient: dy, and -floor(x1 / x2) dy, as between the jumps.
    """,
)
_TIES = "a NaN wins.  Tied tensors take half of the gradient each; a tie with a number gives 0."
minimum = _binary("minimum", f"The smaller; {_TIES}")
maximum = _binary("maximum", f"The larger; {_TIES}")
less = _binary("less", "x1 < x2 as bool.")
less_equal = _binary("less_equal", "x1 <= x2 as bool.")
greater = _binary("greater", "x1 > x2 as bool.")
greater_equal = _binary("greater_equal", "x1 >= x2 as bool.")
equal = _binary("equal", "x1 == x2 as bool.")
not_equal = _binary("not_equal", "x1 != x2 as bool.")
logical_and = _binary("logical_and", "Both, as bool.")
logical_or = _binary("logical_or", "Either, as bool.")
logical_not = _unary("logical_not", "Not, as bool.")
negative = _unary("negative", "-x.")
abs = _unary("abs", "Absolute value; gradient 0 at 0.")
sign = _unary("sign", "-1, 0 or 1; the gradient is 0.")
square = _unary("square", "x * x.")
sqrt = _unary("sqrt", "Square root.")
rsqrt = _unary("rsqrt", "1 / sqrt(x).")
reciprocal = _unary("reciprocal", "1 / x.")
exp = _unary("exp", "e ** x.")
log = _unary("log", "Natural logarithm.")
log1p = _unary("log1p", "log(1 + x), exact near 0.")
sin = _unary("sin", "Sine; x in radians.")
cos = _unary("cos", "Cosine; x in radians.")
tanh = _unary("tanh", "Hyperbolic tangent.")
sigmoid = _unary("sigmoid", "1 / (1 + e ** -x).")
erf = _unary("erf", "Error function.")
floor = _unary("floor", "Largest whole number <= x; the gradient is 0.")
isfinite = _unary("isfinite", "Neither NaN nor infinite, as bool.")
identity = _unary("identity", "x.")


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


def _half_on_ties(wins: Callable[[TensorLike, TensorLike], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def derivative(dy: Tensor, y: Tensor, a: TensorLike, b: TensorLike) -> tuple[Tensor, Tensor]:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            # Against a number a tie counts as a loss, so that relu has gradient 0 at 0.  The result
            # tells who won, so that the input need not be kept for the backward pass.
            number = b if isinstance(a, Tensor) else a
            dx = where(wins(y, number), dy, 0.0)
            return dx, dx
        weight = where(equal(a, b), multiply(0.5, dy), 0.0)
        return (
            where(wins(a, b), dy, weight, output_shape=dy.shape),
            where(wins(b, a), dy, weight, output_shape=dy.shape),
        )

    return derivative


def _power_grads(dy: Tensor, y: Tensor, a: TensorLike, b: TensorLike) -> tuple[Tensor | None, Tensor | None]:
    da = db = None
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            # Where b is 0, b * a ** (b - 1) is 0 and not 0 * inf.
            varies = not_equal(b, 0.0)
            slope = multiply(b, pow(a, where(varies, subtract(b, 1.0), 0.0)))
            da = multiply(dy, slope)
        else:
            da = multiply(dy, multiply(b, pow(a, b - 1))) if b else zeros_like(a)
    if isinstance(b, Tensor):
        db = multiply(dy, multiply(y, _log_of_positive(a)))
    return da, db


def _log_of_positive(a: TensorLike) -> TensorLike:
    """log a where a > 0, else 0; no infinity arises in between."""
    if isinstance(a, Tensor):
        return log(where(greater(a, 0.0), a, 1.0))
    return math.log(a) if a > 0 else 0.0


def _where_grads(dy: Tensor, y: Tensor, c: Tensor, a: TensorLike, b: TensorLike) -> tuple[None, Tensor, Tensor]:
    shape = dy.shape
    return None, where(c, dy, 0.0, output_shape=shape), where(c, 0.0, dy, output_shape=shape)


_TRANSCENDENTAL = ("exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf")
_FLOAT_ONLY = (*_TRANSCENDENTAL, "divide", "sqrt", "rsqrt", "reciprocal", "floor", "isfinite")
_BOOL_ONLY = ("logical_and", "logical_or", "logical_not")
_ARITHMETIC = ("add", "subtract", "multiply", "floordiv", "mod", "power", "negative", "abs", "sign", "square")

# function -> (dy, y, *args) -> dx per argument, not yet summed over broadcast dims.
_DERIVATIVES: dict[str, Callable[..., Sequence[Tensor | None]]] = {
    "add": lambda dy, y, a, b: (dy, dy),
    "subtract": lambda dy, y, a, b: (dy, negative(dy) if isinstance(b, Tensor) else None),
    "multiply": lambda dy, y, a, b: (
        multiply(dy, b) if isinstance(a, Tensor) else None,
        multiply(dy, a) if isinstance(b, Tensor) else None,
    ),
    "divide": lambda dy, y, a, b: (
        divide(dy, b) if isinstance(a, Tensor) else None,
        negative(divide(multiply(dy, y), b)) if isinstance(b, Tensor) else None,
    ),
    "power": _power_grads,
    "floordiv": lambda dy, y, a, b: [zeros_like(x) if isinstance(x, Tensor) else None for x in (a, b)],
    "mod": lambda dy, y, a, b: (dy, negative(multiply(dy, floordiv(a, b))) if isinstance(b, Tensor) else None),
    "sign": lambda dy, y, x: (zeros_like(x),),
    "floor": lambda dy, y, x: (zeros_like(x),),
    "minimum": _half_on_ties(less),
    "maximum": _half_on_ties(greater),
    "where": _where_grads,
    "negative": lambda dy, y, x: (negative(dy),),
    "abs": lambda dy, y, x: (multiply(dy, sign(x)),),
    "square": lambda dy, y, x: (multiply(dy, multiply(2.0, x)),),
    "sqrt": lambda dy, y, x: (divide(multiply(0.5, dy), y),),
    "rsqrt": lambda dy, y, x: (multiply(dy, multiply(-0.5, divide(y, x))),),
    "reciprocal": lambda dy, y, x: (negative(multiply(dy, square(y))),),
    "exp": lambda dy, y, x: (multiply(dy, y),),
    "log": lambda dy, y, x: (divide(dy, x),),
    "log1p": lambda dy, y, x: (divide(dy, add(1.0, x)),),
    "sin": lambda dy, y, x: (multiply(dy, cos(x)),),
    "cos": lambda dy, y, x: (negative(multiply(dy, sin(x))),),
    "tanh": lambda dy, y, x: (multiply(dy, subtract(1.0, square(y))),),
    "sigmoid": lambda dy, y, x: (multiply(dy, multiply(y, subtract(1.0, y))),),
    "erf": lambda dy, y, x: (multiply(dy, multiply(2 / math.sqrt(math.pi), exp(negative(square(x))))),),
    "identity": lambda dy, y, x: (dy,),
    "cast": lambda dy, y, x: (cast(dy, x.dtype) if x.dtype in FLOATS else None,),
}
