"""Worker: times all loops and products of one implementation, on one core with one thread."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from apps.bench.loops.data import NAMES, PRODUCTS, TOLERANCE, Data, error, product_name
from apps.bench.step.yardstick import emit, pin

LEAST_CALLS, MOST_CALLS = 3, 2000


def least_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The least time of a call, over as many calls as fit into ``seconds``."""
    least, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while calls < LEAST_CALLS or (calls < MOST_CALLS and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
        calls += 1
    return least


def _loops(name: str) -> tuple[Callable[[Data], Any], Callable[..., Any] | None]:
    """(loops, product) of an implementation, ``meshmpi-numpy`` being meshmpi on NumPy kernels."""
    if name == "jax":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    base, _, kernels = name.partition("-")
    module = importlib.import_module(f"apps.bench.loops.{base}_loops")
    if kernels:
        return lambda d: module.loops(d, kernels), None
    return module.loops, getattr(module, "product", None)


def main() -> None:
    """Prints one result: least nanoseconds per element, GFLOP/s, and errors of wrong loops."""
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each timing")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows")
    parser.add_argument("--no-products", action="store_true")
    options = parser.parse_args()
    pin(0)
    make, product = _loops(options.implementation)
    data = Data(options.scale)
    calls = make(data)
    found, wrong = {}, {}
    for name in NAMES:
        off = error(calls[name]() if data.answers(name) else [], data.answers(name))
        if not off <= TOLERANCE:
            wrong[name] = off
        calls[name]()
        found[name] = 1e9 * least_seconds(calls[name], options.seconds) / data.elements(name)
    rates = {}
    for sizes in () if options.no_products or product is None else PRODUCTS:
        call, flops = product(*sizes), 2 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
        call()
        rates[product_name(*sizes)] = 1e-9 * flops / least_seconds(call, options.seconds)
    emit(implementation=options.implementation, loops=found, wrong=wrong, products=rates)


if __name__ == "__main__":
    main()
