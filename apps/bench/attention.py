"""One attention layer, forward and backward: with its scores stored, and a block at a time.

    python -m apps.bench.attention [--lengths 256,1024] [--repeats 7] [--whole]

Both programs run in turns in this process on one rank, so that a busy machine slows both; the
smallest time of each counts.  Set OMP_NUM_THREADS for the number of threads.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

import meshmpi as mm
from meshmpi.compiler.passes.pipeline import PASSES, optimize
from meshmpi.compiler.passes.tiled_regions import form_tiled_regions
from meshmpi.ir.program import Program
from meshmpi.runtime.compiled import CompiledStep

TOKENS, WIDTH, HEADS = 2048, 512, 8
LENGTHS = (256, 512, 1024, 2048, 4096)


class Measured(NamedTuple):
    """One program: its smallest time, memory beside variables, FLOP, and blocks."""

    seconds: float
    memory_bytes: int
    flops: int
    blocks: str


def attention_layer(length: int, causal: bool) -> tuple[mm.Graph, dict[str, mm.Tensor]]:
    """The layer with its projections; fetches its gradients.

    Args:
        length: Tokens of a sequence; the sequences have `TOKENS` tokens in all.
        causal: Whether a token sees only those before it.
    """
    with mm.Graph() as graph:
        dims = [("batch", max(1, TOKENS // length)), ("length", length), ("d_model", WIDTH)]
        x = mm.placeholder("x", [mm.Dimension(*d) for d in dims])
        memory = mm.rename_dimension(x, "length", "memory_length")
        d_kv, heads = mm.Dimension("d_kv", WIDTH // HEADS), mm.Dimension("heads", HEADS)
        y = mm.multihead_attention(x, memory, None, d_kv, heads, causal=causal)
        loss = mm.reduce_sum(mm.square(y))
        weights = [v.outputs[0] for v in graph.operations if type(v).__name__ == "Read"]
        fetches = {"loss": loss}
        gradients = mm.gradients([loss], [x, *weights])
        fetches |= {f"gradient {n}": g for n, g in enumerate(gradients)}
    return graph, fetches


def measure(length: int, causal: bool, repeats: int) -> tuple[Measured, Measured]:
    """(scores stored, scores a block at a time)."""
    graph, fetches = attention_layer(length, causal)
    lowered = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
    stored = optimize(lowered, tuple(p for p in PASSES if p is not form_tiled_regions))
    steps = [_step(p, fetches) for p in (stored, optimize(lowered))]
    shape = lowered.feeds["x"].shape.sizes
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for step in steps:
        step(x=x)
    best = [float("inf")] * 2
    for _ in range(repeats):
        for n, step in enumerate(steps):
            start = time.perf_counter()
            step._executor.run()
            best[n] = min(best[n], time.perf_counter() - start)
    first, second = (_measured(s, t) for s, t in zip(steps, best, strict=True))
    return first, second


def _step(program: Program, fetches: dict[str, mm.Tensor]) -> CompiledStep:
    return CompiledStep(program, mm.SimulatedMesh(program.mesh), fetches, None)


def _measured(step: CompiledStep, seconds: float) -> Measured:
    memory = step.held_memory
    over = ["+".join(map(str, i.attrs.over)) for i in step.program.instructions if i.kind == "loop"]
    held = memory["arena"] + memory["workspace"]
    return Measured(seconds, held, step.cost.flops, " and ".join(over))


def main() -> None:
    """Prints one row for each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="without a causal mask")
    options = parser.parse_args()
    print(f"d_model {WIDTH}, {HEADS} heads, {'whole' if options.whole else 'causal'}, float32")
    print("length  stored: ms   MB  GFLOP | blocks: ms   MB  GFLOP | ratio  blocks")
    for length in map(int, options.lengths.split(",")):
        a, b = measure(length, not options.whole, options.repeats)
        print(
            f"{length:6} {1e3 * a.seconds:10.1f} {a.memory_bytes / 2**20:5.0f} {a.flops / 1e9:6.1f}"
            f" | {1e3 * b.seconds:10.1f} {b.memory_bytes / 2**20:5.0f} {b.flops / 1e9:6.1f}"
            f" | {b.seconds / a.seconds:5.2f}  {b.blocks}",
            flush=True,
        )


if __name__ == "__main__":
    main()
