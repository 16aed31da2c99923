"""Matrix products on strided arrays, bound directly to a BLAS library: a prepared call costs half a microsecond.

Whatever BLAS cannot read in place (odd strides, integers) is refused, and the caller takes np.matmul.
Here is what can be used; `product_choice` measures what is fastest.  No programs, dims or MPI.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.errors import ConfigError
from meshmpi.kernels.binding import Arrays
from meshmpi.kernels.blas_libraries import SUFFIX, Library, load_mkl, load_openblas, with_bfloat16
from meshmpi.kernels.steps import Bound, run_all
from meshmpi.kernels.views import BFLOAT16

VARIABLE = "MESHMPI_BLAS"
"""Environment variable that names the library to use."""
NAMES = ("openblas", "mkl", "numpy")
EXTENDED = ("openblas" + SUFFIX, "openblas+mkl", "mkl" + SUFFIX, "mkl+convert")
"""Libraries with other products of bfloat16 than their own: by our routine (see
`with_bfloat16`), by MKL's, or by float32 after converting the operands."""
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
"""Constants of the C interface of BLAS."""
MOST_PRODUCTS = 1 << 14
"""In one bound batch, whose arguments lie outside the planned memory."""
SMALL_PRODUCT = 1 << 16
"""Multiplications (half a microsecond) below which a call from Python would take longer than the
product: np.matmul loops over such products in C.  Status: assumption."""


class Form(NamedTuple):
    """How BLAS reads a matrix."""

    transposed: bool
    leading: int  # distance between neighbouring rows (columns if transposed), in elements


def form(rows: int, columns: int, row_step: int, column_step: int) -> Form | None:
    """The form of a matrix with these strides (in elements), or None if BLAS cannot read it."""
    if (column_step == 1 or columns == 1) and (row_step >= columns or rows == 1):
        return Form(False, max(row_step, columns))
    if (row_step == 1 or rows == 1) and (column_step >= rows or columns == 1):
        return Form(True, max(column_step, rows))
    return None


def few(count: int, m: int, n: int, k: int) -> bool:
    """Whether so many products of this size are worth a call each."""
    return count == 1 or (count <= MOST_PRODUCTS and m * n * k >= SMALL_PRODUCT)


