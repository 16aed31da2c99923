"""Where one rank's share of the yardstick step goes, by kind of instruction and by instruction.

    python -m apps.bench.profile [--split data] [--longest 15]

One process plays one rank of two without the other: half of the batch, or half of the heads, of
d_ff and of the vocabulary.  Processor time is counted, so that other processes disturb less; what
ranks wait for each other is not seen here, `make bench` shows it.  The bare products of the same
rank take turns with the step.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from apps.bench.step.yardstick import TOY, Sizes
from apps.bench.tables import Table

RANKS = 2


class Part(NamedTuple):
    """One instruction.

    Attributes:
        what: Its result and the user's line.
        seconds: Least processor time of all rounds.
    """

    kind: str
    what: str
    seconds: float


def share(sizes: Sizes, split: str) -> Sizes:
    """What one of `RANKS` ranks computes, as a model of its own.

    Args:
        split: "data" or "model".
    """
    if split == "data":
        return sizes._replace(batch=sizes.batch // RANKS)
    return sizes._replace(heads=sizes.heads // RANKS, d_ff=sizes.d_ff // RANKS, vocab=sizes.vocab // RANKS)


def _executor(sizes: Sizes, dtype: str) -> Any:
    """The bound program of a step, with feeds in place."""
    import numpy as np

    import meshmpi as mm
    from apps.bench.step.meshmpi_step import settings
    from meshmpi.transformer.tasks.registry import build_training_graph
    from meshmpi.transformer.training.settings import transformer_config

    chosen = settings(sizes, dtype)
    built = build_training_graph(chosen, transformer_config(chosen.model, 1))
    mesh = mm.SimulatedMesh("all:1")
    step = mm.compile(built.graph, mesh, fetches=[built.loss], updates=built.updates)
    tokens = np.random.default_rng(3).integers(0, sizes.vocab, (sizes.batch, sizes.length + 1))
    step(tokens=tokens[:, :-1].astype(np.int32), targets=tokens[:, 1:].astype(np.int32))
    return step._executor


def _timed(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(sizes: Sizes, split: str, rounds: int, dtype: str = "") -> tuple[list[Part], float]:
    """The instructions of the step in their order, and seconds of its bare products.

    Args:
        split: What is divided between the ranks.
        rounds: Repetitions, of which the least time counts.
        dtype: Type of the activations; empty: float32.
    """
    from apps.bench.step.gemm_step import calls, products
    from meshmpi.kernels import product_choice

    executor = _executor(share(sizes, split), dtype)
    instructions = executor.program.instructions
    bound = [(i, call) for i in instructions for call in executor._bind(i)]
    bare = [
        call
        for times, call, _ in calls(products(sizes, split, RANKS), product_choice.chosen(), 0)
        for _ in range(times)
    ]
    least, least_bare = [float("inf")] * len(bound), float("inf")
    for _ in range(rounds):
        least = [min(s, _timed(call)) for s, (_, call) in zip(least, bound, strict=True)]
        least_bare = min(least_bare, sum(_timed(call) for call in bare))
    parts = []
    for seconds, (i, _) in zip(least, bound, strict=True):
        made = ", ".join(str(executor.program.types[v]) for v in i.outputs[:2])
        parts.append(Part(i.kind, f"{made} in {i.source.name}", seconds))
    return parts, least_bare


def table(parts: Sequence[Part], bare: float, longest: int) -> list[Table]:
    """Seconds by kind, and the instructions that take most."""
    by_kind: dict[str, list[float]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part.seconds)
    rows = sorted(([k, len(s), 1e3 * sum(s), sum(s) / bare] for k, s in by_kind.items()), key=lambda row: -row[2])
    whole = sum(part.seconds for part in parts)
    rows += [["all", len(parts), 1e3 * whole, whole / bare], ["bare products", None, 1e3 * bare, 1.0]]
    columns = ("kind", "instructions", "processor ms", "/ bare products")
    kinds = Table("profile", "One rank's step by kind of instruction", columns, rows)
    most = sorted(parts, key=lambda part: -part.seconds)[:longest]
    single = [[p.kind, 1e3 * p.seconds, p.what] for p in most]
    return [kinds, Table("longest", "The longest", ("kind", "processor ms", "makes"), single)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--split", choices=("data", "model"), default="data")
    parser.add_argument("--dtype", default="", help="of activations, as bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # NumPy's library may be loaded already
        parts, bare = measure(TOY if options.tiny else Sizes(), options.split, options.rounds, options.dtype)
    print("\n".join(t.markdown() for t in table(parts, bare, options.longest)))


if __name__ == "__main__":
    main()
