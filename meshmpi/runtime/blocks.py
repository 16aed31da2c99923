"""What the real and the simulated collectives share: checks of arrays, blocks and scratch memory.

Knows NumPy and integers; no MPI, no ranks of a running job, no programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshmpi.errors import ProgramError, suggest

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
        raise ProgramError(
            f"{kind}: the {what} is a {type(x).__name__}, not an array.",
            "Give a NumPy array.",
        )
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
            f"{kind}: the output is {out.dtype}{list(out.shape)}, but the result is"
            f" {x.dtype}{list(shape)}.",
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
            f"a collective needs {size} bytes of workspace, but was given"
            f" {workspace.dtype}{list(workspace.shape)}.",
            "Give a flat uint8 array of as many bytes as its *_workspace_bytes function says.",
        )
    return workspace[:size].view(dtype)
