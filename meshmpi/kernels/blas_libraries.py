"""Finds the matrix-product routines of MKL and OpenBLAS and loads them with ctypes.

Libraries differ in where they lie, in how their names are decorated and in the width of their
integers; all of that ends here.  Where a library multiplies no bfloat16 matrices and the processor
can, a C routine of our own is added to it.  This module knows no arrays, programs or kernels.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
import site
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshmpi.kernels.native.compiler import CompilerError, load_library

MKL_SEQUENTIAL = 1
"""Argument of MKL_Set_Threading_Layer; see Intel's reference."""
SOURCE = Path(__file__).with_name("native") / "bf16_gemm.c"
SUFFIX = "+bf16"
"""Ends the name of a library that has been extended: it rounds otherwise, so ranks must agree."""


class Library(NamedTuple):
    """Loaded routines, all of the C interface of BLAS.

    Attributes:
        name: "mkl" or "openblas".
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
    wide = hasattr(loaded, "cblas_sgemm_64")
    end, integer = ("_64", ct.c_int64) if wide else ("", ct.c_int32)
    if _one_thread_wanted() and "MKL_THREADING_LAYER" not in os.environ:
        loaded.MKL_Set_Threading_Layer(MKL_SEQUENTIAL)  # else OpenMP's runtime is loaded too
    text = ct.create_string_buffer(256)
    loaded.MKL_Get_Version_String(text, len(text))
    version = text.value.decode().replace("Intel(R) oneAPI Math Kernel Library ", "").split(" for ")
    gemm = {
        "float32": _routine(loaded, f"cblas_sgemm{end}"),
        "float64": _routine(loaded, f"cblas_dgemm{end}"),
        "bfloat16": _routine(loaded, f"cblas_gemm_bf16bf16f32{end}"),
    }
    batch = {
        "float32": _routine(loaded, f"cblas_sgemm_batch{end}"),
        "float64": _routine(loaded, f"cblas_dgemm_batch{end}"),
    }
    return Library("mkl", version[0], integer, _present(gemm), _present(batch), loaded.MKL_Get_Max_Threads)


def load_openblas() -> Library | None:
    """The OpenBLAS that NumPy itself uses, or None.

    Its batched routines are left alone: those of NumPy's wheels (0.3.31) end the process with a
    segmentation fault for matrices of less than a million products (OpenBLAS pull request 5980).
    """
    loaded = _first_that_loads(_openblas_candidates())
    if loaded is None:
        return None
    for before, after in (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", "")):
        if hasattr(loaded, f"{before}cblas_sgemm{after}"):
            break
    else:
        return None

    def named(name: str) -> Any:
        return _routine(loaded, f"{before}{name}{after}")

    config = _text(named("openblas_get_config"))
    core = _text(named("openblas_get_corename"))
    gemm = {"float32": named("cblas_sgemm"), "float64": named("cblas_dgemm")}
    words = config.split()
    version = words[1] if len(words) > 1 else "of unknown version"
    return Library(
        "openblas",
        f"{version} for {core or 'unknown'} processors",
        ct.c_int64 if "USE64BITINT" in words else ct.c_int32,
        _present(gemm),
        {},
        named("openblas_get_num_threads") or (lambda: 1),
    )


def _one_thread_wanted() -> bool:
    asked = os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return asked.split(",")[0].strip() == "1"


def _mkl_candidates() -> Iterator[str]:
    """Wheels put it into the lib folder of the environment; conda does as well."""
    roots = [sys.prefix, sys.base_prefix, site.USER_BASE or sys.prefix]
    for root in dict.fromkeys(roots):
        for folder in ("lib", "lib64"):
            yield from map(str, sorted(Path(root, folder).glob("libmkl_rt.so*"), reverse=True))
    yield from ("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so")


def _openblas_candidates() -> Iterator[str]:
    """Next to NumPy, where wheels install it; else what the process has loaded with NumPy."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".libs", package / ".dylibs"):
        yield from map(str, sorted(folder.glob("*openblas*")))
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "openblas" in line)
    yield from dict.fromkeys(p for p in paths if p.startswith("/"))


def _first_that_loads(candidates: Iterator[str]) -> ct.CDLL | None:
    for path in candidates:
        try:
            return ct.CDLL(path)
        except OSError:
            continue
    return None


def _routine(loaded: ct.CDLL, name: str) -> Any:
    """A function object of its own, returning nothing; None where the library lacks it.

    Without argtypes ctypes passes prepared objects on as they are: 0.5 us a call, with them 0.7 us,
    from Python numbers 1.1 us (measured).
    """
    if not hasattr(loaded, name):
        return None
    routine = loaded[name]
    if "gemm" in name:
        routine.restype = None
    return routine


def _present(routines: dict[str, Any]) -> dict[str, Any]:
    return {dtype: routine for dtype, routine in routines.items() if routine is not None}


def _text(routine: Any) -> str:
    if routine is None:
        return ""
    routine.restype = ct.c_char_p
    return (routine() or b"").decode()


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
    gemm = dict(library.gemm)
    for key, name in (("bfloat16", "gemm_bf16bf16f32"), ("narrow", "gemm_bf16bf16bf16")):
        routine = loaded[name]
        routine.restype = None
        gemm[key] = routine
    return library._replace(name=library.name + SUFFIX, gemm=gemm)


@functools.cache
def _processor_has_it() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
