"""Worker: causal attention, forward and backward, in one implementation at one length; one core."""

from __future__ import annotations

import argparse
import importlib
import os

from apps.bench.loops.data import attention_inputs, sizes_of_results
from apps.bench.loops.worker import least_seconds
from apps.bench.step.yardstick import emit, peak_bytes, pin

REPEATS = 3
"""Repetitions of a layer."""


def main() -> None:
    """Prints one result: least seconds, sizes of the results, memory taken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    if options.implementation == "jax":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    pin(0)
    if options.implementation == "layer":
        _layer(options.length)
        return
    module = importlib.import_module(f"apps.bench.loops.{options.implementation}_loops")
    arrays, before = attention_inputs(options.length), peak_bytes()
    call = module.attention(arrays)
    found = call()
    seconds = least_seconds(call, options.seconds)
    emit(seconds=seconds, results=sizes_of_results(found), taken_bytes=peak_bytes() - before)


def _layer(length: int) -> None:
    """A whole layer of meshmpi, with its scores stored and a block at a time."""
    from apps.bench.attention import measure

    stored, blocked = measure(length, True, REPEATS)
    both = (stored, blocked)
    emit(seconds=[m.seconds for m in both], held=[m.memory_bytes for m in both])


if __name__ == "__main__":
    main()
