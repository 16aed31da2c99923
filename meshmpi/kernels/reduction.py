"""reduce: sum, max, min or prod over named dims.

Sums are formed in two levels where the outermost dim is summed (a chunk of rows at a time), so that
rounding errors grow with the square root of their number at worst, and each chunk stays in the
cache; elsewhere NumPy's own pairwise summation does it.  bfloat16 is accumulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshmpi.ir.kinds import Reduce
from meshmpi.ir.scalar import FLOATS
from meshmpi.kernels.binding import (
    Arrays,
    Bound,
    Call,
    Plan,
    Runtime,
    Scratch,
    Slot,
    accumulator_dtype,
    collapse,
    named_view,
    nothing,
    quiet,
    strided,
)

PIECE_ELEMENTS = 131072
"""Size of a piece that is computed before it is reduced: 0.5 MB of float32 (flat around it)."""
LONG_SUM, SMALL_CHUNK = 256, 32768
"""Rows of a chunk of a two-level sum, or elements if that makes the chunk larger."""

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


class ChunkedReduction:
    """A reduction over some dims of an iteration, in chunks along its first dim.

    Args:
        out_steps: Strides of the output along them, 0 where a dim is reduced.
        prepared: Whether each chunk is computed into a buffer first; see `bind`.
        converted: Whether the output has another type than ``compute``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        out_steps: Sequence[int],
        op: str,
        ufunc: np.ufunc,
        compute: np.dtype,
        prepared: bool,
        converted: bool,
        scratch: Scratch,
    ):
        self.sizes, self.out_steps, self.ufunc, self.compute = sizes, out_steps, ufunc, compute
        self.axes = tuple(k for k, s in enumerate(out_steps) if s == 0)
        self.leading = self.axes[0] == 0
        inner = math.prod(sizes[1:])
        two_level = self.leading and op == "sum" and out_steps[-1] != 0
        rows = max(LONG_SUM, SMALL_CHUNK // inner) if two_level else PIECE_ELEMENTS // inner
        self.rows = max(1, min(sizes[0], rows))
        self.chunks = -(-sizes[0] // self.rows)
        in_pieces = self.chunks > 1 and (two_level or prepared)
        kept = tuple(n for n, s in zip(sizes, out_steps, strict=True) if s)
        self.piece = scratch.reserve((self.rows, *sizes[1:]), compute) if prepared else None
        self.partial = None
        if in_pieces and self.leading:
            self.partial = scratch.reserve((self.chunks, *kept), compute)
        self.total = scratch.reserve(kept, compute) if converted else None
        if not in_pieces:
            self.rows, self.chunks = sizes[0], 1

    def bind(
        self, sources: Arrays, prepare: Callable[..., object] | None, out: np.ndarray, workspace: np.ndarray
    ) -> Bound:
        """The reduction as a function.

        Args:
            sources: Arrays over the iteration; one, or what ``prepare`` takes.
            prepare: Called as ``prepare(*chunks, out=buffer)`` before a chunk is reduced.
        """
        piece, partial, total = (
            slot.array(workspace) if isinstance(slot, Slot) else None for slot in (self.piece, self.partial, self.total)
        )
        kept = [(n, s) for n, s in zip(self.sizes, self.out_steps, strict=True) if s]
        y = strided(out, [n for n, _ in kept], [s for _, s in kept])
        target = y if total is None else total
        parts = []
        for k in range(self.chunks):
            rows = slice(k * self.rows, min((k + 1) * self.rows, self.sizes[0]))
            chunks = [x[rows] for x in sources]
            if partial is not None:
                result = partial[k, ...]
            else:
                result = target if self.leading else target[rows]
            buffer = chunks[0] if piece is None else piece[: rows.stop - rows.start]
            parts.append((chunks, buffer, result))
        reduce, axes, dtype = self.ufunc.reduce, self.axes, self.compute

        def run() -> None:
            for chunks, buffer, result in parts:
                if prepare is not None:
                    prepare(*chunks, out=buffer)
                reduce(buffer, axes, dtype, result)
            if partial is not None:
                reduce(partial, 0, dtype, target)
            if total is not None:
                np.copyto(y, total, casting="unsafe")

        return quiet(run)


def _widen(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x)


class ReducePlan(Plan):
    """Reduces over the dims that the output lacks; the output's dims may be in any order."""

    def __init__(self, call: Call):
        self.call = call
        x, y = call.inputs[0], call.outputs[0]
        self.op = call.of(Reduce).op
        if x.type.dtype == "bool" and self.op not in _BOOL_UFUNCS:
            raise call.fail("the values are bool.", "Count with a cast to int32.")
        ufunc = _BOOL_UFUNCS[self.op] if x.type.dtype == "bool" else UFUNCS[self.op]
        self.reduction: ChunkedReduction | None = None
        if x.elements == 0 or y.elements == 0:
            return
        in_strides, out_strides = x.strides(), y.strides()
        sizes, (_, out_steps) = collapse(
            x.sizes, [[in_strides[n] for n in x.names], [out_strides.get(n, 0) for n in x.names]]
        )
        self.sizes, self.out_steps = sizes or (1,), out_steps or (1,)
        self.widen = accumulator_dtype(x.dtype) != x.dtype
        if 0 in self.out_steps:
            scratch = Scratch()
            self.reduction = ChunkedReduction(
                self.sizes, self.out_steps, self.op, ufunc, accumulator_dtype(x.dtype), self.widen, self.widen, scratch
            )
            self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x, y = inputs[0], outputs[0]
        if not y.size:
            return nothing
        if not x.size:
            value = np.asarray(identity(self.op, self.call.outputs[0].type.dtype)).astype(y.dtype)
            return lambda: np.copyto(y, value)
        if self.reduction is None:  # every reduced dim has one element
            names = self.call.outputs[0].names
            source = named_view(x, self.call.inputs[0].restricted(names), names)
            return lambda: np.copyto(y, source)
        prepare = _widen if self.widen else None
        return self.reduction.bind([x.reshape(self.sizes)], prepare, y, workspace)
