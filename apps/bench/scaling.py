"""How the time of a step and of lowering grows with the model and with the ranks.

One size is changed at a time, from a model a quarter as wide as the yardstick; ranks divide the
same batch.  Steps are `apps.bench.step.meshmpi_step`'s, lowering with all passes is timed in rank 0
by a second `mm.plan` after the steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.step.systems import LAYOUTS
from apps.bench.step.yardstick import Sizes
from apps.bench.tables import Table

BASE = Sizes(vocab=2048, length=128, d_model=128, d_ff=512, heads=2, d_kv=64, layers=2, batch=8)
SERIES = {"d_model": (64, 128, 256, 512), "layers": (1, 2, 4, 8), "length": (64, 128, 256, 512), "ranks": (1, 2, 4)}
RANKS = 2
STEPS = 5


def points(bench: Bench) -> Iterator[tuple[str, int, Sizes, int]]:
    """(what is changed, its value, sizes, ranks); smaller efforts take the first values only."""
    toy = bench.effort.points == 1
    base = bench.effort.sizes if toy else BASE
    for name, values in SERIES.items():
        for value in values[: bench.effort.points]:
            if name == "ranks":
                yield name, value, base, value
            elif toy:
                yield name, getattr(base, name), base, RANKS
            elif name == "d_model":
                heads = max(1, value // base.d_kv)
                wide = {"d_model": value, "d_ff": 4 * value, "heads": heads}
                yield name, value, base._replace(**wide), RANKS
            else:
                yield name, value, base._replace(**{name: value}), RANKS


def measure(bench: Bench) -> list[Table]:
    """The table of all series."""
    rows = []
    for name, value, sizes, ranks in points(bench):
        bench.say(f"scaling: {name} {value}")
        asked = [
            "--start",
            str(bench.start(sizes)),
            "--mesh",
            f"all:{ranks}",
            "--layout",
            LAYOUTS["data-parallel"],
            "--steps",
            str(min(STEPS, bench.effort.steps)),
            "--plan",
        ]
        results = workers.on_ranks(ranks, "step.meshmpi_step", asked)
        seconds = max(statistics.median(r["seconds"]) for r in results)
        first = results[0]
        rate = 1e-9 * sum(r["flops"] for r in results) / seconds
        rows.append([name, value, ranks, 1e3 * seconds, rate, first["plan_seconds"], first["instructions"]])
    columns = (
        "changed",
        "to",
        "ranks",
        "ms per step",
        "GFLOP/s of all ranks",
        "lowering and passes, s",
        "instructions",
    )
    notes = [
        f"From vocab {BASE.vocab}, length {BASE.length}, d_model {BASE.d_model}, d_ff 4 x d_model,"
        f" {BASE.layers} layers, batch {BASE.batch}; data-parallel, one thread a rank.",
        "More ranks than cores share them.",
    ]
    return [Table("scaling", "Scaling", columns, rows, notes)]
