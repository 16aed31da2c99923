"""Data types and strided views of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
_DTYPES = {"bfloat16": BFLOAT16}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy data type of a name in ``scalar.DTYPES``."""
    return _DTYPES.get(name) or np.dtype(name)


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which sums over ``dtype`` are formed: float32 for bfloat16, else its own."""
    return FLOAT32 if dtype == BFLOAT16 else dtype


def contiguous(order: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Dim -> distance between neighbours in a C-contiguous array with dims in ``order``."""
    out, step = {}, 1
    for name in reversed(order):
        out[name] = step
        step *= sizes[name]
    return out


def strided(array: np.ndarray, sizes: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """A view from the first element on, with steps in elements."""
    item = array.itemsize
    return np.lib.stride_tricks.as_strided(array, tuple(sizes), [s * item for s in steps])


def collapse(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merges neighbouring dims that every operand steps through evenly; drops dims of size 1.

    Args:
        sizes: Extents of the dims, outermost first; none is 0.
        strides: For each operand its stride along each dim, 0 where it is repeated.

    Returns:
        The sizes that are left, and for each operand its strides along them.
    """
    new_sizes: list[int] = []
    new_strides: list[list[int]] = [[] for _ in strides]
    for i, n in enumerate(sizes):
        if n == 1:
            continue
        if new_sizes and all(new[-1] == old[i] * n for new, old in zip(new_strides, strides, strict=True)):
            new_sizes[-1] *= n
            for new, old in zip(new_strides, strides, strict=True):
                new[-1] = old[i]
        else:
            new_sizes.append(n)
            for new, old in zip(new_strides, strides, strict=True):
                new.append(old[i])
    return tuple(new_sizes), [tuple(s) for s in new_strides]


def aligned_empty(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Uninitialised bytes that start on a cache line."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
