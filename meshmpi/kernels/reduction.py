"""reduce: sum, max, min or prod over named dims.

Sums are formed in two levels where the outermost dim is summed (a chunk of rows at a time), so that
rounding errors grow with the square root of their number at worst, and each chunk stays in the
cache; elsewhere NumPy's own pairwise summation does it.  bfloat16 is accumulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshmpi.kernels.binding import (
    Bound, Call, Operand, Plan, Runtime, Scratch, Slot, accumulator_dtype, collapse, nothing, quiet,
)  # fmt: skip
from meshmpi.scalar import FLOATS

PIECE_ELEMENTS = 131072
"""Of a piece that is widened to float32.  Measured: docs/performance.md."""
LONG_SUM, SMALL_CHUNK = 256, 32768
"""Chunks of a two-level sum have so many rows, or so many elements if that is more."""

UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
_BOOL_UFUNCS = {"max": np.logical_or, "min": np.logical_and, "prod": np.logical_and}


def identity(op: str, dtype: str) -> float | int | bool:
    """What an empty reduction gives."""
    if op in ("sum", "prod"):
        return int(op == "prod")
    if dtype == "bool":
        return op == "min"
    if dtype in FLOATS:
        return -math.inf if op == "max" else math.inf
    info = np.iinfo(dtype)
    return int(info.min if op == "max" else info.max)


class ReducePlan(Plan):
    """Reduces over the dims that the output lacks; the output's dims may be in any order."""

    def __init__(self, call: Call):
        self.call = call
        x, y = call.inputs[0], call.outputs[0]
        self.op = call.attrs["op"]
        if x.type.dtype == "bool" and self.op not in _BOOL_UFUNCS:
            raise call.fail("the values are bool.", "Count with a cast to int32.")
        self.ufunc = _BOOL_UFUNCS[self.op] if x.type.dtype == "bool" else UFUNCS[self.op]
        self.empty = x.elements == 0 or y.elements == 0
        if self.empty:
            return
        out_strides = y.strides()
        in_strides = x.strides()
        sizes, (_, out_steps) = collapse(
            x.sizes, [[in_strides[n] for n in x.names], [out_strides.get(n, 0) for n in x.names]]
        )
        self.sizes, self.out_steps = sizes or (1,), out_steps or (1,)
        self.axes = tuple(k for k, s in enumerate(self.out_steps) if s == 0)
        self.compute = accumulator_dtype(x.dtype)
        self._choose(x, y)

    def _choose(self, x: Operand, y: Operand) -> None:
        """Whether to go through chunks along the first dim, and the slots that takes."""
        scratch = Scratch()
        inner = math.prod(self.sizes[1:])
        self.widen = x.dtype != self.compute
        self.leading = bool(self.axes) and self.axes[0] == 0
        two_level = self.leading and self.op == "sum" and self.out_steps[-1] != 0
        rows = max(LONG_SUM, SMALL_CHUNK // inner) if two_level else PIECE_ELEMENTS // inner
        self.rows = max(1, min(self.sizes[0], rows))
        self.chunks = -(-self.sizes[0] // self.rows)
        self.piece = self.partial = self.total = None
        if self.widen:
            self.piece = scratch.reserve((self.rows, *self.sizes[1:]), self.compute)
        kept = tuple(n for k, n in enumerate(self.sizes) if k not in self.axes)
        if (two_level or (self.widen and self.leading)) and self.chunks > 1:
            self.partial = scratch.reserve((self.chunks, *kept), self.compute)
        if self.widen:
            self.total = scratch.reserve(kept, self.compute)
        self.workspace_bytes = scratch.bytes

    def bind(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray],
        workspace: np.ndarray, runtime: Runtime,
    ) -> Bound:  # fmt: skip
        out = outputs[0]
        if self.empty:
            if not out.size:
                return nothing
            value = np.asarray(identity(self.op, self.call.outputs[0].type.dtype)).astype(out.dtype)
            return lambda: np.copyto(out, value)
        x = inputs[0].reshape(self.sizes)
        kept = [(n, s) for n, s in zip(self.sizes, self.out_steps, strict=True) if s]
        y = np.lib.stride_tricks.as_strided(
            out, [n for n, _ in kept], [s * out.itemsize for _, s in kept]
        )
        if not self.axes:
            return lambda: np.copyto(y, x)
        if self.partial is None and not self.widen:
            return quiet(self._direct(x, y, self.axes))
        return quiet(self._in_chunks(x, y, workspace))

    def _direct(self, x: np.ndarray, y: np.ndarray, axes: tuple[int, ...]) -> Bound:
        reduce, axis, dtype = self.ufunc.reduce, axes if len(axes) > 1 else axes[0], y.dtype

        def run() -> None:
            reduce(x, axis, dtype, y)

        return run

    def _in_chunks(self, x: np.ndarray, y: np.ndarray, workspace: np.ndarray) -> Bound:
        """Chunks of the first dim: each widened if need be and reduced to a partial result."""
        piece, partial, total = (
            slot.array(workspace) if isinstance(slot, Slot) else None
            for slot in (self.piece, self.partial, self.total)
        )
        target = y if total is None else total
        reduce = self.ufunc.reduce
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for k in range(self.chunks):
            source = x[k * self.rows : (k + 1) * self.rows]
            if partial is not None:
                parts.append((source, partial[k]))
            elif self.leading:
                parts.append((source, target))
            else:
                parts.append((source, target[k * self.rows : (k + 1) * self.rows]))

        def run() -> None:
            for source, result in parts:
                if piece is not None:
                    narrow, source = source, piece[: len(source)]
                    np.copyto(source, narrow)
                reduce(source, self.axes, self.compute, result)
            if partial is not None:
                reduce(partial, 0, self.compute, target)
            if total is not None:
                np.copyto(y, total, casting="unsafe")

        return run
