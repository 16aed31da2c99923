"""How far a tensor may be from its exact value by rounding alone: running error analysis.

Every value x of the one-rank program has an array d of the same shape with |computed - exact| <= d
to first order, for every layout and after all passes.  Each instruction computes the d of its results
from those of its inputs:

- A sum of n terms, in any order and grouping: |error| <= (n - 1) u sum |terms| + O(u^2), with u the
  unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2;
  products add one rounding each, section 3.1).  `SPARE` roundings more are granted: the product,
  partial sums rounded to the stored type before they are added up over ranks, a factor that passes
  moved across the sum, the result.
- The errors of what is summed go through the same sum: of products, |a| d_b + d_a |b|.
- An elementwise function: `ULPS` roundings of its result, and per argument the larger of
  |f(x + d) - f(x)| and |f(x - d) - f(x)|.  To first order this is |f'| d, and where rounding may
  decide otherwise (x > 0, floor, a maximum) it is the whole step, so that no decision that lies
  within rounding is reported as a mistake.
- What only moves elements moves their errors.

Products of errors are neglected: "first order".  No number here is fitted to a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshmpi.checking.evaluate import evaluate_as
from meshmpi.dims import Dimension, Shape
from meshmpi.ir.kinds import BlockSum, Cumsum, Map, Pad, Put, Random, Reduce, Shift, TopK
from meshmpi.ir.program import Instruction, Program

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126}
"""Normal numbers; what lies below may be flushed to 0."""
SPARE = 6
"""Roundings granted to a sum in addition to those of its additions; see above."""
ULPS = 8
"""Unit roundoffs of one elementwise function: 4 units in the last place.  Assumption, about the
worst that NumPy and C libraries document for the transcendental functions used here."""


class Bounds:
    """Errors of all values of a one-rank program, kept while it runs.

    Args:
        program: The one that runs.
        precision: Value -> the float type in which layouts compute it, which may be narrower than
            that of the program.
    """

    def __init__(self, program: Program, precision: Mapping[int, str]):
        self.program, self.precision = program, precision
        self.errors: dict[int, np.ndarray | None] = {}

    def observe(self, i: Instruction, inputs: Sequence, results: Sequence) -> None:
        """Adds the errors of the results of one instruction."""
        if not i.outputs:
            return
        errors = [self.errors[v] for v in i.inputs]
        with np.errstate(all="ignore"):
            made = _RULES.get(i.kind, _moved)(self, i, inputs, results, errors)
        for v, e in zip(i.outputs, made, strict=True):
            self.errors[v] = None if e is None else np.where(np.isnan(e), np.inf, e)

    def roundoff(self, v: int) -> float:
        """Unit roundoff of the type in which value ``v`` is stored; 0 for whole numbers."""
        return ROUNDOFF.get(self.precision[v], 0.0)

    def sums(self, v: int) -> float:
        """Unit roundoff of the type in which the sums that make ``v`` are formed."""
        dtype = self.precision[v]
        return ROUNDOFF["float32"] if dtype == "bfloat16" else ROUNDOFF.get(dtype, 0.0)

    def tiny(self, v: int) -> float:
        """The smallest normal number of the type of ``v``."""
        return SMALLEST.get(self.precision[v], 0.0)

    def again(self, i: Instruction, arrays: Sequence[np.ndarray], keep: Sequence[int] = ()):
        """The instruction on float64 arrays; inputs at the positions ``keep`` have own types."""
        kept = [i.inputs[k] for k in keep]
        values = [v for v in (*i.inputs, *i.outputs) if v not in kept]
        return evaluate_as(i, self.program, arrays, dict.fromkeys(values, "float64"))

    def of_sum(
        self, i: Instruction, terms: int, magnitude: np.ndarray, carried: np.ndarray | None
    ) -> list[np.ndarray | None]:
        """Errors of a sum of ``terms`` terms whose absolute values add up to ``magnitude``.

        ``carried`` is the sum of the errors of the terms.
        """
        (y,) = i.outputs
        unit = max(terms - 1, 0) * self.sums(y) + SPARE * self.roundoff(y)
        if unit == 0.0 and carried is None:
            return [None]
        own = unit * magnitude + terms * self.tiny(y)
        return [own if carried is None else own + carried]


def _wide(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float64))


def _dense(e: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    return np.zeros(like.shape) if e is None else e


def added(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """The sum of two errors; None is 0."""
    return b if a is None else a if b is None else a + b


Rule = Callable[[Bounds, Instruction, Sequence, Sequence, Sequence], list]


def _exact(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """Fed, stored and counted numbers are the same everywhere."""
    return [None for _ in ys]


def _random(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """Drawn from the same bits everywhere; C and NumPy may round normal numbers differently."""
    if i.of(Random).distribution == "uniform":
        return [None]
    return [ULPS * b.roundoff(i.outputs[0]) * _wide(ys[0])]


def _moved(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """transpose, view, slice, concat, pad, put, ...: errors lie where the elements lie."""
    if all(e is None for e in es):
        return [None for _ in ys]
    if isinstance(i.attrs, (Pad, Shift)):
        i = i.replaced(value=0.0)
    keep = [2] if isinstance(i.attrs, Put) else []
    if any(es[k] is not None and es[k].any() for k in keep):  # it is not known which rows
        return [np.full(ys[0].shape, np.inf)]
    arrays = [x if k in keep else _dense(e, x) for k, (e, x) in enumerate(zip(es, xs, strict=True))]
    return b.again(i, arrays, keep)


def _map(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    rounds = any(s.function not in _EXACT for s in i.of(Map).expr.steps)
    outs: list[np.ndarray | None] = [
        ULPS * b.roundoff(v) * _wide(y) + b.tiny(v) if rounds and b.roundoff(v) else None
        for v, y in zip(i.outputs, ys, strict=True)
    ]
    for k, e in enumerate(es):
        if e is not None and e.any():
            varied = [(i, [*xs[:k], x, *xs[k + 1 :]]) for x in _both_ways(xs[k], e)]
            outs = _with_largest_change(b, outs, varied, ys)
    if numbers := _varied_numbers(i, max(b.roundoff(v) for v in i.outputs)):
        outs = _with_largest_change(b, outs, [(one, list(xs)) for one in numbers], ys)
    return outs


_EXACT = (
    "identity",
    "negative",
    "abs",
    "sign",
    "minimum",
    "maximum",
    "where",
    "floor",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "equal",
    "not_equal",
    "logical_and",
    "logical_or",
    "logical_not",
    "isfinite",
)
"""Scalar functions whose result needs no rounding."""


def _with_largest_change(
    b: Bounds, outs: Sequence, varied: Sequence[tuple[Instruction, list]], ys: Sequence
) -> list[np.ndarray | None]:
    """Adds to each error the largest change of the result among the varied computations."""
    changes = [evaluate_as(i, b.program, xs, {}) for i, xs in varied]
    made = []
    for n, (out, y) in enumerate(zip(outs, ys, strict=True)):
        largest = np.maximum.reduce([distance(c[n], y) for c in changes])
        made.append(added(out, largest if largest.any() else None))
    return made


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| in float64; 0 for two NaN or equal infinities, infinite where only one is NaN or infinite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0.0, np.abs(a - b))
    return np.where(np.isnan(apart), np.inf, apart)


def _both_ways(x: np.ndarray, e: np.ndarray) -> list[np.ndarray]:
    if x.dtype == bool:
        return [np.where(e > 0, ~x, x)]
    if x.dtype.kind in "iu":
        step = np.ceil(np.minimum(e, 2**30)).astype(x.dtype)
        return [x + step, x - step]
    return [x + e.astype(x.dtype), x - e.astype(x.dtype)]


def _varied_numbers(i: Instruction, unit: float) -> list[Instruction]:
    """The same map with the numbers written in it rounded up, and down."""
    steps = i.of(Map).expr.steps
    inexact = [
        a for s in steps for a in s.args if isinstance(a, float) and a != np.float64(np.float32(a)) and np.isfinite(a)
    ]
    if not inexact or not unit:
        return []

    def scaled(factor: float) -> Instruction:
        new = tuple(s._replace(args=tuple(a * factor if a in inexact else a for a in s.args)) for s in steps)
        return i.replaced(expr=i.of(Map).expr._replace(steps=new))

    return [scaled(1 + 4 * unit), scaled(1 - 4 * unit)]


def _reduce(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    (x,), (e,), op = xs, es, i.of(Reduce).op
    terms = x.size // max(ys[0].size, 1)
    if op == "sum":
        (magnitude,) = b.again(i, [_wide(x)])
        return b.of_sum(i, terms, magnitude, None if e is None else b.again(i, [e])[0])
    if op == "prod":
        product = _wide(ys[0])
        own = (terms * b.sums(i.outputs[0]) + SPARE * b.roundoff(i.outputs[0])) * product
        if e is None:
            return [own if own.any() else None]
        (larger,) = b.again(i, [_wide(x) + e])
        return [own + (larger - product)]
    if e is None:  # an extremum is one of the elements
        return [None]
    return b.again(i.replaced(op="max"), [e])


def _products(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    (x, w), (dx, dw) = xs, es
    (terms,) = b.again(i, [np.ones(x.shape), np.ones(w.shape)])
    (magnitude,) = b.again(i, [_wide(x), _wide(w)])
    carried = None
    if dx is not None:
        carried = b.again(i, [dx, _wide(w)])[0]
    if dw is not None:
        carried = added(carried, b.again(i, [_wide(x), dw])[0])
    return b.of_sum(i, int(terms.max(initial=0)), magnitude, carried)


def _cumsum(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    assert isinstance(i.attrs, Cumsum | BlockSum)
    terms = b.program.types[i.inputs[0]].shape.dim(i.attrs.dim).size
    (magnitude,) = b.again(i, [_wide(x) for x in xs])
    if all(e is None for e in es):
        return b.of_sum(i, terms, magnitude, None)
    carried = b.again(i, [_dense(e, x) for e, x in zip(es, xs, strict=True)])[0]
    return b.of_sum(i, terms, magnitude, carried)


def _gather(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    table_error, index_error = es
    out = None if table_error is None else b.again(i, [table_error, xs[1]], keep=[1])[0]
    if index_error is not None and index_error.any():  # which row is taken lies within rounding
        index, y = (b.program.types[v].shape for v in (i.inputs[1], i.outputs[0]))
        unsure = np.where(_aligned(index_error, index, y) > 0, np.inf, 0.0)
        out = added(out, np.broadcast_to(unsure, ys[0].shape).copy())
    return [out]


def _aligned(x: np.ndarray, shape: Shape, target: Shape) -> np.ndarray:
    """x [shape] so that it broadcasts against arrays of ``target``; dims are matched by name."""
    order = [shape.find(n) for n in target.names if shape.find(n) >= 0]
    sizes = [d.size if shape.find(d.name) >= 0 else 1 for d in target]
    return x.transpose(order).reshape(sizes)


def _scatter_add(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    if es[1] is not None and es[1].any():
        return [np.full(ys[0].shape, np.inf)]
    (magnitude,) = b.again(i, [_wide(xs[0]), xs[1]], keep=[1])
    carried = None if es[0] is None else b.again(i, [es[0], xs[1]], keep=[1])[0]
    return b.of_sum(i, xs[1].size, magnitude, carried)


def _top_k(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """The k-th largest moves no further than any element; which it is may change near a tie."""
    if es[0] is None or not es[0].any():
        return [None, None]
    x, y = (b.program.types[v].shape for v in (i.inputs[0], i.outputs[0]))
    attrs = i.of(TopK)
    axis, k = x.position(attrs.dim), y.dim(attrs.k)
    error = np.max(es[0], axis, keepdims=True)
    ordered = np.sort(xs[0].astype(np.float64), axis)
    if not attrs.smallest:
        ordered = np.flip(ordered, axis)
    first = np.take(ordered, range(min(k.size + 1, x[axis].size)), axis)
    gaps = np.abs(np.min(np.abs(np.diff(first, axis=axis)), axis, keepdims=True, initial=np.inf))
    unsure = np.where(gaps <= 2 * error, float(x[axis].size), 0.0)
    kept = Shape([Dimension(k.name, 1) if n == axis else d for n, d in enumerate(x)])
    return [np.broadcast_to(_aligned(a, kept, _with_one(y, k)), y.sizes).copy() for a in (error, unsure)]


def _with_one(shape: Shape, dim: Dimension) -> Shape:
    return Shape([Dimension(d.name, 1) if d == dim else d for d in shape])


_RULES: dict[str, Rule] = {
    "feed": _exact,
    "read": _exact,
    "step": _exact,
    "iota": _exact,
    "random": _random,
    "map": _map,
    "reduce": _reduce,
    "contract": _products,
    "conv": _products,
    "cumsum": _cumsum,
    "block_sum": _cumsum,
    "gather": _gather,
    "scatter_add": _scatter_add,
    "top_k": _top_k,
}
