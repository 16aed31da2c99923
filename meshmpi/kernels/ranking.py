"""top_k: the largest (or smallest) elements along one dim, ties by lowest index, NaN largest.

Values of up to 32 bits are turned into whole numbers that sort in falling order and packed above
their index, so that all keys differ and NumPy's partition finds the k smallest exactly.  64-bit
values are sorted stably by their number instead.
"""

from __future__ import annotations

import math

import numpy as np

from meshmpi.ir.kinds import TopK
from meshmpi.kernels.binding import Arrays, Bound, Call, Plan, Runtime, Scratch, named_view, nothing, quiet

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
    bits = wide.view(np.int64 if wide.dtype == np.float64 else np.int32).astype(np.int64)
    np.copyto(out, np.where(bits < 0, bits & _MAGNITUDE[wide.dtype.itemsize], ~bits))
    out[np.isnan(wide)] = np.iinfo(np.int64).min if wide.dtype == np.float64 else -(1 << 31)


_MAGNITUDE = {4: (1 << 31) - 1, 8: (1 << 63) - 1}


class TopKPlan(Plan):
    """The dim ``k`` of both outputs replaces ``dim``.

    Indices are global; those of a second input are taken instead of positions.
    """

    def __init__(self, call: Call):
        self.call = call
        x, y = call.inputs[0], call.outputs[0]
        attrs = call.of(TopK)
        self.dim, self.k_dim = attrs.dim, attrs.k
        self.n, self.k = x.extents()[self.dim], y.extents()[self.k_dim]
        if self.k > self.n:
            raise call.fail(f"{self.k} of the {self.n} elements of '{self.dim}' are asked for.")
        self.first, self.smallest = x.start(self.dim), attrs.smallest
        self.rest = [n for n in x.names if n != self.dim]
        self.row_sizes = tuple(x.extents()[n] for n in self.rest)
        count = math.prod(self.row_sizes)
        self.rows = max(1, min(count, PIECE_ELEMENTS // self.n)) if count else 0
        self.packed = x.dtype.itemsize < 8
        scratch = Scratch()
        self.block = scratch.reserve((count, self.n), x.dtype)
        self.keys = scratch.reserve((self.rows, self.n), np.dtype(np.int64))
        self.order = scratch.reserve((count, self.k), np.dtype(np.int64))
        self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        if not outputs[0].size:
            return nothing
        x = named_view(inputs[0], self.call.inputs[0], [*self.rest, self.dim])
        values, index = (
            named_view(a, o, [*self.rest, self.k_dim]) for a, o in zip(outputs, self.call.outputs, strict=True)
        )
        given = inputs[1:] and named_view(inputs[1], self.call.inputs[1], [*self.rest, self.dim])
        block, keys = self.block.array(workspace), self.keys.array(workspace)
        order = self.order.array(workspace)
        every, ranked = block.reshape(x.shape), order.reshape(values.shape)

        def run() -> None:
            np.copyto(every, x)
            for start in range(0, len(block), self.rows):
                rows = block[start : start + self.rows]
                order[start : start + self.rows] = self._order(rows, keys[: len(rows)])
            if len(given):
                np.copyto(index, np.take_along_axis(given, ranked, axis=-1))
            else:
                np.add(ranked, self.first, out=index, casting="unsafe")
            np.copyto(values, np.take_along_axis(every, ranked, axis=-1))

        return quiet(run)

    def _order(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Indices of the k largest of each row, in falling order."""
        falling_keys(rows, keys)
        if self.smallest:
            np.invert(keys, out=keys)
        if not self.packed:
            return np.argsort(keys, axis=1, kind="stable")[:, : self.k]
        np.left_shift(keys, 31, out=keys)
        np.bitwise_or(keys, np.arange(self.n), out=keys)
        if self.k < self.n:
            keys.partition(self.k - 1, axis=1)
        chosen = keys[:, : self.k]
        chosen.sort(axis=1)
        return chosen & ((1 << 31) - 1)
