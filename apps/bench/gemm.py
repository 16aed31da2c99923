"""The matrix products of one training step: bound kernels, np.matmul and bare BLAS side by side.

``python -m apps.bench.gemm`` takes the contract instructions from the program of a configuration,
with the block sizes of rank 0, and times each of them on one thread

- as the executor binds it, once with every BLAS library that is installed ("bound"),
- as plain np.matmul on the same strided arrays ("matmul"),
- as the library's own call on contiguous matrices of the same sizes ("bare").

All variants of an instruction take turns, so that a machine that drifts drifts for all, and it is
processor time that is counted, so that other processes disturb less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.ir.program import LocalType, Program
from meshmpi.kernels import Runtime, blas, numpy_dtype
from meshmpi.kernels.binding import Call, Operand, local_call
from meshmpi.kernels.contraction import plan_contract
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training import config
from meshmpi.transformer.training.settings import Settings, transformer_config

CONFIG = Path(__file__).parent.parent / "transformer/configs/yardstick.toml"
LAYOUTS = {"data-parallel": "batch:rows", "model-parallel": "heads:rows;d_ff:rows;vocab:rows"}
Kernel = Callable[[], None]


def contracts(program: Program) -> Counter[str]:
    """Number of contract instructions by their blocks on rank 0, written as text."""
    return Counter(_text(call) for call in _calls(program))


def _calls(program: Program) -> list[Call]:
    """The contract instructions of a program as rank 0 sees them."""
    origin = dict.fromkeys(program.mesh.names, 0)
    kinds = [i for i in program.instructions if i.kind == "contract"]
    return [local_call(i, program, origin) for i in kinds]


def _text(call: Call) -> str:
    blocks = [" ".join(f"{d}={n}" for d, n in x.extents().items()) for x in (*call.inputs, *call.outputs)]
    return f"[{blocks[0]}] [{blocks[1]}] -> [{blocks[2]}]"


def _as(call: Call, dtype: str) -> Call:
    """The same contraction with another data type."""

    def changed(x: Operand) -> Operand:
        t = x.type
        return x._replace(type=LocalType(t.shape, dtype, t.splits, t.partial, t.pending))

    ins, outs = ([changed(x) for x in xs] for xs in (call.inputs, call.outputs))
    return call._replace(inputs=tuple(ins), outputs=tuple(outs))


def _numbers(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def variants(call: Call, dtype: str, libraries: Sequence[blas.Blas]) -> dict[str, Kernel]:
    """Ways to compute one contraction.

    Args:
        call: The instruction.
        dtype: Data type of its operands and result.
        libraries: Installed ones.

    Returns:
        "bound <library>" and "bare <library>" for each that can, and "matmul".
    """
    call = _as(call, dtype)
    plan = plan_contract(call)
    ins = [_numbers(x.sizes, dtype, seed) for seed, x in enumerate(call.inputs)]
    outs = [np.zeros(x.sizes, numpy_dtype(dtype)) for x in call.outputs]
    workspace = np.zeros(plan.workspace_bytes, np.uint8)
    found: dict[str, Kernel] = {}
    for library in libraries:
        bound = plan.bind(ins, outs, workspace, Runtime(blas=library.name))
        found["matmul" if library.name == "numpy" else f"bound {library.name}"] = bound
    count, m, n, k = _sizes(call)
    a, b = _numbers((count, m, k), dtype, 2), _numbers((count, k, n), dtype, 3)
    y = np.zeros((count, m, n), np.float32 if dtype == "bfloat16" else numpy_dtype(dtype))
    for library in libraries:
        bare = library.gemm(a, b, y)
        if bare is not None:
            found[f"bare {library.name}"] = bare
    return found


def _sizes(call: Call) -> tuple[int, int, int, int]:
    """Number of products, and rows, columns and summed elements of each."""
    a, b, y = (x.extents() for x in (*call.inputs, *call.outputs))
    count = m = n = k = 1
    for name, size in {**a, **b}.items():
        if name in a and name in b and name in y:
            count *= size
        elif name not in y:
            k *= size
        elif name in a:
            m *= size
        else:
            n *= size
    return count, m, n, k


def measure(kernels: Mapping[str, Kernel], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of ``rounds`` calls of each kernel, in turns, after one to warm up.

    Each round starts with another kernel: who follows whom matters, as caches are shared.
    """
    for kernel in kernels.values():
        kernel()
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    order = list(kernels.items())
    for _ in range(rounds):
        order = order[1:] + order[:1]
        for name, kernel in order:
            start = time.thread_time()
            kernel()
            seconds[name].append(time.thread_time() - start)
    return seconds


