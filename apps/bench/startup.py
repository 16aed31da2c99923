"""How long starting takes, from the start of a rank's process to a step that is ready to run.

Each part once with an empty cache of kernels (cold) and then again (warm), on the yardstick; the
first variables have their values by then, no step has run.  The same for planning alone, in one
process without MPI, and for the build of all kernels, in a process that has compiled nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.step.systems import LAYOUTS
from apps.bench.step.yardstick import emit
from apps.bench.tables import Cell, Table

RANKS = 2
WARM_STARTS = 3


def measure(bench: Bench) -> list[Table]:
    """The table of starting, cold and warm, and that of planning and building."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"MESHMPI_CACHE": cache}
        runs = []
        for number in range(1 + WARM_STARTS):
            bench.say(f"start-up: {'warm' if number else 'cold'} start {number or ''}")
            runs.append(_start(bench, environment))
    cold, warm = runs[0], runs[1:]
    rows: list[list[Cell]] = []
    for name in cold[0]:
        row: list[Cell] = [name, cold[0][name]]
        for measured in zip(*warm, strict=True):  # wall, then processor
            known = [part[name] for part in measured if name in part]
            row.append(statistics.median(known) if known else None)
        rows.append(row)
    notes = [
        "Rank 0 of 2. The launcher is mpirun's time before the process starts, and after its end.",
        f"Warm: the median of {WARM_STARTS}.",
    ]
    tables = [
        Table("start", "Start-up of the yardstick, seconds", ("part", "cold", "warm", "warm, processor"), rows, notes)
    ]
    return [*tables, _alone(bench)]


def _start(bench: Bench, environment: dict[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each part, on the wall and of the processor."""
    began = time.perf_counter()
    arguments = [
        "--start",
        str(bench.start()),
        "--mesh",
        f"all:{RANKS}",
        "--layout",
        LAYOUTS["data-parallel"],
        "--steps",
        "-1",
    ]
    result = workers.on_ranks(RANKS, "step.meshmpi_step", arguments, environment=environment)[0]
    whole = time.perf_counter() - began
    wall = {**result["parts"], "ready": result["ready"], "launcher": whole - result["ready"]}
    return wall, {**result["processor"], "ready": sum(result["processor"].values())}


def _alone(bench: Bench) -> Table:
    """Planning and building in a process of its own."""
    bench.say("start-up: planning and kernels alone")
    rows: list[list[Cell]] = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as cache:
            result = workers.alone(
                workers.PYTHON,
                "startup",
                ["--start", str(bench.start()), "--layout", layout],
                environment={"MESHMPI_CACHE": cache},
            )
        rows.append(
            [
                layout,
                *(result[x] for x in ("import", "graph", "plan", "build", "load")),
                result["functions"],
                result["instructions"],
            ]
        )
    columns = (
        "layout",
        "import",
        "graph",
        "lowering and passes",
        "cold build of kernels",
        "with cached kernels",
        "C functions",
        "instructions",
    )
    return Table("planning", "Planning and building alone, seconds", columns, rows)


def main() -> None:
    """Worker: one process without MPI."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--layout", required=True)
    options = parser.parse_args()
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    import meshmpi as mm
    from apps.bench.step.meshmpi_step import settings
    from apps.bench.step.yardstick import Start
    from meshmpi.kernels.native import CompilerError, NativeKernels
    from meshmpi.transformer.tasks.registry import build_training_graph
    from meshmpi.transformer.training.settings import transformer_config

    mark()
    chosen = settings(Start(options.start).sizes)
    built = build_training_graph(chosen, transformer_config(chosen.model, 1))
    mark()
    planned = mm.plan(built.graph, f"all:{RANKS}", LAYOUTS[options.layout], fetches=[built.loss], updates=built.updates)
    mark()
    functions = None
    try:
        for _ in range(2):
            origin = dict.fromkeys(planned.program.mesh.names, 0)
            functions = NativeKernels(planned.program, [origin]).functions
            mark()
    except CompilerError:
        marks += [float("nan")] * 2
    spent = [b - a for a, b in itertools.pairwise(marks)]
    found = dict(zip(("import", "graph", "plan", "build", "load"), spent, strict=True))
    if functions is None:
        found |= {"build": None, "load": None}
    emit(**found, functions=functions, instructions=len(planned.program.instructions), cores=os.cpu_count())


if __name__ == "__main__":
    main()
