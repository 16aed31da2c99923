"""Products of bfloat16 matrices where the BLAS library has none, on processors with AVX512-BF16.

The routine is C of our own, compiled like the generated kernels, and is added to a library's as if
it came with it.  This module knows no arrays, programs or dims.
"""

from __future__ import annotations

import ctypes as ct
import functools
from pathlib import Path

from meshmpi.kernels.blas_libraries import Library
from meshmpi.kernels.native.compiler import CompilerError, load_library

SOURCE = Path(__file__).with_name("native") / "bf16_gemm.c"
SUFFIX = "+bf16"
"""Ends the name of a library that has been extended: it rounds otherwise, so ranks must agree."""


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
