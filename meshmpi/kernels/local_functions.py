"""local_function: calls the user's function, and in debug mode compares it with what it is declared to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshmpi.errors import ProgramError
from meshmpi.ir.kinds.functions import ArrayType, Function, LocalFunction
from meshmpi.ir.scalar import FLOATS
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime
from meshmpi.kernels.steps import Bound
from meshmpi.kernels.views import numpy_dtype

SLOPE_STEPS = (1e-3, 1e-2)
"""Steps of the central differences, relative to the largest element: one suits float32, one its noise."""
SLOPE_ERROR = 0.03
"""Largest relative difference from both of them that is put down to curvature and rounding.  Status: assumption; a
forgotten factor or term is larger."""


def plan_local_function(call: Call) -> Plan:
    """Inputs and outputs in any order of dims; the function sees them as it was declared."""
    attrs = call.of(LocalFunction)
    function, sizes = attrs.function, dict[str, int]()
    for x in (*call.inputs, *call.outputs):
        sizes.update(x.extents())
    empty = any(sizes[n] == 0 for n in attrs.batch_dims)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        ins = [_ordered(a, x.names, h) for a, x, h in zip(inputs, call.inputs, function.takes, strict=True)]
        outs = [_ordered(a, y.names, h) for a, y, h in zip(outputs, call.outputs, function.makes, strict=True)]

        def run() -> None:
            if empty:  # this rank has no part: results with the dim are empty, others are sums of nothing
                for out in outs:
                    out.fill(0)
                return
            given = [_given(a, h) for a, h in zip(ins, function.takes, strict=True)]
            try:
                made = called(function, given, sizes)
                if attrs.checked:
                    _check_parts(attrs, given, made, sizes)
                    _check_gradient(function, given, made, sizes)
            except Complaint as e:
                raise ProgramError(f"local function {function}: {e}", e.remedy, str(call.instruction.source)) from (
                    e.__cause__
                )
            for out, y in zip(outs, made, strict=True):
                np.copyto(out, y, casting="unsafe")

        return run

    return Plan(bind)


class Complaint(Exception):
    """What is wrong with a function; the kernel adds its name and line."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem)
        self.remedy = remedy


def _ordered(array: np.ndarray, names: Sequence[str], held: ArrayType) -> np.ndarray:
    """A view with the dims in the order of the declaration."""
    return array.transpose([names.index(n) for n in held.names])


def _given(array: np.ndarray, held: ArrayType) -> np.ndarray:
    """What the function gets: contiguous, of the declared type, and not to be written."""
    given = np.ascontiguousarray(array, numpy_dtype(held.dtype)).reshape(array.shape).view()
    given.flags.writeable = False
    return given


