"""Worker: only the matrix products of one yardstick step, as bare calls of a BLAS library.

The lower bound that all systems are divided by.  Products and their sizes are those of a textbook
step, attention counted whole (causal blocks not skipped); operands are contiguous, results have
arrays of their own.  Two processes, each bound to a core, begin each repetition together.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from apps.bench.step.yardstick import Sizes, Start, emit, pin


class Product(NamedTuple):
    """``times`` calls of ``count`` products of an [m, k] with a [k, n] matrix."""

    times: int
    count: int
    m: int
    k: int
    n: int
    left_transposed: bool = False
    right_transposed: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.times * self.count * self.m * self.k * self.n


def products(s: Sizes, split: str, processes: int) -> list[Product]:
    """The products of forward and backward in one of the processes.

    Args:
        s: Sizes of the model.
        split: "data" divides the batch, "model" heads, d_ff and vocab.
        processes: How many there are.
    """
    data, model = (processes, 1) if split == "data" else (1, processes)
    heads, d_ff, vocab = s.heads // model, s.d_ff // model, s.vocab // model
    batch = s.batch // data
    rows, wide = batch * s.length, heads * s.d_kv
    found = []
    for times, k, n in (
        (3 * s.layers, s.d_model, wide),
        (s.layers, wide, s.d_model),
        (s.layers, s.d_model, d_ff),
        (s.layers, d_ff, s.d_model),
        (1, s.d_model, vocab),
    ):
        found += [
            Product(times, 1, rows, k, n),
            Product(times, 1, rows, n, k, right_transposed=True),
            Product(times, 1, k, rows, n, left_transposed=True),
        ]
    scores = (batch * heads, s.length, s.d_kv, s.length)
    values = (batch * heads, s.length, s.length, s.d_kv)
    # q k' and dy v'; p v and ds k; p' dy and ds' q
    found += [Product(2 * s.layers, *scores, right_transposed=True), Product(2 * s.layers, *values)]
    return [*found, Product(2 * s.layers, *values, left_transposed=True)]


def calls(wanted: list[Product], blas: Any, seed: int) -> list[tuple[int, Any, tuple]]:
    """(times, bound call, its operands and result) of each product."""
    import numpy as np

    random = np.random.default_rng(seed)

    def matrix(count: int, rows: int, columns: int, transposed: bool) -> Any:
        sizes = (count, columns, rows) if transposed else (count, rows, columns)
        x = random.standard_normal(sizes, np.float32)
        return x.swapaxes(1, 2) if transposed else x

    found = []
    for p in wanted:
        a = matrix(p.count, p.m, p.k, p.left_transposed)
        b = matrix(p.count, p.k, p.n, p.right_transposed)
        y = np.zeros((p.count, p.m, p.n), np.float32)
        bound = blas.gemm(a, b, y)
        found.append((p.times, bound or _matmul(a, b, y), (a, b, y)))
    return found


def _matmul(a: Any, b: Any, y: Any) -> Any:
    import numpy as np

    return lambda: np.matmul(a, b, out=y)


def _work(rank: int, options: argparse.Namespace, barrier: Any, queue: Any) -> None:
    pin(rank)
    from meshmpi.kernels import blas, product_choice

    library = blas.find(options.library) if options.library else product_choice.chosen()
    sizes = Start(options.start).sizes
    prepared = calls(products(sizes, options.split, options.processes), library, rank)
    seconds = []
    for _ in range(options.steps + 1):
        barrier.wait()
        start = time.perf_counter()
        for times, call, _ in prepared:
            for _ in range(times):
                call()
        seconds.append(time.perf_counter() - start)
    queue.put((seconds[1:], library.name, library.version))


def main() -> None:
    """Times the products in all processes and prints one result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--library", default="", help="mkl, openblas or numpy; default the best")
    parser.add_argument("--split", choices=("data", "model"), default="data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = mp.get_context("spawn")
    barrier, queue = context.Barrier(options.processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(rank, options, barrier, queue), daemon=True)
        for rank in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    slowest = [max(times) for times in zip(*(seconds for seconds, _, _ in found), strict=True)]
    sizes = Start(options.start).sizes
    flops = sum(p.flops for p in products(sizes, options.split, options.processes))
    emit(
        rank=0,
        seconds=slowest,
        library=found[0][1],
        version=found[0][2],
        flops=flops,
        rate=flops / statistics.median(slowest),
    )


if __name__ == "__main__":
    main()