class Blas:
    """One library's matrix products.

    Args:
        library: Its routines, or None for NumPy: then nothing can be bound.

    Attributes:
        version: Version of the library, and the processors for which its routines were chosen.
        bfloat16: Whether bfloat16 operands are multiplied as they are, into float32.
        narrow: Whether the result may be bfloat16 too, rounded once.
    """

    def __init__(self, library: Library | None):
        self._library = library
        self.name = "numpy" if library is None else library.name
        self.version = np.__version__ if library is None else library.version
        self.bfloat16 = library is not None and "bfloat16" in library.gemm
        self.narrow = library is not None and "narrow" in library.gemm

    @property
    def threads(self) -> int:
        """How many threads a product may use now; 0 where the library does not say."""
        return 0 if self._library is None else int(self._library.threads())

    def gemm(self, a: np.ndarray, b: np.ndarray, y: np.ndarray, accumulate: bool = False) -> Bound | None:
        """``y = a @ b`` bound to these very arrays, or None where np.matmul must do it.

        Args:
            a, b: [..., m, k] and [..., k, n], any strides; float32, float64 or bfloat16.
            y: [..., m, n]: of the same type, for bfloat16 also float32.  Shares no memory with a, b.
            accumulate: Whether the products are added to what ``y`` holds.
        """
        key = _key(a, b, y)
        if self._library is None or key not in self._library.gemm:
            return None
        if y.size == 0 or a.size == 0 or (1 in y.shape[-2:] and a.dtype != BFLOAT16):
            return None  # vectors: np.matmul calls gemv
        if accumulate and key == "narrow":
            return None
        (m, k), n = a.shape[-2:], y.shape[-1]
        of_a, of_b, of_y = (form(*x.shape[-2:], *(s // x.itemsize for s in x.strides[-2:])) for x in (a, b, y))
        if of_a is None or of_b is None or of_y is None:
            return None
        if of_y.transposed:  # y^T = b^T a^T, whose result lies in rows
            of_a, of_b = (Form(not f.transposed, f.leading) for f in (of_b, of_a))
            a, b, m, n = b, a, n, m
        return self._bind(key, (m, n, k), (a, b, y), (of_a, of_b, of_y), float(accumulate))

    def _bind(self, key: str, sizes: Sequence[int], arrays: Arrays, forms: Sequence[Form], beta: float) -> Bound | None:
        assert self._library is not None
        library, addresses = self._library, [_addresses(x) for x in arrays]
        count, scalar = addresses[0].size, ct.c_double if key == "float64" else ct.c_float
        if count > MOST_PRODUCTS or not (key in library.gemm_batch or few(count, *sizes)):
            return None

        def prepared(routine: Any, pointers: Iterable[int], given: Callable[[Any, float], Any], *more: Any) -> Any:
            """The routine with its arguments in the order of CBLAS, numbers as ``given`` makes them."""
            pa, pb, py = map(ct.c_void_p, pointers)
            flags = (given(ct.c_int, TRANSPOSED if f.transposed else PLAIN) for f in forms[:2])
            extents, (lda, ldb, ldy) = ([given(library.integer, n) for n in group] for group in (sizes, leading))
            numbers = (*flags, *extents, given(scalar, 1.0), pa, lda, pb, ldb, given(scalar, beta), py, ldy)
            return functools.partial(routine, ct.c_int(ROW_MAJOR), *numbers, *more)

        def group(kind: Any, value: float) -> Any:
            """One group of products: every argument is an array with one element for the group."""
            return (kind * 1)(value)

        leading = [f.leading for f in forms]
        if count > 1 and key in library.gemm_batch:
            counts = (library.integer(1), group(library.integer, count))
            bound: Any = prepared(library.gemm_batch[key], (p.ctypes.data for p in addresses), group, *counts)
        else:
            each = zip(*(p.tolist() for p in addresses), strict=True)
            calls = [prepared(library.gemm[key], at, lambda kind, value: kind(value)) for at in each]
            bound = functools.partial(run_all(calls))  # a partial of a partial costs no more
        bound.arrays = (*arrays, *addresses)  # an address alone would not keep the memory
        return bound


def _key(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> str:
    """Data type of the operands as libraries list it, or empty."""
    if a.dtype == b.dtype == BFLOAT16:
        return {"float32": "bfloat16", "bfloat16": "narrow"}.get(y.dtype.name, "")
    return a.dtype.name if a.dtype == b.dtype == y.dtype else ""


def _addresses(x: np.ndarray) -> np.ndarray:
    """Where each matrix of ``x[..., rows, columns]`` begins."""
    at = np.array([x.__array_interface__["data"][0]], np.intp)  # signed: steps may go back
    for size, step in zip(x.shape[:-2], x.strides[:-2], strict=True):
        at = (at[:, None] + np.arange(size, dtype=np.intp) * step).reshape(-1)
    return at


@functools.cache
def _load(name: str) -> Blas | None:
    """The library of that name, or None where it is not installed."""
    if name == "numpy":
        return Blas(None)
    base, _, way = name.partition("+")
    library = load_mkl() if base == "mkl" else load_openblas()
    if library is None or "float32" not in library.gemm:
        return None
    if way:
        library = _extended(library, way)
    return None if library is None else Blas(library._replace(name=name))


def _extended(library: Library, way: str) -> Library | None:
    """The library with other products of bfloat16; None where there are none of that kind."""
    plain = {key: r for key, r in library.gemm.items() if key not in ("bfloat16", "narrow")}
    if way == "convert":
        return library._replace(gemm=plain)
    if "+" + way == SUFFIX:
        return with_bfloat16(library._replace(gemm=plain))
    other = load_mkl()
    if other is None or other.integer is not library.integer or "bfloat16" not in other.gemm:
        return None
    return library._replace(gemm={**plain, "bfloat16": other.gemm["bfloat16"]})


def available(bfloat16: bool = False) -> tuple[str, ...]:
    """Names of the libraries that this process can use, "numpy" last; for bfloat16 with `EXTENDED`.

    A library that `VARIABLE` names is the only one; where it is not installed there is none.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced:
        known = (*NAMES, *EXTENDED)
        return (forced,) if forced in known and _load(forced) is not None else ()
    wanted = (*NAMES[:-1], *EXTENDED, NAMES[-1]) if bfloat16 else NAMES
    return tuple(n for n in wanted if _load(n) is not None)


def agree(of_ranks: Sequence[Mapping[str, float]]) -> str:
    """The library that all ranks use: of those that every rank has, the one whose slowest rank is the fastest.

    Replicated values must be equal to the last bit, and no two libraries round alike.

    Args:
        of_ranks: For each rank its libraries, with the seconds that the same products took.

    Raises:
        ConfigError: They have none in common, or `VARIABLE` names none that is installed.
    """
    for rank, names in enumerate(of_ranks):
        if not names:
            raise _not_found(f" on rank {rank}")
    common = [n for n in of_ranks[0] if all(n in names for names in of_ranks)]
    if common:
        return min(common, key=lambda n: max(names[n] for names in of_ranks))
    told = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(of_ranks))
    raise ConfigError(
        f"the ranks have no library of matrix products in common ({told}).",
        f"Set {VARIABLE} to the same value on every rank, or unset it.",
    )


def find(name: str = "") -> Blas:
    """The library called ``name``, or without a name the first that is there.

    Raises:
        ConfigError: There is no such library here.
    """
    names = (name,) if name else available()
    found = _load(names[0]) if names and names[0] in (*NAMES, *EXTENDED) else None
    if found is None:
        if not name:
            raise _not_found("")
        here = ", ".join(available()) or "none"
        raise ConfigError(f"BLAS library '{name}' was not found.", f"Libraries found: {here}.")
    return found


def _not_found(where: str) -> ConfigError:
    forced = os.environ.get(VARIABLE, "")
    return ConfigError(
        f"{VARIABLE}={forced}, but that library was not found{where}.",
        "Run pip install 'meshmpi[mkl]' there, or unset the variable."
        if forced == "mkl"
        else f"Use one of {', '.join(NAMES)}, or unset the variable.",
    )
