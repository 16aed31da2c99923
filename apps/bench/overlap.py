"""A training step with reductions that block and with reductions in the background.

Both steps are compiled from one graph and run in turns, so that a machine that drifts does not
favour either.  Meant for a mesh that spans several hosts; inside one host nothing is gained, since
copying between processes takes the cores that compute.  One line per kind of step: median
milliseconds, milliseconds inside collectives and waits, bytes sent.

Run it with the launcher of the cluster, one rank per host:

    mpirun -n 2 --host a,b python -m apps.bench.overlap
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import meshmpi as mm
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings, transformer_config

CONFIG = Path(__file__).parents[1] / "transformer" / "configs" / "yardstick.toml"
VOCABULARY = 8192


def compiled_steps(mesh: mm.Mesh, config: str, layout: str, batch: int) -> dict[str, CompiledStep]:
    """Kind of step -> the compiled step; they share their variables."""
    settings = load(Settings, config, [f"train.batch={batch}"])
    built = build_training_graph(settings, transformer_config(settings.model, VOCABULARY))
    wanted: dict[str, Any] = {"fetches": [built.loss], "updates": built.updates}
    blocking = mm.compile(built.graph, mesh, layout, overlap=False, **wanted)
    wanted["variables"] = blocking.variables
    background = mm.compile(built.graph, mesh, layout, overlap=True, **wanted)
    return {"blocking": blocking, "background": background}


def measure(steps: dict[str, CompiledStep], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Kind of step -> (seconds, seconds in collectives and waits) of each round, in turns."""
    out: dict[str, list[tuple[float, float]]] = {kind: [] for kind in steps}
    rng = np.random.default_rng(0)
    for k in range(rounds + 1):
        for kind, step in steps.items():
            feeds = {n: rng.integers(0, 256, t.shape.sizes) for n, t in step.program.feeds.items()}
            step.mesh.comm.Barrier()
            before, began = step.comm_seconds, time.perf_counter()
            step(feeds)
            if k:  # the first touches every page and opens every connection
                seconds = time.perf_counter() - began
                out[kind].append((seconds, step.comm_seconds - before))
    return out


def main() -> None:
    """Runs both kinds of step in turns and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--layout", default="batch:ranks")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    from mpi4py import MPI

    mesh = mm.Mesh(f"ranks:{MPI.COMM_WORLD.size}")
    steps = compiled_steps(mesh, given.config, given.layout, given.batch)
    hosts, times = mesh.hosts, measure(steps, given.rounds)
    if mesh.rank:
        return
    print(f"{mesh.size} ranks on {hosts} hosts, layout {given.layout}")
    for kind, step in steps.items():
        total, waiting = (statistics.median(row) * 1e3 for row in zip(*times[kind], strict=True))
        started = sum(i.in_background for i in step.program.instructions)
        print(
            f"{kind:10}  {total:8.1f} ms a step, {waiting:8.1f} ms in collectives and waits,"
            f" {step.cost.bytes_sent / 1e6:.1f} MB sent, {started} reductions in the background"
        )


if __name__ == "__main__":
    main()
