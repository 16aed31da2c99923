"""Tables of the loops and of the products: every implementation of `apps.bench.loops` in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.loops.data import NAMES, PRODUCTS, product_name
from apps.bench.tables import Table
from apps.bench.workers import BenchError, Result
from meshmpi.kernels.native import available

IMPLEMENTATIONS = {
    "meshmpi": "meshmpi, generated C",
    "meshmpi-numpy": "meshmpi, NumPy",
    "numpy": "NumPy, out=",
    "c": "plain C",
    "torch": "PyTorch",
    "jax": "jax.jit",
}
NEEDS_COMPILER = ("meshmpi", "c")
Found = Mapping[str, Sequence[Result]]


def measure(bench: Bench) -> list[Table]:
    """Both tables."""
    found: dict[str, list[Result]] = {name: [] for name in IMPLEMENTATIONS}
    notes = ["One core, one thread; the least time of all calls and rounds."]
    for name, why in _left_out(bench).items():
        found.pop(name)
        notes.append(f"Left out: {IMPLEMENTATIONS[name]}: {why}")
    for number in range(bench.effort.rounds):
        for name in list(found):
            bench.say(f"loops, round {number + 1} of {bench.effort.rounds}: {name}")
            try:
                found[name].append(_one(bench, name))
            except BenchError as error:
                notes.append(f"Failed: {IMPLEMENTATIONS[name]}: {' '.join(str(error).split())}")
                found.pop(name)
    for name, results in found.items():
        for loop, off in results[0]["wrong"].items():
            notes.append(f"**{IMPLEMENTATIONS[name]} computes {loop} wrong, by {off:.2g}.**")
    return [_loops(found, notes), _products(found)]


def _left_out(bench: Bench) -> dict[str, str]:
    missing = {name: why for name, why in bench.peers.missing.items() if name in IMPLEMENTATIONS}
    if not available():
        missing |= dict.fromkeys(NEEDS_COMPILER, "there is no C compiler")
    return missing


def _one(bench: Bench, name: str) -> Result:
    python = bench.peers.python if name in ("torch", "jax") else workers.PYTHON
    e = bench.effort
    asked = [name, "--seconds", str(e.seconds), "--scale", str(e.scale)]
    return workers.alone(python, "loops.worker", asked)


def _loops(found: Found, notes: Sequence[str]) -> Table:
    rows = []
    for loop in NAMES:
        least = {name: min(r["loops"][loop] for r in results) for name, results in found.items()}
        ratio = least["meshmpi"] / least["c"] if {"meshmpi", "c"} <= least.keys() else None
        rows.append([loop, *least.values(), ratio])
    columns = ("loop", *(IMPLEMENTATIONS[name] for name in found), "meshmpi / plain C")
    return Table("loops", "Loops of a step, nanoseconds per element", columns, rows, notes)


def _products(found: Found) -> Table:
    can = {n: rs for n, rs in found.items() if rs and rs[0]["products"]}
    rows = []
    for sizes in PRODUCTS:
        name = product_name(*sizes)
        rates = (max(r["products"][name] for r in results) for results in can.values())
        rows.append([name, *rates])
    rows.append(["median", *(_median(rs) for rs in can.values())])
    columns = ("rows x summed x columns", *(IMPLEMENTATIONS[name] for name in can))
    return Table("products", "Matrix products, float32, GFLOP/s of one core", columns, rows)


def _median(results: Sequence[Result]) -> float:
    return statistics.median(rate for r in results for rate in r["products"].values())
