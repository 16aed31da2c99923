"""Runs one model in many layouts on the ranks of this job, beside their predicted times.

A machine drifts: it is calibrated in the same job, and that and all layouts take turns in several
rounds.  The median of all steps counts, and the mean of the predictions.  Rank 0 tells the rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

import meshmpi as mm
from apps.bench.step.meshmpi_step import settings
from apps.bench.step.yardstick import Sizes, emit
from meshmpi.planner.calibrate import calibrate
from meshmpi.planner.candidates import Candidate, Work, candidates
from meshmpi.planner.layout_search import digest
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training.settings import transformer_config

WARMING = 2
ROUNDS = 3


def chosen(found: list[Candidate], count: int) -> list[Candidate]:
    """So many of the candidates, evenly from the best guess to the worst."""
    if len(found) <= count:
        return found
    return [found[round(k * (len(found) - 1) / (count - 1))] for k in range(count)]


def with_storage(found: list[Candidate], work: Work) -> list[Candidate]:
    """The candidates, and each with the variables stored in parts along a dim that stays whole."""
    dims = list(dict.fromkeys(d for names in work.variables for d in names))
    out = []
    for c in found:
        out.append(c)
        axis = c.mesh.names[0]
        free = [d for d in dims if d not in c.layout and work.sizes[d] >= c.mesh.size]
        taken = [names for names in work.variables if any(axis in c.layout.get(e, ()) for e in names)]
        stored = next((d for d in free if not any(d in names for names in taken)), None)
        if stored is not None:
            out.append(c._replace(storage={stored: (axis,)}))
    return out


def measured(step: Any, sizes: Sizes, steps: int) -> list[float]:
    """Seconds of each step on the slowest rank."""
    rng = np.random.default_rng(0)
    feeds = {n: rng.integers(0, sizes.vocab, t.shape.sizes).astype(np.int32) for n, t in step.program.feeds.items()}
    seconds = []
    for k in range(WARMING + steps):
        step.mesh.comm.Barrier()
        began = time.perf_counter()
        step(feeds)
        if k >= WARMING:
            seconds.append(max(step.mesh.comm.allgather(time.perf_counter() - began)))
    return seconds


def rows_of(options: argparse.Namespace, mesh: mm.Mesh) -> list[list[Any]]:
    """Layout, measured and predicted seconds, first guess and bound, of each.  Collective."""
    sizes = Sizes(*options.sizes)
    asked = settings(sizes)
    built = build_training_graph(asked, transformer_config(asked.model, 1))
    work = digest(built.graph, [built.loss], built.updates)
    taken, told = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    layouts, about = list[Candidate](), dict[str, list[Any]]()
    for _ in range(ROUNDS):
        machine = mesh.comm.bcast(calibrate(mesh, repeats=options.repeats, quick=options.quick))
        if not layouts:
            found = with_storage(candidates(work, mesh.shape, machine), work)
            layouts = chosen(found, options.layouts)
        for c in layouts:
            step = mm.compile(
                built.graph,
                mesh,
                c.text,
                fetches=[built.loss],
                updates=built.updates,
                overlap=False,
                storage=c.storage_text or None,
            )
            name = c.text + (f", stored {c.storage_text}" if c.storage else "")
            predicted = mm.predict_time(step.program, machine)
            taken[name] += measured(step, sizes, options.steps)
            told[name].append(predicted.seconds)
            about[name] = [c.guess, predicted.bound]
    return [[name, statistics.median(taken[name]), statistics.fmean(told[name]), *about[name]] for name in taken]


def main() -> None:
    """Runs the layouts on the mesh of this job."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--mesh", default="rows:2")
    parser.add_argument("--layouts", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="calibrate roughly")
    options = parser.parse_args()
    mesh = mm.Mesh(options.mesh)
    rows = rows_of(options, mesh)
    emit(rank=mesh.rank, rows=rows if mesh.rank == 0 else [])


if __name__ == "__main__":
    main()
