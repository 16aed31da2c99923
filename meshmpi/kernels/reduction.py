"""reduce: sum, max, min or prod over named dims.

Sums are formed in two levels where the outermost dim is summed (a chunk of rows at a time), which bounds
rounding errors and stays in the cache; elsewhere NumPy sums pairwise.  bfloat16 is accumulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshmpi.ir.kinds import Reduce
from meshmpi.ir.scalar import FLOATS
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch, named_view
from meshmpi.kernels.steps import Bound, copying, quiet
from meshmpi.kernels.views import accumulator_dtype, collapse, strided

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


def chunked(
    sizes: Sequence[int],
    out_steps: Sequence[int],
    op: str,
    ufunc: np.ufunc,
    compute: np.dtype,
    scratch: Scratch,
    prepare: Callable[..., object] | None = None,
    converted: bool = False,
) -> Callable[[Arrays, np.ndarray, np.ndarray], Bound]:
    """Plans a reduction over some dims of an iteration, in chunks along its first dim.

    Args:
        out_steps: Strides of the output along the dims, 0 where one is reduced.
        prepare: Called as ``prepare(*chunks, out=buffer)`` before a chunk is reduced.
        converted: Whether the output has another type than ``compute``.

    Returns:
        What binds it to arrays over the iteration (one, or what ``prepare`` takes), output and workspace.
    """
    reduce, axes = ufunc.reduce, tuple(k for k, s in enumerate(out_steps) if s == 0)
    leading, inner = axes[0] == 0, math.prod(sizes[1:])
    two_level = leading and op == "sum" and out_steps[-1] != 0
    most = max(LONG_SUM, SMALL_CHUNK // inner) if two_level else PIECE_ELEMENTS // inner
    most = max(1, min(sizes[0], most))
    in_pieces = most < sizes[0] and (two_level or prepare is not None)
    kept, steps = [n for n, s in zip(sizes, out_steps, strict=True) if s], [s for s in out_steps if s]
    piece_of = scratch.reserve((most, *sizes[1:]), compute) if prepare is not None else None
    starts = range(0, sizes[0], most) if in_pieces else range(1)
    partial_of = scratch.reserve((len(starts), *kept), compute) if in_pieces and leading else None
    total_of = scratch.reserve(kept, compute) if converted else None

    def bind(sources: Arrays, out: np.ndarray, workspace: np.ndarray) -> Bound:
        slots = (piece_of, partial_of, total_of)
        piece, partial, total = (None if slot is None else slot.array(workspace) for slot in slots)
        y = strided(out, kept, steps)
        target = y if total is None else total
        parts = []
        for k, start in enumerate(starts):
            rows = slice(start, min(start + most, sizes[0]) if in_pieces else sizes[0])
            chunks = [x[rows] for x in sources]
            result = target if leading else target[rows]
            buffer = chunks[0] if piece is None else piece[: rows.stop - start]
            parts.append((chunks, buffer, result if partial is None else partial[k, ...]))

        def run() -> None:
            for chunks, buffer, result in parts:
                if prepare is not None:
                    prepare(*chunks, out=buffer)
                reduce(buffer, axes, compute, result)
            if partial is not None:
                reduce(partial, 0, compute, target)
            if total is not None:
                np.copyto(y, total, casting="unsafe")

        return quiet(run)

    return bind


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
    prepare = (lambda x, out: np.copyto(out, x)) if widens else None
    reduction = chunked(sizes, out_steps, op, ufunc, wide, scratch, prepare, widens)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        return reduction([inputs[0].reshape(sizes)], outputs[0], workspace)

    return Plan(bind, scratch.bytes)
