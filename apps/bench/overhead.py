"""What Python costs in a step: a program of about 300 instructions on tiny tensors.

Everything that a call of a step does is timed: feeds in, all instructions, fetches out.  Their own
work is some nanoseconds, so the time is that of calling them; it bounds from above what Python adds
to a step of a large model with as many instructions.
"""

from __future__ import annotations

import argparse
import statistics
import time

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.step.meshmpi_step import FREE
from apps.bench.step.systems import LAYOUTS
from apps.bench.step.yardstick import emit
from apps.bench.tables import Cell, Table
from meshmpi.kernels.native import available
from meshmpi.runtime.trace import Tracer

PAIRS = 150
"""Number of pairs of a contraction and a map."""
CALLS = 200


def measure(bench: Bench) -> list[Table]:
    """The table of tiny programs, and the share that it would be of the yardstick's step."""
    bench.say("overhead: tiny instructions")
    rows: list[list[Cell]] = []
    for kernels in ("native", "numpy") if available() else ("numpy",):
        asked = ["--kernels", kernels, "--pairs", str(PAIRS)]
        result = workers.alone(workers.PYTHON, "overhead", asked)
        each = 1e3 * result["milliseconds"] / result["instructions"]
        traced = 1e3 * (result["traced"] - result["milliseconds"]) / result["instructions"]
        rows.append([kernels, result["instructions"], result["milliseconds"], each, traced])
    columns = (
        "kernels",
        "instructions that run",
        "ms per step",
        "microseconds per instruction",
        "more where traced, microseconds",
    )
    title = "Python: a program of tiny instructions, one rank"
    each, traced = (float(rows[0][k] or 0) for k in (3, 4))
    return [Table("overhead", title, columns, rows), _share(bench, each, traced)]


def _share(bench: Bench, microseconds: float, traced: float) -> Table:
    """The share of a step of the model that this many microseconds per instruction are, on two ranks."""
    bench.say("overhead: the yardstick's instructions")
    asked = [
        "--start",
        str(bench.start()),
        "--mesh",
        "all:2",
        "--layout",
        LAYOUTS["data-parallel"],
        "--steps",
        str(min(8, bench.effort.steps)),
        "--traced",
    ]
    result = workers.on_ranks(2, "step.meshmpi_step", asked)[0]
    step = statistics.median(result["seconds"])
    spent = 1e-6 * microseconds * result["instructions"]
    plain = statistics.median(a for a, _ in result["pairs"])
    more = statistics.median(b - a for a, b in result["pairs"]) / plain
    row: list[Cell] = [
        result["instructions"],
        1e3 * spent,
        1e3 * step,
        100 * spent / step,
        1e-4 * traced * result["instructions"] / step,
        100 * more,
    ]
    columns = (
        "instructions",
        "ms for calling them",
        "ms per step",
        "% of the step",
        "% more where traced, at that rate",
        "% more where traced, measured",
    )
    title = "Python: the yardstick's instructions at that rate, two ranks"
    return Table("overhead share", title, columns, [row])


def main() -> None:
    """Worker: times the program in one process."""
    import meshmpi as mm

    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", default="native")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    with mm.Graph() as graph:
        y = mm.placeholder("x", "rows:4;columns:4")
        w = mm.get_variable("w", [("columns", 4), ("inner", 4)])
        for _ in range(options.pairs):
            y = mm.tanh(mm.rename_dimension(mm.einsum([y, w], "rows:4;inner:4"), "inner", "columns"))
        mean = mm.reduce_mean(y)
    import numpy as np

    step = mm.compile(graph, mm.Mesh("all:1"), fetches=[mean], kernels=options.kernels)
    fed = np.ones((4, 4), np.float32)

    def milliseconds() -> float:
        seconds = []
        for _ in range(CALLS):
            start = time.perf_counter()
            step(x=fed)
            seconds.append(time.perf_counter() - start)
        return 1e3 * statistics.median(seconds)

    plain = milliseconds()
    Tracer(step, CALLS)
    traced, counts = milliseconds(), step.program.counts()
    emit(
        milliseconds=plain,
        traced=traced,
        instructions=sum(n for kind, n in counts.items() if kind not in FREE),
        counts=counts,
    )


if __name__ == "__main__":
    main()
