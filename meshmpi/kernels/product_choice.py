"""Chooses the library that multiplies matrices of a type fastest on this machine, by measurement.

Neither the processor's vendor nor its flags determine it, so all libraries multiply a few small matrices. The figures
are cached for the ranks of the host and for later jobs; the ranks of a program decide by the figures of all
(`blas.agree`). No MPI.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Mapping

import numpy as np

from meshmpi.dims import MeshShape, Shape
from meshmpi.errors import DataError
from meshmpi.files import cache
from meshmpi.hashes import sha256
from meshmpi.ir.kinds import Contract
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.kernels import blas, numpy_kernels
from meshmpi.kernels.binding import ALIGNMENT_BYTES, Runtime
from meshmpi.kernels.blas_libraries import SOURCE, SUFFIX
from meshmpi.kernels.native.compiler import processor
from meshmpi.kernels.steps import Bound, run_all
from meshmpi.kernels.views import numpy_dtype

PRODUCTS = (("m:256;k:512", "k:512;n:512", "m:256;n:512"), ("b:16;m:128;k:64", "b:16;k:64;n:128", "b:16;m:128;n:128"))
"""Operands and result of the products that are timed: one of a layer, and one of an attention."""
CALM_ROUNDS, MOST_ROUNDS = 5, 50
"""All take turns until this many rounds in a row bring no new best, or until the most rounds are done."""
NEWS = 0.97
"""A time below this share of the best so far is a new best."""
Seconds = dict[str, float]


def measured(bfloat16: bool = False) -> Seconds:
    """The libraries of `blas.available` that this process can use, with the seconds that the same products took.

    With bfloat16 its products count besides those of float32.  "numpy", for want of any other only,
    counts as infinite.  Where there is no choice nothing is measured.
    """
    names = blas.available(bfloat16)
    real = [n for n in names if n != "numpy"]
    if len(real) < 2:
        return {n: math.inf if real and n == "numpy" else 0.0 for n in names}
    found = figures(bfloat16)
    return {n: math.inf if n == "numpy" else sum(found[kind] for kind in _kinds(n, bfloat16)) for n in names}


def chosen(bfloat16: bool = False) -> blas.Blas:
    """The library that a program on this host alone would use.

    Raises:
        ConfigError: `blas.VARIABLE` names none that is installed.
    """
    return blas.find(blas.agree([measured(bfloat16)]))


def figures(bfloat16: bool = False) -> Seconds:
    """Seconds of the products, in float32 by library and in bfloat16 by way, from the cache or now.

    Keys are as "float32 openblas", "bfloat16 openblas" (converted to float32), "bfloat16 +bf16"
    (by our own routine).
    """
    found = (blas.find(n) for n in blas.available(bfloat16) if n != "numpy")
    return dict(_figures(tuple((b.name, b.version, b.threads) for b in found), bfloat16))


def kinds(bfloat16: bool) -> dict[str, str]:
    """What is timed, as "float32 openblas" -> a library that has it."""
    names = [n for n in blas.available(bfloat16) if n != "numpy"]
    return {kind: n for n in reversed(names) for kind in _kinds(n, bfloat16)}


@functools.cache
def _figures(versions: tuple[tuple[str, str, int], ...], bfloat16: bool) -> Mapping[str, float]:
    wanted = kinds(bfloat16)
    about = [processor(), np.__version__, repr((PRODUCTS, versions)), *wanted]  # all that the figures depend on
    if any(kind.endswith(SUFFIX) for kind in wanted):
        about.append(SOURCE.read_text())
    name = f"products-{sha256('|'.join(about).encode()).hexdigest()[:24]}.json"
    try:
        with cache.opened("products") as folder:
            found = _known(cache.recall(folder, name), wanted)
            if found is None:
                with folder.locked(name + ".lock"):  # one rank measures while the others wait
                    found = _known(cache.recall(folder, name), wanted)
                    if found is None:
                        found = time_products(wanted)
                        cache.remember(folder, name, found)
            return found
    except (DataError, OSError):  # nowhere to keep it: each process measures
        return time_products(wanted)


def _kinds(name: str, bfloat16: bool) -> tuple[str, ...]:
    """What of a library is timed: libraries that share a routine share its figure."""
    base, _, way = name.partition("+")
    if not bfloat16:
        return (f"float32 {base}",)
    own = {"": base, "convert": f"{base} converted", "mkl": "mkl"}.get(way, "+" + way)
    return f"float32 {base}", f"bfloat16 {own}"


def _known(found: object, kinds: Collection[str]) -> Seconds | None:
    """What the cache holds, if it is what was asked for."""
    if not isinstance(found, dict) or set(found) != set(kinds):
        return None
    return found if all(isinstance(s, float) and s > 0 for s in found.values()) else None


def time_products(kinds: Mapping[str, str]) -> Seconds:
    """Seconds of all `PRODUCTS` for each "float32 openblas", say, of a library of that name.

    The least of rounds in which all take turns: on a busy machine many are needed until each has had
    an undisturbed one.
    """
    runs = {kind: _products(kind.split()[0], name) for kind, name in kinds.items()}
    least = dict.fromkeys(runs, math.inf)
    for run in runs.values():  # pages are touched, threads are started
        run()
    calm = 0
    for _ in range(MOST_ROUNDS):
        before = dict(least)
        for kind, run in runs.items():
            least[kind] = min(least[kind], _seconds(kind, run))
        calm = 0 if any(least[kind] < NEWS * s for kind, s in before.items()) else calm + 1
        if calm == CALM_ROUNDS:
            break
    return least


def _seconds(kind: str, run: Bound) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _products(dtype: str, library: str) -> Bound:
    """All products, bound as a program binds them."""
    runs = []
    for shapes in PRODUCTS:
        known = enumerate(Shape(text) for text in shapes)
        types = {v: LocalType(shape, dtype, ((),) * len(shape)) for v, shape in known}
        i = Instruction(Contract(), (0, 1), (2,))
        program = Program(MeshShape(""), types, (i,), {}, {}, {})
        arrays = {v: np.ones(t.shape.sizes, numpy_dtype(dtype)) for v, t in types.items()}
        room = np.zeros(numpy_kernels.workspace_bytes(i, program, {}) + ALIGNMENT_BYTES, np.uint8)
        room = room[-room.ctypes.data % ALIGNMENT_BYTES :]
        runs.append(numpy_kernels.bind(i, program, {}, arrays, room, Runtime(blas=library)))
    return run_all(runs)


def described(bfloat16: bool = True) -> str:
    """The figures in milliseconds, the fastest first; says where there was no choice."""
    names = [n for n in blas.available(bfloat16) if n != "numpy"]
    if len(names) < 2:
        return f"nothing to measure: {names[0] if names else 'numpy'} is the only one"
    found = sorted(figures(bfloat16).items(), key=lambda item: (item[0].split()[0], item[1]))
    return ", ".join(f"{kind} {1e3 * s:.2f} ms" for kind, s in found)
