"""The loops in C: ``loops.c``, built with the fastest flags of the system compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.loops.data import ADAM_EPSILON, BETA1, BETA2, EPSILON, RATE, Data, Loops

SOURCE = Path(__file__).with_name("loops.c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp-simd", "-mprefer-vector-width=512")
"""Fast in a way that generated kernels may not be: -ffast-math loses NaN and infinities."""


def build() -> ctypes.CDLL:
    """The library, built in a folder that is gone afterwards."""
    compiler = os.environ.get("MESHMPI_CC") or os.environ.get("CC") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "loops.so")
        made = library.with_suffix(".o")
        subprocess.run([compiler, *FLAGS, "-fPIC", "-c", str(SOURCE), "-o", str(made)], check=True)
        # Linked without -ffast-math: a library linked with it makes the processor flush small
        # numbers to zero in the whole process that loads it, NumPy included.
        command = [compiler, "-shared", str(made), "-o", str(library), "-lm"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def _call(function: Any, *arguments: Any) -> Any:
    """The call with everything converted once; the arrays stay where they are."""

    def converted(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return ctypes.c_void_p(x.ctypes.data)
        return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_long(x)

    ready = [converted(x) for x in arguments]
    function.restype = None
    keep = arguments

    def run() -> Any:
        function(*ready)
        return keep

    return run


def loops(d: Data) -> Loops:
    """See `apps.bench.loops.data`."""
    lib = build()
    n = {x.shape: x.shape for x in (d.scores, d.logits, d.x, d.h)}
    ys = {shape: np.empty(shape, np.float32) for shape in n}
    row = {x.shape[1]: [np.empty(x.shape[1], np.float32) for _ in "ab"] for x in (d.x, d.h)}
    loss, left = np.empty(1, np.float32), [np.empty(len(d.x), np.float32) for _ in "ab"]
    y, yx, yl, yn = (ys[x.shape] for x in (d.scores, d.logits, d.x, d.h))
    (ds, db), (dbias, _) = row[d.x.shape[1]], row[d.h.shape[1]]
    state = [x.copy() for x in (d.w, d.m, d.v)]
    calls = {
        "softmax forward": ([y], _call(lib.softmax_forward, d.scores, y, *y.shape)),
        "softmax backward": ([y], _call(lib.softmax_backward, d.weights, d.d_weights, y, *y.shape)),
        "cross-entropy both": ([loss, yx], _call(lib.cross_entropy, d.logits, d.targets, yx, loss, *yx.shape)),
        "layer norm forward": ([yl], _call(lib.norm_forward, d.x, d.scale, d.shift, yl, *left, *yl.shape, EPSILON)),
        "layer norm backward": (
            [yl, ds, db],
            _call(lib.norm_backward, d.x, d.scale, d.mean, d.inverse, d.dy, yl, ds, db, *yl.shape),
        ),
        "bias + relu forward": ([yn], _call(lib.relu_forward, d.h, d.bias, yn, *yn.shape)),
        "bias + relu backward": ([yn, dbias], _call(lib.relu_backward, d.y, d.dh, yn, dbias, *yn.shape)),
        "Adam": (
            [],
            _call(lib.adam, *state, d.g, d.w.size, RATE * d.correction1, d.correction2, BETA1, BETA2, ADAM_EPSILON),
        ),
    }
    return {name: _returning(results, run) for name, (results, run) in calls.items()}


def _returning(results: list, run: Any) -> Any:
    def call() -> list:
        run()
        return results

    return call
