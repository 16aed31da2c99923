"""The oracle: a graph's meaning, interpreted one operation at a time in NumPy float64.

It knows the graph and nothing of what the tests compare with it: no lowering, program, layout, mesh
or kernel (but for the numbers of `Random`, which are defined by `meshmpi.kernels.random_block`).
Every floating-point tensor is computed in float64 whatever its type; integers and bools keep
theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmpi.dims import Shape
from meshmpi.graph import Graph, Operation, Tensor
from meshmpi.ir.scalar import FLOATS

Arrays = Mapping[str, np.ndarray]


@dataclass
class Environment:
    """What an operation may look at besides its inputs."""

    feeds: Arrays
    variables: Arrays
    step: int
    seed: int


def evaluate(
    graph: Graph,
    fetches: Sequence[Tensor],
    feeds: Arrays,
    variables: Arrays | None = None,
    step: int = 0,
    seed: int = 0,
) -> list[np.ndarray]:
    """Values of ``fetches``.

    Args:
        graph: Under construction or finished.
        fetches: Tensors of the graph.
        feeds: Placeholder name -> global array.
        variables: Variable name -> global array, as they are when the step begins.
        step: The step's number.
        seed: Of the random operations.
    """
    env = Environment(feeds, variables or {}, step, seed)
    values: dict[Tensor, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for operation in _needed(graph, fetches):
            inputs = [values[x] for x in operation.inputs]
            results = _RULES[type(operation).__name__](operation, inputs, env)
            results = results if isinstance(results, tuple) else (results,)
            for t, value in zip(operation.outputs, results, strict=True):
                values[t] = _checked(t, np.asarray(value))
    return [values[t] for t in fetches]


def directional_derivative(
    graph: Graph,
    y: Tensor,
    name: str,
    direction: np.ndarray,
    feeds: Arrays,
    variables: Arrays | None = None,
    step: int = 0,
    seed: int = 0,
    epsilon: float = 1e-5,
) -> float:
    """d/dh of sum(y) with the feed or variable ``name`` moved by h * direction, central."""

    def total(h: float) -> float:
        moved = [dict(feeds), dict(variables or {})]
        for arrays in moved:
            if name in arrays:
                arrays[name] = np.asarray(arrays[name], np.float64) + h * direction
        return float(np.sum(evaluate(graph, [y], *moved, step, seed)[0]))

    return (total(epsilon) - total(-epsilon)) / (2 * epsilon)


def _needed(graph: Graph, fetches: Sequence[Tensor]) -> list[Operation]:
    wanted = {t.operation for t in fetches}
    out = []
    for operation in reversed(graph.operations):
        if operation in wanted:
            out.append(operation)
            wanted.update(x.operation for x in operation.inputs)
    return out[::-1]


def _checked(t: Tensor, value: np.ndarray) -> np.ndarray:
    wanted = np.dtype("float64" if t.dtype in FLOATS else t.dtype)
    assert value.shape == t.shape.sizes, f"{t}: the oracle made {value.shape}"
    assert value.dtype == wanted, f"{t}: the oracle made {value.dtype}"
    return value


def _as(array: Any, dtype: str) -> np.ndarray:
    return np.array(array).astype("float64" if dtype in FLOATS else dtype)


def aligned(x: np.ndarray, shape: Shape, target: Shape) -> np.ndarray:
    """A view of x [shape] that broadcasts against arrays of ``target``: dims matched by name."""
    order = [shape.find(n) for n in target.names if shape.find(n) >= 0]
    sizes = [d.size if shape.find(d.name) >= 0 else 1 for d in target]
    return x.transpose(order).reshape(sizes)


# -- sources ---------------------------------------------------------------------------------------


def _placeholder(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return _as(env.feeds[op.name], op.dtype)


def _read_variable(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return _as(env.variables[op.variable.name], op.output.dtype)


def _constant(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return _as(np.full(op.shape.sizes, op.value), op.dtype)


def _range(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return np.arange(op.dim.size, dtype=np.int32)


def _step_number(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return np.array(env.step, np.int32)


def _random(op: Any, inputs: list, env: Environment) -> np.ndarray:
    from meshmpi.kernels import random_block

    sizes = op.shape.sizes
    block = tuple((0, n) for n in sizes)
    key = op.key or op.name
    made = random_block(op.distribution, env.seed, key, env.step, sizes, block, op.dtype)
    return np.asarray(made).astype(np.float64).reshape(sizes)


# -- elementwise -----------------------------------------------------------------------------------


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "power": np.power,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "negative": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "floor": np.floor,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "isfinite": np.isfinite,
    "where": np.where,
    "cast": lambda x: x,
    "identity": lambda x: x,
}


def _elementwise(op: Any, inputs: list, env: Environment) -> np.ndarray:
    arrays = iter(aligned(v, x.shape, op.output.shape) for v, x in zip(inputs, op.inputs, strict=True))
    args = [next(arrays) if isinstance(a, Tensor) else a for a in op.args]
    value = FUNCTIONS[op.function](*args)
    return _as(np.broadcast_to(value, op.output.shape.sizes), op.output.dtype)


# -- reductions and contractions -------------------------------------------------------------------

_REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def _reduce(op: Any, inputs: list, env: Environment) -> np.ndarray:
    (x,), (value,) = op.inputs, inputs
    out = op.output.shape
    gone = tuple(i for i, d in enumerate(x.shape) if d not in out)
    kept = Shape([d for d in x.shape if d in out])
    if op.band is not None:
        value = value.copy()
        for at in _pairs(op.band, [x.shape], inside=False):
            value[_taken(x.shape, at)] = {"sum": 0.0, "max": -math.inf, "min": math.inf}[op.op]
    reduced = np.asarray(_REDUCTIONS[op.op](value, axis=gone))
    return _as(aligned(reduced, kept, out), op.output.dtype)


def _einsum(op: Any, inputs: list, env: Environment) -> np.ndarray:
    letters: dict[str, int] = {}
    operands: list[Any] = []
    for x, value in zip(op.inputs, inputs, strict=True):
        operands += [value, [letters.setdefault(n, len(letters)) for n in x.shape.names]]
    out = [letters[n] for n in op.output.shape.names]
    if op.band is None:
        return _as(np.einsum(*operands, out), op.output.dtype)
    total = np.zeros(op.output.shape.sizes, inputs[0].dtype)
    for at in _pairs(op.band, [x.shape for x in op.inputs], inside=True):
        parts = [x[_taken(t.shape, at)] for t, x in zip(op.inputs, inputs, strict=True)]
        product = np.einsum(parts[0], operands[1], parts[1], operands[3], out)
        total[_taken(op.output.shape, at)] += product
    return _as(total, op.output.dtype)


def _pairs(band: Any, shapes: Sequence[Shape], inside: bool) -> list[dict[str, int]]:
    """The pairs of indices inside a band, or those outside."""
    sizes = {d.name: d.size for s in shapes for d in s}
    pairs = itertools.product(range(sizes[band.rows]), range(sizes[band.columns]))
    return [{band.rows: r, band.columns: c} for r, c in pairs if band.holds(r, c) == inside]


def _taken(shape: Shape, at: Mapping[str, int]) -> tuple[slice, ...]:
    """The elements with the indices ``at``, dims kept."""
    return tuple(slice(at[n], at[n] + 1) if n in at else slice(None) for n in shape.names)


def _conv(op: Any, inputs: list, env: Environment) -> np.ndarray:
    """Triple by triple of what meets: an einsum with the sliding dims taken at one index each."""
    letters: dict[str, int] = {}
    ids: list[list[int]] = []
    for role, t in enumerate((*op.inputs, op.output)):
        sliding = {s[role]: f"?{k}" for k, s in enumerate(op.slides)}
        names = [sliding.get(n, n) for n in t.shape.names]
        ids.append([letters.setdefault(n, len(letters)) for n in names])
    sizes = [[t.shape.dim(s[role]).size for role, t in enumerate((*op.inputs, op.output))] for s in op.slides]
    triples = [
        [
            (i, k, o)
            for i in range(n)
            for k in range(taps)
            for o in range(m)
            if s.base * i == s.stride * o + s.dilation * k - s.before
        ]
        for s, (n, taps, m) in zip(op.slides, sizes, strict=True)
    ]
    y = np.zeros(op.output.shape.sizes, np.result_type(*inputs))
    arrays = (*inputs, y)
    for meeting in itertools.product(*triples):
        parts = []
        for role, t in enumerate((*op.inputs, op.output)):
            index: list[Any] = [slice(None)] * len(t.shape)
            for s, at in zip(op.slides, meeting, strict=True):
                index[t.shape.position(s[role])] = slice(at[role], at[role] + 1)
            parts.append(arrays[role][(*index, ...)])
        x, w, part = parts
        part += np.einsum(x, ids[0], w, ids[1], ids[2])
    return _as(y, op.output.dtype)


# -- structure -------------------------------------------------------------------------------------


def _transpose(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return aligned(inputs[0], op.inputs[0].shape, op.output.shape)


def _reshape(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return inputs[0].reshape(op.output.shape.sizes)


def _slice(op: Any, inputs: list, env: Environment) -> np.ndarray:
    index: list[Any] = [slice(None)] * inputs[0].ndim
    index[op.inputs[0].shape.position(op.dim)] = slice(op.start, op.stop, op.stride)
    return inputs[0][tuple(index)]


def _pad(op: Any, inputs: list, env: Environment) -> np.ndarray:
    widths = [(0, 0)] * inputs[0].ndim
    widths[op.inputs[0].shape.position(op.dim)] = (op.before, op.after)
    return np.pad(inputs[0], widths, constant_values=op.value)


def _concat(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return np.concatenate(inputs, axis=op.output.shape.position(op.dim))


def _shift(op: Any, inputs: list, env: Environment) -> np.ndarray:
    axis = op.output.shape.position(op.dim)
    y = np.moveaxis(np.roll(inputs[0], op.offset, axis), axis, 0)
    if not op.wrap:
        y[slice(0, op.offset) if op.offset > 0 else slice(op.offset, None)] = 0
    return np.moveaxis(y, 0, axis)


def _same(op: Any, inputs: list, env: Environment) -> np.ndarray:
    return inputs[0]


def _values(op: Any, inputs: list, env: Environment) -> tuple:
    return tuple(inputs[: len(op.outputs)])


# -- indexing --------------------------------------------------------------------------------------


def _gather(op: Any, inputs: list, env: Environment) -> np.ndarray:
    (table, index), (t, i) = inputs, [x.shape for x in op.inputs]
    batch = [d for d in i if d.name != op.dim and d in t]
    others = Shape([d for d in i if d not in batch])
    rest = t.without([op.dim, *(d.name for d in batch)])
    rows = table.transpose([t.position(n) for n in (*_names(batch), op.dim, *rest.names)])
    index = aligned(index, i, Shape(batch) + others)
    out = np.zeros((*index.shape, *rest.sizes), table.dtype)
    for at in np.ndindex(*index.shape):
        if 0 <= index[at] < t.dim(op.dim).size:
            out[at] = rows[(*at[: len(batch)], index[at])]
    order = [*_names(batch), *(f"{n}'" for n in others.names), *rest.names]
    wanted = [n if n in _names(batch) else f"{n}'" for n in i.names] + list(rest.names)
    return out.transpose([order.index(n) for n in wanted])


def _names(dims: Sequence[Any]) -> list[str]:
    return [d.name for d in dims]


def _scatter_add(op: Any, inputs: list, env: Environment) -> np.ndarray:
    updates, index = inputs
    shape, index_shape = op.inputs[0].shape, op.inputs[1].shape
    batch = [d for d in index_shape if d.name != op.dim.name and d in op.output.shape]
    rest = shape.without(index_shape.names)
    rows = aligned(updates, shape, index_shape + rest)
    summed = np.zeros((*Shape(batch).sizes, op.dim.size, *rest.sizes), updates.dtype)
    for where in np.ndindex(*index.shape):
        if 0 <= index[where] < op.dim.size:
            own = tuple(where[index_shape.position(d.name)] for d in batch)
            summed[(*own, index[where])] += rows[where]
    return aligned(summed, Shape([*batch, op.dim]) + rest, op.output.shape)


def _put(op: Any, inputs: list, env: Environment) -> np.ndarray:
    x, updates, index = inputs
    t, u, i = (x.shape for x in op.inputs)
    batch = Shape([d for d in i if d.name != op.dim and d in t])
    rest = t.without([op.dim, *batch.names])
    rows = aligned(updates, u, i + rest)
    y = aligned(x, t, Shape([*batch, t.dim(op.dim)]) + rest).copy()
    for at in np.ndindex(*index.shape):
        if 0 <= index[at] < t.dim(op.dim).size:
            own = tuple(at[i.position(n)] for n in batch.names)
            y[(*own, index[at])] = rows[at]
    return aligned(y, Shape([*batch, t.dim(op.dim)]) + rest, t)


def _top_k(op: Any, inputs: list, env: Environment) -> tuple[np.ndarray, np.ndarray]:
    x = np.moveaxis(inputs[0], op.inputs[0].shape.position(op.dim), -1)
    key = x.astype(np.float64)
    last = np.isnan(key)  # NaN counts as the largest
    key[last] = 0
    keys = (key, last) if op.smallest else (-key, ~last)
    index = np.lexsort(keys, axis=-1)[..., : op.k_dim.size]
    return np.take_along_axis(x, index, axis=-1), index.astype(np.int32)


def _cumsum(op: Any, inputs: list, env: Environment) -> np.ndarray:
    x, axis = inputs[0], op.output.shape.position(op.dim)
    x = np.flip(x, axis) if op.reverse else x
    sums = np.cumsum(x, axis, dtype=x.dtype) - (x if op.exclusive else 0)
    return (np.flip(sums, axis) if op.reverse else sums).astype(x.dtype)


def _local_function(op: Any, inputs: list, env: Environment) -> tuple[np.ndarray, ...]:
    returned = op.function.call(*inputs)
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


_RULES: dict[str, Callable[[Any, list, Environment], Any]] = {
    "Placeholder": _placeholder,
    "ReadVariable": _read_variable,
    "ReadStored": _read_variable,
    "Constant": _constant,
    "Range": _range,
    "StepNumber": _step_number,
    "Random": _random,
    "Elementwise": _elementwise,
    "Reduce": _reduce,
    "Einsum": _einsum,
    "Conv": _conv,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Slice": _slice,
    "Pad": _pad,
    "Concat": _concat,
    "Shift": _shift,
    "Constrain": _same,
    "AsStored": _same,
    "CustomGradient": _values,
    "Gather": _gather,
    "ScatterAdd": _scatter_add,
    "Put": _put,
    "TopK": _top_k,
    "Cumsum": _cumsum,
    "LocalFunction": _local_function,
}
