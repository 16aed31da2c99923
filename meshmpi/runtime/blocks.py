"""What the real and the simulated collectives share: checks of arrays, blocks and scratch memory.

Knows NumPy and integers; no MPI, no ranks of a running job, no programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmpi.dims import Axes, MeshShape, block_range
from meshmpi.errors import ProgramError, suggest
from meshmpi.ir.halos import HaloExchange, Piece

OPS = ("sum", "max", "min", "prod")
"""The reductions.  On bool, sum and max mean "or", prod and min mean "and", as in NumPy."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def check_op(op: str) -> None:
    """Raises ProgramError unless ``op`` is one of `OPS`."""
    if op not in OPS:
        raise ProgramError(f"'{op}' is no reduction.", suggest(op, OPS))


def check_array(kind: str, what: str, x: np.ndarray) -> None:
    """Raises ProgramError unless ``x`` is an array whose elements lie one after another."""
    if not isinstance(x, np.ndarray):
        raise ProgramError(f"{kind}: the {what} is a {type(x).__name__}, not an array.", "Give a NumPy array.")
    if not x.flags.c_contiguous:
        raise ProgramError(
            f"{kind}: the {what} of shape {x.shape} is not C-contiguous (strides {x.strides}).",
            "Give numpy.ascontiguousarray of it.",
        )


def check_out(kind: str, x: np.ndarray, out: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises ProgramError unless ``out`` can take a result of ``shape`` made from ``x``."""
    check_array(kind, "input", x)
    check_array(kind, "output", out)
    if out.shape != shape or out.dtype != x.dtype:
        raise ProgramError(
            f"{kind}: the output is {out.dtype}{list(out.shape)}, but the result is {x.dtype}{list(shape)}.",
            "Give an output array of that shape and data type.",
        )


def check_sizes(kind: str, sizes: Sequence[int], n: int, extent: int, what: str) -> None:
    """Raises ProgramError unless ``sizes`` are ``n`` block extents that add up to ``extent``."""
    if len(sizes) != n or sum(sizes) != extent or min(sizes, default=0) < 0:
        raise ProgramError(
            f"{kind}: {len(sizes)} block sizes {list(sizes)} (sum {sum(sizes)}) for a group of {n}"
            f" ranks and {what} of {extent} elements.",
            "Give one size per rank of the group, adding up to the extent.",
        )


def replaced(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """``shape`` with another extent along ``axis``."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each block begins when blocks of ``sizes`` follow each other; the end comes last."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + size)
    return out


def block(x: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    """The view of ``x`` from ``start`` to ``stop`` along ``axis``."""
    return x[(slice(None),) * axis + (slice(start, stop),)]


def piece_source(xs: Sequence[np.ndarray], axis: int, e: HaloExchange, p: Piece) -> np.ndarray:
    """The view of the inputs' blocks on rank ``p.source`` that a piece is taken from."""
    start = p.start - block_range(e.sizes[p.operand], e.blocks, p.source)[0]
    cut = slice(start, start + (p.count - 1) * p.step + 1, p.step)
    return xs[p.operand][(slice(None),) * axis + (cut,)]


def piece_target(out: np.ndarray, axis: int, e: HaloExchange, p: Piece) -> np.ndarray:
    """The view of the output on rank ``p.target`` that a piece goes to."""
    start = p.to - e.target(p.target)[0]
    return block(out, axis, start, start + p.count)


def check_shift(xs: Sequence[np.ndarray], out: np.ndarray, axis: int, e: HaloExchange, b: int) -> None:
    """Raises ProgramError unless the arrays are those of block ``b`` of an exchange."""
    if len(xs) != len(e.sizes):
        raise ProgramError(f"shift: {len(xs)} inputs for an exchange of {len(e.sizes)}.", "Give one array each.")
    first, end = e.target(b)
    for x, n in zip(xs, e.sizes, strict=True):
        start, stop = block_range(n, e.blocks, b)
        check_sizes("shift", [x.shape[axis]], 1, stop - start, "a block")
        check_out("shift", x, out, replaced(x.shape, axis, end - first))


def as_bits(x: np.ndarray) -> np.ndarray:
    """The elements in memory order, flat, as unsigned integers of the same width.

    Every data type moves like this, so that those MPI does not know (bfloat16, bool) move too.
    """
    return x.reshape(-1).view(_UNSIGNED[x.dtype.itemsize])


def scratch(workspace: np.ndarray | None, elements: int, dtype: np.dtype) -> np.ndarray:
    """A flat array of ``elements`` at the start of ``workspace``, or a fresh one without it."""
    if workspace is None:
        return np.empty(elements, dtype)
    size = elements * np.dtype(dtype).itemsize
    if workspace.dtype != np.uint8 or workspace.ndim != 1 or workspace.nbytes < size:
        raise ProgramError(
            f"a collective needs {size} bytes of workspace, but was given {workspace.dtype}{list(workspace.shape)}.",
            "Give a flat uint8 array of as many bytes as its *_workspace_bytes function says.",
        )
    return workspace[:size].view(dtype)


def check_axes(shape: MeshShape, axes: Axes) -> None:
    """Raises MeshError for an axis that the mesh lacks, ProgramError for one named twice."""
    for axis in axes:
        shape.axis_size(axis)
        if axes.count(axis) > 1:
            raise ProgramError(
                f"a collective over {'+'.join(axes)} names mesh axis '{axis}' twice.", "Name each axis once."
            )