def called(function: Function, given: Arrays, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """What the function makes of arrays, checked against its declaration."""
    try:
        returned: Any = function.call(*given)
    except Exception as error:
        raise Complaint(
            f"it raised {type(error).__name__}: {error}.",
            f"It was called with {', '.join(map(_shown, given)) or 'nothing'}.",
        ) from error
    single = len(function.makes) == 1 and not isinstance(returned, (list, tuple))
    found = [returned] if single else list(returned) if isinstance(returned, (list, tuple)) else None
    if found is None or len(found) != len(function.makes):
        what = f"{len(found)} results" if found is not None else f"a {type(returned).__name__}"
        raise Complaint(f"it returned {what}, {len(function.makes)} are declared.", "Return one array for each.")
    return [_result(function, k, value, sizes) for k, value in enumerate(found)]


def _result(function: Function, k: int, value: Any, sizes: Mapping[str, int]) -> np.ndarray:
    """Result number ``k`` as an array of the declared type; `Complaint` where it has another shape or kind of type."""
    names, dtype = function.makes[k]
    shape, wanted = tuple(sizes[n] for n in names), numpy_dtype(dtype)
    if value is None:
        if function.derivative_of is not None:
            return np.zeros(shape, wanted)
        raise Complaint(f"result {k} is None.", "Return an array; a function without return returns None.")
    array = np.asarray(value)
    named = "[" + ", ".join(f"{n}={sizes[n]}" for n in names) + "]"
    if array.shape != shape:
        raise Complaint(
            f"result {k} has the shape {array.shape}, declared is {dtype}{named} on this rank.",
            "Return that shape: a rank hands over its part of each batch dim.",
        )
    fits = np.can_cast(array.dtype, wanted, "same_kind") if dtype != "bfloat16" else array.dtype != object
    if not fits:
        raise Complaint(
            f"result {k} is {array.dtype}, declared is {dtype}{named}.",
            f"Return it with .astype('{dtype}'), or declare the type that it has.",
        )
    return array.astype(wanted, copy=False)


def _shown(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"


# -- debug mode --------------------------------------------------------------------------------------


def _check_parts(attrs: LocalFunction, given: Arrays, made: Arrays, sizes: Mapping[str, int]) -> None:
    """Along each batch dim the results of two parts together are those of the whole."""
    function = attrs.function
    for dim in attrs.batch_dims:
        middle = sizes[dim] // 2
        if not middle:
            continue
        parts = []
        for start, stop in ((0, middle), (middle, sizes[dim])):
            cuts = [_cut(a, h, dim, start, stop) for a, h in zip(given, function.takes, strict=True)]
            parts.append(called(function, cuts, {**sizes, dim: stop - start}))
        for k, (held, whole) in enumerate(zip(function.makes, made, strict=True)):
            one, two = parts[0][k], parts[1][k]
            joined = np.concatenate([one, two], held.names.index(dim)) if dim in held.names else one + two
            if not _close(joined, whole, held.dtype):
                how = "side by side" if dim in held.names else "added up"
                raise Complaint(
                    f"result {k} of the two halves of batch dim '{dim}', {how}, differs from that of the whole by up"
                    f" to {_distance(joined, whole):.3g}.",
                    f"Leave '{dim}' out of batch_dims, so that every rank gets it whole; or return, where the result"
                    " lacks it, a sum over it.",
                )


def _cut(array: np.ndarray, held: ArrayType, dim: str, start: int, stop: int) -> np.ndarray:
    if dim not in held.names:
        return array
    return _given(np.take(array, range(start, stop), held.names.index(dim)), held)


def _check_gradient(function: Function, given: Arrays, made: Arrays, sizes: Mapping[str, int]) -> None:
    """Where this is the gradient of a function: each gradient, along a random direction, is its slope."""
    of = function.derivative_of
    if of is None:
        return
    xs, dys = list(given[: len(of.takes)]), given[len(of.takes) + len(of.makes) :]
    floats = [k for k, held in enumerate(of.takes) if held.dtype in FLOATS]
    for k, dx in zip(floats, made, strict=True):
        direction = np.random.default_rng(k).choice([-1.0, 1.0], xs[k].shape)
        claimed = float(np.sum(dx.astype(np.float64) * direction))
        size = float(np.abs(dx.astype(np.float64)).sum())
        slopes = [_slope(of, xs, dys, k, h * direction, sizes) for h in SLOPE_STEPS]
        if not np.isfinite([claimed, *slopes]).all():
            continue
        scale = max(size / np.sqrt(max(dx.size, 1)), *map(abs, slopes))
        if min(abs(claimed - slope) for slope in slopes) > SLOPE_ERROR * scale:
            raise Complaint(
                f"the gradient by input {k} along a random direction is {claimed:.6g}, central differences of"
                f" {of} give {slopes[0]:.6g}.",
                f"Correct gradient=, or return None for an input whose gradient is 0; input {k} is {_shown(xs[k])}.",
            )


def _slope(of: Function, xs: Arrays, dys: Arrays, k: int, move: np.ndarray, sizes: Mapping[str, int]) -> float:
    """d/dh of sum(dy * y) with input ``k`` at x + h * move, times the length of an element of ``move``."""
    wide = xs[k].astype(np.float64)
    unit = float(np.abs(wide).max(initial=0.0)) or 1.0
    there = [_given(wide + sign * unit * move, of.takes[k]) for sign in (1, -1)]
    totals = [
        sum(
            float(np.sum(dy.astype(np.float64) * y))
            for dy, y in zip(dys, called(of, [*xs[:k], x, *xs[k + 1 :]], sizes), strict=True)
        )
        for x in there
    ]
    length = np.abs(there[0].astype(np.float64) - there[1].astype(np.float64)).mean() if wide.size else 1.0
    return (totals[0] - totals[1]) / float(length)


def _close(a: np.ndarray, b: np.ndarray, dtype: str) -> bool:
    """Equal up to the square root of the roundoff, of the largest element; whole numbers exactly."""
    if dtype not in FLOATS:
        return bool(np.array_equal(a, b))
    tolerance = 0.06 if dtype == "bfloat16" else float(np.sqrt(np.finfo(numpy_dtype(dtype)).eps))
    wide = b.astype(np.float64)
    largest = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
    return bool(np.allclose(a.astype(np.float64), wide, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))
