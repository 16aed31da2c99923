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
    accumulator_dtype,
    collapse,
    copying,
    named_view,
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
        slots = (self.piece, self.partial, self.total)
        piece, partial, total = (None if slot is None else slot.array(workspace) for slot in slots)
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


def plan_reduce(call: Call) -> Plan:
    """Reduces over the dims that the output lacks; the output's dims may be in any order."""
    x, y, op = call.inputs[0], call.outputs[0], call.of(Reduce).op
    is_bool = x.type.dtype == "bool"
    if is_bool and op not in _BOOL_UFUNCS:
        raise call.fail("the values are bool.", "Count with a cast to int32.")
    if x.elements == 0:
        value = np.asarray(identity(op, y.type.dtype)).astype(y.dtype)
        return Plan(lambda ins, outs, workspace, runtime: copying(outs[0], value))
    strides = [[o.strides().get(n, 0) for n in x.names] for o in (x, y)]
    sizes, (_, out_steps) = collapse(x.sizes, strides)
    if 0 not in out_steps:  # every reduced dim has one element
        source = x.restricted(y.names)
        return Plan(lambda ins, outs, workspace, runtime: copying(outs[0], named_view(ins[0], source, y.names)))
    scratch, wide = Scratch(), accumulator_dtype(x.dtype)
    widens = wide != x.dtype
    ufunc = (_BOOL_UFUNCS if is_bool else UFUNCS)[op]
    reduction = ChunkedReduction(sizes, out_steps, op, ufunc, wide, widens, widens, scratch)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        prepare = (lambda x, out: np.copyto(out, x)) if widens else None
        return reduction.bind([inputs[0].reshape(sizes)], prepare, outputs[0], workspace)

    return Plan(bind, scratch.bytes)
