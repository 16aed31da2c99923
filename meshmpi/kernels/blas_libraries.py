"""Finds the matrix-product routines of MKL and OpenBLAS and loads them with ctypes.

Where a library multiplies no bfloat16 matrices and the processor can, a C routine of our own is added to it.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import functools
import os
import site
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from threadpoolctl import ThreadpoolController

from meshmpi.kernels.native.compiler import CompilerError, load_library

MKL_SEQUENTIAL = 1
"""Argument of MKL_Set_Threading_Layer; see Intel's reference."""
SOURCE = Path(__file__).with_name("native") / "bf16_gemm.c"
SUFFIX = "+bf16"
"""Ends the name of a library that has been extended: it rounds otherwise, so ranks must agree."""


class Library(NamedTuple):
    """Loaded routines, all of the C interface of BLAS.

    Attributes:
        version: As the library reports it, with the processor it was tuned for where known.
        integer: ctypes type of sizes and leading dimensions.
        gemm: Data type ("float32", "float64", "bfloat16") -> one product; bfloat16 operands give
            a float32 result.
        gemm_batch: The same for many products at once; empty where there is none to rely on.
        threads: Returns how many threads a product may use.
    """

    name: str
    version: str
    integer: type
    gemm: dict[str, Any]
    gemm_batch: dict[str, Any]
    threads: Callable[[], int]


def load_mkl() -> Library | None:
    """MKL from this environment or the loader's path, or None."""
    loaded = _first_that_loads(_mkl_candidates())
    if loaded is None:
        return None
    # Names ending in _64 take 64-bit integers; not every version has them.
    end, integer = ("_64", ct.c_int64) if hasattr(loaded, "cblas_sgemm_64") else ("", ct.c_int32)
    threads = os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    if threads.split(",")[0].strip() == "1" and "MKL_THREADING_LAYER" not in os.environ:
        loaded.MKL_Set_Threading_Layer(MKL_SEQUENTIAL)  # else OpenMP's runtime is loaded too
    text = ct.create_string_buffer(256)
    loaded.MKL_Get_Version_String(text, len(text))
    version = text.value.decode().replace("Intel(R) oneAPI Math Kernel Library ", "").split(" for ")
    one = {"float32": "cblas_sgemm", "float64": "cblas_dgemm", "bfloat16": "cblas_gemm_bf16bf16f32"}
    batch = {"float32": "cblas_sgemm_batch", "float64": "cblas_dgemm_batch"}
    gemm, gemm_batch = (_routines(loaded, {key: name + end for key, name in names.items()}) for names in (one, batch))
    return Library("mkl", version[0], integer, gemm, gemm_batch, loaded.MKL_Get_Max_Threads)


def load_openblas() -> Library | None:
    """The OpenBLAS that NumPy itself uses, or None.

    Its batched routines are left alone: those of NumPy's wheels (0.3.31) end the process with a
    segmentation fault for matrices of less than a million products (OpenBLAS pull request 5980).
    """
    found = [c for c in ThreadpoolController().lib_controllers if c.internal_api == "openblas"]
    own = min(found, key=lambda c: "numpy" not in c.filepath, default=None)  # SciPy may have brought another
    if own is None:
        return None
    loaded = ct.CDLL(own.filepath)
    for decorated in ("scipy_{}64_", "{}64_", "scipy_{}", "{}"):
        gemm = _routines(
            loaded, {"float32": decorated.format("cblas_sgemm"), "float64": decorated.format("cblas_dgemm")}
        )
        if gemm:
            break
    else:
        return None
    config = loaded[decorated.format("openblas_get_config")]
    config.restype = ct.c_char_p
    integer = ct.c_int64 if b"USE64BITINT" in config().split() else ct.c_int32
    version = f"{own.version} for {own.architecture or 'unknown'} processors"
    return Library("openblas", version, integer, gemm, {}, lambda: own.num_threads or 1)


def _mkl_candidates() -> Iterator[str]:
    """Wheels put it into the lib folder of the environment; conda does as well."""
    roots = [sys.prefix, sys.base_prefix, site.USER_BASE or sys.prefix]
    for root in dict.fromkeys(roots):
        for folder in ("lib", "lib64"):
            yield from map(str, sorted(Path(root, folder).glob("libmkl_rt.so*"), reverse=True))
    yield from ("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so")


def _first_that_loads(candidates: Iterator[str]) -> ct.CDLL | None:
    for path in candidates:
        with contextlib.suppress(OSError):
            return ct.CDLL(path)
    return None


def _routines(loaded: ct.CDLL, names: dict[str, str]) -> dict[str, Any]:
    """Function objects of their own, returning nothing; without those that the library lacks.

    Without argtypes ctypes passes prepared objects on as they are: 0.5 us a call, with them 0.7 us,
    from Python numbers 1.1 us (measured).
    """
    found = {key: loaded[name] for key, name in names.items() if hasattr(loaded, name)}
    for routine in found.values():
        routine.restype = None
    return found


def with_bfloat16(library: Library) -> Library | None:
    """``library`` with products of bfloat16 matrices, or None where that cannot be had or has been.

    Without a compiler, or on another processor, operands are converted to float32 instead.
    """
    if "bfloat16" in library.gemm or not _processor_has_it():
        return None
    width = ct.sizeof(library.integer) * 8
    try:
        loaded = load_library(f"#include <stdint.h>\ntypedef int{width}_t integer;\n{SOURCE.read_text()}")
    except CompilerError:
        return None
    if not loaded.bf16_supported():
        return None
    own = _routines(loaded, {"bfloat16": "gemm_bf16bf16f32", "narrow": "gemm_bf16bf16bf16"})
    return library._replace(name=library.name + SUFFIX, gemm={**library.gemm, **own})


@functools.cache
def _processor_has_it() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
