"""Predicted beside measured times of one model in many layouts, and how well their orders agree.

What a layout search rests on: not that a prediction is right, but that what it calls faster is.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.step.yardstick import Sizes
from apps.bench.tables import Table

MODEL = Sizes(vocab=4096, length=128, d_model=256, d_ff=1024, heads=4, d_kv=64, layers=2, batch=8)
MESHES = ("rows:2", "rows:2;cols:2")
"""Those of more ranks than cores are left out."""
LAYOUTS = 24


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau: (pairs in the same order - pairs in the other) / all pairs.

    Source: Kendall 1938; ties count for neither.
    """
    total = agree = 0
    for i, j in itertools.combinations(range(len(a)), 2):
        x, y = a[i] - a[j], b[i] - b[j]
        agree += (x * y > 0) - (x * y < 0)
        total += 1
    return agree / total if total else 0.0


def measure(bench: Bench) -> list[Table]:
    """One table for each mesh that this machine has cores for."""
    from meshmpi.runtime.cores import available_cores

    cores = available_cores().logical
    tables = []
    for mesh in MESHES:
        ranks = 2 ** mesh.count(":")
        if ranks <= max(2, cores):
            bench.say(f"predictions: {LAYOUTS} layouts on {mesh}")
            tables.append(_table(bench, mesh, ranks))
    return tables


def _table(bench: Bench, mesh: str, ranks: int) -> Table:
    toy = bench.effort.points == 1
    sizes, count = (bench.effort.sizes, 3) if toy else (MODEL, LAYOUTS)
    rough = ["--repeats", "1", "--quick"] if toy else ["--repeats", "5"]
    asked = [
        "--sizes",
        *map(str, sizes),
        "--mesh",
        mesh,
        "--layouts",
        str(count),
        "--steps",
        str(bench.effort.steps),
        *rough,
    ]
    found = workers.on_ranks(ranks, "step.layouts_worker", asked)[0]["rows"]
    found.sort(key=lambda row: row[1])
    taken, predicted = [r[1] for r in found], [r[2] for r in found]
    ratios = [p / m for p, m in zip(predicted, taken, strict=True)]
    rows = [[layout or "(replicated)", 1e3 * m, 1e3 * p, p / m, bound] for layout, m, p, _, bound in found]
    best = taken[min(range(len(found)), key=predicted.__getitem__)]
    off = statistics.median(abs(r - 1) for r in ratios)
    notes = [
        f"Kendall's tau of predicted and measured order: {kendall_tau(predicted, taken):.3f}.",
        f"Prediction / measurement: median {statistics.median(ratios):.3f}, from {min(ratios):.3f}"
        f" to {max(ratios):.3f}; half of them are within {off:.1%}.",
        f"The layout predicted to be fastest takes {best / taken[0]:.3f} times the fastest one's time.",
        f"Model: {sizes}.",
    ]
    columns = ("layout", "measured ms", "predicted ms", "predicted / measured", "bound")
    return Table(f"predictions {mesh}", f"Layouts on {mesh}: measured and predicted steps", columns, rows, notes)
