"""Normal random numbers in C, the very bits of `meshmpi.kernels.random_numbers`, for first values.

NumPy needs some fifty passes over each piece.  The operations here are the same, in the same order, each
rounded by itself.  Whether the compiler kept to that is looked at: a library that differs in a bit is not used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from meshmpi.kernels import random_numbers as rn
from meshmpi.kernels.native.compiler import CompilerError, load_library
from meshmpi.kernels.native.prelude import PRELUDE

LEAST_ELEMENTS = 1 << 18
"""Elements of a block from which on the library is loaded.  Assumption: NumPy takes 20 ms for them."""
_TRIED = 4099  # elements of the comparison; more than any vector, and odd
_TYPES = ("float32", "float64")

_SOURCE = r"""
static inline double logarithm(double u) {  /* of u = 2^e m, sqrt(1/2) <= m < sqrt 2 */
  int64_t bits; memcpy(&bits, &u, 8);
  int64_t e = (bits - %(sqrt_half)dLL) >> 52;
  bits -= (int64_t)((uint64_t)e << 52);
  double m; memcpy(&m, &bits, 8);
  double f = (m - 1.0) / (m + 1.0), s = f * f;
  return (double)e * %(log2)s + f * (%(log)s);
}
static inline double normal(uint64_t y, uint64_t key) {
  double u = uniform_float64(y, key) + 0x1p-53;
  double v = fabs(uniform_float64(y + (key << %(draw)d), key) - 0.5) - 0.25, s = v * v;
  return sqrt(logarithm(u) * -2.0) * v * (%(sine)s);
}
#define FILL(T)                                                                            \
  void normal_##T(const uint64_t *pattern, uint64_t first, uint64_t key, T *out, int64_t n, \
                  double scale, double shift) {                                            \
    uint64_t offset = first * key;                                                         \
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++)                                    \
      out[i] = (T)(normal(pattern[i] * key + offset, key) * scale + shift);                \
  }
FILL(float)
FILL(double)
"""
# No multiplication and addition may become one operation with one rounding.
_EXACT = '#pragma STDC FP_CONTRACT OFF\n#pragma GCC optimize("fp-contract=off")\n'


def _horner(coefficients: Sequence[float]) -> str:
    """c0 + s (c1 + s ...) in the order of operations of the NumPy code."""
    text = f"s * {coefficients[-1].hex()}"
    for c in coefficients[-2:0:-1]:
        text = f"({text} + {c.hex()}) * s"
    return f"{text} + {coefficients[0].hex()}"


def _source() -> str:
    numbers = {"sqrt_half": int(rn._SQRT_HALF_BITS), "log2": rn._LOG_2.hex(), "draw": rn.DRAW_SHIFT}
    return _EXACT + PRELUDE + _SOURCE % {**numbers, "log": _horner(rn._LOG), "sine": _horner(rn._SINE)}


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The library, or None where there is none whose numbers are right."""
    try:
        library = load_library(_source())
    except CompilerError:
        return None
    for name in _TYPES:
        found = np.empty(_TRIED, name)
        whole = ((0, _TRIED),)
        _fill(library, found, rn.Counters((_TRIED,), whole), rn.stream_key(1, "tried", 2), 0.5, 0.25)
        expected = rn.random_block("normal", 1, "tried", 2, (_TRIED,), whole, "float64")
        expected = (expected * 0.5 + 0.25).astype(name)
        if found.tobytes() != expected.tobytes():
            return None
    return library


def _fill(library: ctypes.CDLL, out: np.ndarray, counters: rn.Counters, key: int, scale: float, shift: float) -> None:
    function = library.normal_float if out.dtype == np.float32 else library.normal_double
    pointer, number, real = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double
    function.restype = None
    function.argtypes = [pointer, number, number, pointer, ctypes.c_int64, real, real]
    at = out.ctypes.data
    for first, n in counters.pieces():
        function(counters.pattern.ctypes.data, first, key, at, n, scale, shift)
        at += n * out.itemsize


def fill_normal(
    out: np.ndarray,
    seed: int,
    key: str,
    sizes: Sequence[int],
    block: Sequence[tuple[int, int]],
    scale: float,
    shift: float,
) -> bool:
    """Writes ``scale * z + shift`` to ``out``, z being the normal numbers of `random_block`; rounded once.

    Returns whether it was done: small blocks, other types than float32 and float64, and machines
    without a compiler are left to NumPy.
    """
    fits = out.size >= LEAST_ELEMENTS and out.dtype.name in _TYPES and out.flags.c_contiguous
    library = _library() if fits else None
    if library is None:
        return False
    _fill(library, out, rn.Counters(sizes, block), rn.stream_key(seed, key, 0), scale, shift)
    return True
