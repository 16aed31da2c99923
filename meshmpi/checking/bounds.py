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
- A function of the user's: each result as if it were a sum of all that goes in, of the size of the largest result;
  and the largest change of any result when an input is moved by its error, times `UNKNOWN`.

Products of errors are neglected: "first order".  No number here is fitted to a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshmpi.checking.evaluate import evaluate_as
from meshmpi.ir.kinds import Gather, LocalFunction, Lookup, Map, Pad, Product, Put, Random, Reduce, Shift, TopK
from meshmpi.ir.program import Instruction, Kind, Program
from meshmpi.ir.scalar import SCALAR_FUNCTIONS

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126}
"""Normal numbers; what lies below may be flushed to 0."""
SPARE = 6
"""Roundings granted to a sum in addition to those of its additions; see above."""
ULPS = 8
"""Unit roundoffs of one elementwise function: 4 units in the last place.  Assumption, about the
worst that NumPy and C libraries document for the transcendental functions used here."""


UNKNOWN = 4
"""How much more results may change that depend on several errors than on one.  Assumption."""


EXACT = np.zeros(())
"""The error of an exact value, of any shape."""


class Bounds:
    """Errors of all values of a one-rank program, kept while it runs.

    Args:
        program: The one that runs.
        precision: Value -> the float type in which layouts compute it, which may be narrower than
            that of the program.
    """

    def __init__(self, program: Program, precision: Mapping[int, str]):
        self.program, self.precision = program, precision
        self.errors: dict[int, np.ndarray] = {}

    def observe(self, i: Instruction, inputs: Sequence, results: Sequence) -> None:
        """Adds the errors of the results of one instruction."""
        if not i.outputs:
            return
        errors = [self.errors[v] for v in i.inputs]
        with np.errstate(all="ignore"):
            made = RULES.get(type(i.attrs), _linear)(self, i, inputs, results, errors)
        self.errors.update({v: np.where(np.isnan(e), np.inf, e) for v, e in zip(i.outputs, made, strict=True)})

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

    def again(self, i: Instruction, arrays: Sequence[np.ndarray]):
        """The instruction on other arrays, in float64; arrays of integers are indices and stay what they are."""
        indices = [v for v, x in zip(i.inputs, arrays, strict=True) if x.dtype.kind in "iu"]
        values = [v for v in (*i.inputs, *i.outputs) if v not in indices]
        return evaluate_as(i, self.program, arrays, dict.fromkeys(values, "float64"))

    def of_sum(self, y: int, terms: int, magnitude: np.ndarray) -> np.ndarray:
        """Error of a sum of ``terms`` exact terms whose absolute values add up to ``magnitude``."""
        unit = max(terms - 1, 0) * self.sums(y) + SPARE * self.roundoff(y)
        return unit * magnitude + terms * self.tiny(y) if unit else EXACT


def _wide(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float64))


Rule = Callable[[Bounds, Instruction, Sequence, Sequence, Sequence], list]


