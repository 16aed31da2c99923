"""Runs one model in many layouts on the ranks of this job, beside their predicted times.

The machine is calibrated in the same job, just before: a machine drifts.  Rank 0 tells the rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import meshmpi as mm
from apps.bench.step.meshmpi_step import settings
from apps.bench.step.yardstick import Sizes, emit
from meshmpi.layout_search import digest
from meshmpi.measuring.calibrate import calibrate
from meshmpi.planner.candidates import candidates
from meshmpi.train.model import build_training_graph
from meshmpi.train.settings import transformer_config

WARMING = 2


def chosen(found: list[Any], count: int) -> list[Any]:
    """So many of the candidates, evenly from the best guess to the worst."""
    if len(found) <= count:
        return found
    return [found[round(k * (len(found) - 1) / (count - 1))] for k in range(count)]


def measured(step: Any, sizes: Sizes, steps: int) -> float:
    """Median seconds of a step on the slowest rank."""
    rng = np.random.default_rng(0)
    feeds = {
        n: rng.integers(0, sizes.vocab, t.shape.sizes).astype(np.int32)
        for n, t in step.program.feeds.items()
    }
    seconds = []
    for k in range(WARMING + steps):
        step.mesh.comm.Barrier()
        began = time.perf_counter()
        step(feeds)
        if k >= WARMING:
            seconds.append(max(step.mesh.comm.allgather(time.perf_counter() - began)))
    return statistics.median(seconds)


def main() -> None:
    """Calibrates, then runs the layouts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--mesh", default="rows:2")
    parser.add_argument("--layouts", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="calibrate roughly")
    options = parser.parse_args()
    sizes, mesh = Sizes(*options.sizes), mm.Mesh(options.mesh)
    machine = mesh.comm.bcast(calibrate(mesh, repeats=options.repeats, quick=options.quick))
    asked = settings(sizes)
    built = build_training_graph(asked, transformer_config(asked.model, 1))
    work = digest(built.graph, [built.loss], built.updates)
    rows = []
    for c in chosen(candidates(work, mesh.shape, machine), options.layouts):
        step = mm.compile(
            built.graph, mesh, c.text, fetches=[built.loss], updates=built.updates, overlap=False
        )
        predicted = mm.predict_time(step.program, machine)
        seconds = measured(step, sizes, options.steps)
        rows.append([c.text, seconds, predicted.seconds, c.guess, predicted.bound])
    emit(rank=mesh.rank, rows=rows if mesh.rank == 0 else [])


if __name__ == "__main__":
    main()
