"""Weak scaling measured here: the work of a rank stays, ranks are added, beside its prediction.

Each number of ranks is a job of its own, which calibrates, trains and calibrates again: the speed
of a machine drifts, and what is predicted is the mean of both.  Ranks that share cores are
calibrated so too: what is predicted is what this machine does with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import meshmpi as mm
from meshmpi.errors import MeshmpiError
from meshmpi.launch.launch import launch
from meshmpi.planner.calibrate import calibrate
from meshmpi.runtime.world import world_size

KINDS = {"data": "batch:all", "model": "heads:all;d_ff:all;vocab:all"}
"""What grows with the ranks: the batch, or heads, d_ff and vocabulary."""
BATCH, HEADS, D_FF, VOCAB = 4, 2, 512, 2048
WARMING = 2


def config(kind: str, ranks: int, tiny: bool) -> tuple[mm.transformer.TransformerConfig, int]:
    """The model for a number of ranks, and its batch."""
    n = ranks if kind == "model" else 1
    model = mm.transformer.TransformerConfig(
        vocab=(32 if tiny else VOCAB) * n,
        length=16 if tiny else 128,
        d_model=16 if tiny else 256,
        d_ff=(32 if tiny else D_FF) * n,
        heads=HEADS * n,
        d_kv=4 if tiny else 64,
        layers=2,
    )
    return model, BATCH * (ranks if kind == "data" else 1)


def run(kind: str, steps: int, tiny: bool) -> dict[str, float]:
    """Measures on the ranks of this job.  Collective."""
    ranks = world_size()
    mesh = mm.Mesh(f"all:{ranks}")
    model, batch = config(kind, ranks, tiny)
    with mm.Graph() as graph:
        tokens, targets = (
            mm.placeholder(n, [("batch", batch), ("length", model.length)], "int32") for n in ("tokens", "targets")
        )
        loss, _ = mm.transformer.lm_loss(model, tokens, targets, training=True)
        updates = mm.optimize.Adam(1e-3).minimize(loss)
    step = mm.compile(graph, mesh, KINDS[kind], fetches=[loss], updates=updates)

    def predicted() -> float:
        machine = mesh.comm.bcast(calibrate(mesh, repeats=1 if tiny else 5, quick=tiny))
        return mm.predict_time(step.program, machine).seconds

    before = predicted()
    ids = np.random.default_rng(0).integers(0, model.vocab, (batch, model.length), np.int32)
    seconds = []
    for k in range(WARMING + steps):
        mesh.comm.Barrier()
        began = time.perf_counter()
        step(tokens=ids, targets=ids)
        if k >= WARMING:
            seconds.append(max(mesh.comm.allgather(time.perf_counter() - began)))
    return {
        "rank": mesh.rank,
        "ranks": ranks,
        "seconds": statistics.median(seconds),
        "predicted": (before + predicted()) / 2,
        "flops": step.cost.flops,
        "memory": step.held_bytes,
        "planned": step.cost.peak_memory,
    }


def curve(kind: str, ranks: list[int], steps: int, tiny: bool) -> list[str]:
    """A line for each number of ranks."""
    lines = [
        f"weak scaling, {kind} ({KINDS[kind]})",
        f"{'ranks':>6}{'ms/step':>10}{'predicted':>11}{'difference':>12}{'efficiency':>12}"
        f"{'predicted':>11}{'MB a rank':>11}",
    ]
    first: dict[str, float] = {}
    for n in ranks:
        own = ["-m", "apps.scaling.weak", kind, "--steps", str(steps)]
        done = launch(
            n,
            own + (["--tiny"] if tiny else []),
            threads=1,
            capture_output=True,
            timeout_seconds=600,
            cwd=Path(__file__).parents[2],
        )
        if done.returncode:
            raise MeshmpiError(f"{n} ranks failed: {done.stderr[-500:]}", "Run it by hand.")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        first = first or found
        assert found["memory"] == found["planned"]
        lines.append(
            f"{n:>6}{1e3 * found['seconds']:>10.1f}{1e3 * found['predicted']:>11.1f}"
            f"{found['seconds'] / found['predicted'] - 1:>+12.0%}"
            f"{first['seconds'] / found['seconds']:>12.0%}"
            f"{first['predicted'] / found['predicted']:>11.0%}{found['memory'] / 1e6:>11.1f}"
        )
    return lines


def main() -> None:
    """One number of ranks; started by `curve`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    found = run(options.kind, options.steps, options.tiny)
    if found["rank"] == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