def _random(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """Drawn from the same bits everywhere; C and NumPy may round normal numbers differently."""
    if i.of(Random).distribution == "uniform":
        return [EXACT]
    return [ULPS * b.roundoff(i.outputs[0]) * _wide(ys[0])]


def _linear(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """Sums, products, and what only moves elements: their errors go the same way; a sum has one of its own."""
    if isinstance(i.attrs, Pad | Shift):
        i = i.replaced(value=0.0)
    index = xs[-1:] if isinstance(i.attrs, Lookup | Put) else []
    values, errors = xs[: len(xs) - len(index)], es[: len(es) - len(index)]

    def computed(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return b.again(i, [*arrays, *index])[0]

    carried, wide = EXACT, [np.broadcast_to(e, x.shape) for e, x in zip(errors, values, strict=True)]
    if isinstance(i.attrs, Product):
        for k, e in enumerate(wide):
            if e.any():
                carried = carried + computed([e if n == k else _wide(x) for n, x in enumerate(values)])
    elif any(e.any() for e in errors):
        carried = computed(wide)
    if index and es[-1].any():
        carried = carried + _of_unsure_rows(b, i, es[-1])
    if i.attrs.work is None and not i.traits.product:
        return [carried]
    terms = int(computed([np.ones(x.shape) for x in values]).max(initial=0))
    return [b.of_sum(i.outputs[0], terms, computed([_wide(x) for x in values])) + carried]


def _of_unsure_rows(b: Bounds, i: Instruction, index_error: np.ndarray) -> np.ndarray:
    """Infinite where it lies within rounding which row is taken, or into which one is put."""
    sizes = b.program.types[i.outputs[0]].shape.sizes
    if not isinstance(i.attrs, Gather):
        return np.full(sizes, np.inf)
    rest = [1] * (len(sizes) - index_error.ndim)
    return np.broadcast_to(np.where(index_error > 0, np.inf, 0.0).reshape(*index_error.shape, *rest), sizes)


def _map(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    rounds = any(s.function not in _EXACT for s in i.of(Map).expr.steps)
    outs = [
        ULPS * b.roundoff(v) * _wide(y) + b.tiny(v) if rounds and b.roundoff(v) else EXACT
        for v, y in zip(i.outputs, ys, strict=True)
    ]
    for k, e in enumerate(es):
        if e.any():
            varied = [(i, [*xs[:k], x, *xs[k + 1 :]]) for x in _both_ways(xs[k], e)]
            outs = _with_largest_change(b, outs, varied, ys)
    if numbers := _varied_numbers(i, max(b.roundoff(v) for v in i.outputs)):
        outs = _with_largest_change(b, outs, [(one, list(xs)) for one in numbers], ys)
    return outs


_EXACT = {"identity", "negative", "abs", "sign", "minimum", "maximum", "where", "floor"} | {
    name for name, row in SCALAR_FUNCTIONS.items() if row.result == "bool"
}
"""Scalar functions whose result needs no rounding."""


def _with_largest_change(b: Bounds, outs: Sequence, varied: Sequence[tuple[Instruction, list]], ys: Sequence) -> list:
    """Adds to each error the largest change of the result among the varied computations."""
    changes = [evaluate_as(i, b.program, xs, {}) for i, xs in varied]
    largest = [np.maximum.reduce([distance(c[n], y) for c in changes]) for n, y in enumerate(ys)]
    return [out + change for out, change in zip(outs, largest, strict=True)]


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
    if op == "sum":
        return _linear(b, i, xs, ys, es)
    if op == "prod":
        product = _wide(ys[0])
        terms = x.size // max(ys[0].size, 1)
        own = (terms * b.sums(i.outputs[0]) + SPARE * b.roundoff(i.outputs[0])) * product
        if not e.any():
            return [own]
        (larger,) = b.again(i, [_wide(x) + e])
        return [own + (larger - product)]
    if not e.any():  # an extremum is one of the elements
        return [EXACT]
    return b.again(i.replaced(op="max"), [e])


def _top_k(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """The k-th largest moves no further than any element; which it is may change near a tie."""
    if not es[0].any():
        return [EXACT, EXACT]
    attrs, x, sizes = i.of(TopK), b.program.types[i.inputs[0]].shape, ys[0].shape
    axis = x.position(attrs.dim)
    error = np.max(es[0], axis, keepdims=True)
    ordered = np.sort(xs[0].astype(np.float64), axis)
    if not attrs.smallest:
        ordered = np.flip(ordered, axis)
    first = np.take(ordered, range(min(sizes[-1] + 1, x[axis].size)), axis)
    gaps = np.abs(np.min(np.abs(np.diff(first, axis=axis)), axis, keepdims=True, initial=np.inf))
    unsure = np.where(gaps <= 2 * error, float(x[axis].size), 0.0)
    return [np.broadcast_to(np.moveaxis(a, axis, -1), sizes) for a in (error, unsure)]


def unknown(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """A function of which nothing is known but its results."""
    terms, errors = sum(x.size for x in xs), []
    varied = [
        evaluate_as(i, b.program, [*xs[:k], x, *xs[k + 1 :]], {})
        for k, e in enumerate(es)
        if e.any()
        for x in _both_ways(xs[k], e)
    ]
    for n, (v, y) in enumerate(zip(i.outputs, ys, strict=True)):
        largest = _wide(y)[np.isfinite(y)].max(initial=0.0)
        changes = [float(distance(one[n], y).max(initial=0.0)) for one in varied]
        error = b.of_sum(v, terms, np.full(y.shape, largest))
        errors.append(error + UNKNOWN * max(changes) if changes else error)
    return errors


def _function(b: Bounds, i: Instruction, xs: Sequence, ys: Sequence, es: Sequence) -> list:
    """Computed in the types that the function was declared with, whatever those of the program are."""
    declared = {v: held.dtype for v, held in zip(i.outputs, i.of(LocalFunction).function.makes, strict=True)}
    narrow = Bounds(b.program, {**b.precision, **declared})
    return unknown(narrow, i, xs, ys, es)


RULES: dict[type[Kind], Rule] = {Map: _map, Random: _random, Reduce: _reduce, TopK: _top_k, LocalFunction: _function}
"""The others are linear in their inputs."""
