"""top_k: the largest (or smallest) elements along one dim, ties by lowest index, NaN largest.

Values of up to 32 bits become whole numbers that sort in falling order, packed above their index, so that
NumPy's partition finds the k smallest exactly.  64-bit values are sorted stably by their number instead.
"""

from __future__ import annotations

import math

import numpy as np

from meshmpi.ir.kinds import TopK
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch, named_view
from meshmpi.kernels.steps import Bound, quiet

PIECE_ELEMENTS = 65536
"""Elements of the rows ranked at a time (one row at least): 0.5 MB of keys."""


def falling_keys(x: np.ndarray, out: np.ndarray) -> None:
    """Writes to the int64 array ``out`` numbers that sort as x falls; equal x, equal numbers.

    -0 equals +0, and all NaN are equal and sort first.
    """
    if x.dtype.kind in "iub":
        np.copyto(out, x, casting="unsafe")
        np.invert(out, out=out)
        return
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32) + 0  # -0 + 0 is +0
    whole = np.iinfo(np.int64 if wide.dtype == np.float64 else np.int32)
    bits = wide.view(whole.dtype).astype(np.int64)
    np.copyto(out, np.where(bits < 0, bits & whole.max, ~bits))
    out[np.isnan(wide)] = whole.min


def ranked(rows: np.ndarray, keys: np.ndarray, k: int, smallest: bool) -> np.ndarray:
    """Indices of the k largest (or smallest) of each row, in order; ``keys`` is overwritten."""
    falling_keys(rows, keys)
    if smallest:
        np.invert(keys, out=keys)
    if rows.dtype.itemsize == 8:
        return np.argsort(keys, axis=1, kind="stable")[:, :k]
    np.left_shift(keys, 31, out=keys)
    np.bitwise_or(keys, np.arange(keys.shape[1]), out=keys)
    if k < keys.shape[1]:
        keys.partition(k - 1, axis=1)
    chosen = keys[:, :k]
    chosen.sort(axis=1)
    return chosen & ((1 << 31) - 1)


def plan_top_k(call: Call) -> Plan:
    """The dim ``k`` of both outputs replaces ``dim``.

    Indices are global; those of a second input are taken instead of positions.
    """
    x, attrs = call.inputs[0], call.of(TopK)
    n, k = x.extents()[attrs.dim], call.outputs[0].extents()[attrs.k]
    if k > n:
        raise call.fail(f"k={k} is more than the {n} elements of '{attrs.dim}'.")
    first, rest = x.start(attrs.dim), [name for name in x.names if name != attrs.dim]
    count = math.prod(x.extents()[name] for name in rest)
    most = max(1, min(count, PIECE_ELEMENTS // n)) if count else 0
    scratch = Scratch()
    own = scratch.reserve((count, n), x.dtype)
    keys_of = scratch.reserve((most, n), np.dtype(np.int64))
    order_of = scratch.reserve((count, k), np.dtype(np.int64))

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        sources = [named_view(a, o, [*rest, attrs.dim]) for a, o in zip(inputs, call.inputs, strict=True)]
        values, index = (named_view(a, o, [*rest, attrs.k]) for a, o in zip(outputs, call.outputs, strict=True))
        block, keys, order = (slot.array(workspace) for slot in (own, keys_of, order_of))
        every, places = block.reshape(sources[0].shape), order.reshape(values.shape)

        def run() -> None:
            np.copyto(every, sources[0])
            for start in range(0, count, most):
                rows = block[start : start + most]
                order[start : start + most] = ranked(rows, keys[: len(rows)], k, attrs.smallest)
            if len(sources) > 1:
                np.copyto(index, np.take_along_axis(sources[1], places, axis=-1))
            else:
                np.add(places, first, out=index, casting="unsafe")
            np.copyto(values, np.take_along_axis(every, places, axis=-1))

        return quiet(run)

    return Plan(bind, scratch.bytes)