def training_program(settings: Settings, layout: str, ranks: int) -> Program:
    """The program of a training step with these settings."""
    built = build_training_graph(settings, transformer_config(settings.model, 1))
    found = mm.plan(built.graph, f"rows:{ranks}", layout, fetches=[built.loss], updates=built.updates)
    return found.program


def report(program: Program, dtype: str, rounds: int, each: bool) -> list[str]:
    """The table of one program and data type, as lines.

    Args:
        dtype: In which its contractions are timed.
        rounds: Calls of each variant.
        each: Whether to list every different contraction.
    """
    libraries = _libraries()
    minima: dict[str, float] = {}
    medians: dict[str, float] = {}
    flops, lines = 0, []
    one_of = {_text(call): call for call in _calls(program)}
    for text, times in contracts(program).items():
        seconds = measure(variants(one_of[text], dtype, libraries), rounds)
        count, m, n, k = _sizes(one_of[text])
        flops += times * 2 * count * m * n * k
        for name, found in seconds.items():
            minima[name] = minima.get(name, 0.0) + times * min(found)
            medians[name] = medians.get(name, 0.0) + times * statistics.median(found)
        if each:
            lines.append(f"  {times} x {text}: {count} of {m} x {k} x {n}, GFLOP/s:")
            rates = {name: 2e-9 * count * m * n * k / min(s) for name, s in seconds.items()}
            lines.append("      " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    base = min((n for n in minima if n.startswith("bare")), key=lambda n: minima[n], default="matmul")
    lines.append(f"  {'':16} {'min ms':>8} {'median':>8} {'GFLOP/s':>8}  min / {base}")
    for name in sorted(minima, key=lambda n: minima[n]):
        lines.append(
            f"  {name:16} {1e3 * minima[name]:8.1f} {1e3 * medians[name]:8.1f}"
            f" {1e-9 * flops / minima[name]:8.0f}  {minima[name] / minima[base]:.3f}"
        )
    return lines


def _libraries() -> list[blas.Blas]:
    found = []
    for name in blas.NAMES:
        try:
            found.append(blas.find(name))
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def choice() -> list[str]:
    """Milliseconds of the products by which a library is chosen, for each that can be used."""
    from meshmpi.kernels import product_choice

    kinds = product_choice.kinds(bfloat16=True)
    found = product_choice.time_products(kinds)
    return [f"{kind:28} {1e3 * s:7.3f} ms" for kind, s in sorted(found.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the model")
    parser.add_argument("--set", action="append", default=[], help="a setting, as in model.layers=2")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="by default both")
    parser.add_argument("--dtype", action="append", help="by default float32 and bfloat16")
    parser.add_argument("--ranks", type=int, default=2, help="of which rank 0 is timed")
    parser.add_argument("--rounds", type=int, default=7, help="calls of each variant")
    parser.add_argument(
        "--choice", action="store_true", help="only the small products by which a library is chosen, measured now"
    )
    parser.add_argument("--each", action="store_true", help="list every contraction")
    options = parser.parse_args(arguments)
    os.environ["MKL_NUM_THREADS"] = "1"  # read when MKL is loaded; NumPy's library already is
    threadpool_limits(1)
    if options.choice:
        print("\n".join(choice()))
        return
    settings = config.load(Settings, options.config, options.set)
    for library in _libraries():
        print(f"{library.name} {library.version}, {library.threads} threads")
    for name in options.layout or LAYOUTS:
        program = training_program(settings, LAYOUTS[name], options.ranks)
        for dtype in options.dtype or ("float32", "bfloat16"):
            print(f"{name}, {options.ranks} ranks, {dtype}:")
            print("\n".join(report(program, dtype, options.rounds, options.each)))


if __name__ == "__main__":
    main()
