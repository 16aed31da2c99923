"""The yardstick step: all systems take turns, with the bare matrix products between any two.

The speed of a shared machine drifts by a quarter within minutes, so a system is divided by the mean
of the bare products measured just before and just after it, in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from apps.bench.bench import Bench
from apps.bench.step.systems import BARE, bare, systems
from apps.bench.step.yardstick import CHECKED
from apps.bench.tables import Cell, Table
from apps.bench.workers import BenchError, Result
from meshmpi.kernels import product_choice

TOLERANCE = 1e-3
"""Relative difference of the first losses between two systems that is put down to rounding."""
BARE_STEPS = 4


class Turn(NamedTuple):
    """One system in one round.

    Attributes:
        seconds: Median step of the slowest process.
        before, after: Seconds of the bare products around it.
        losses: First ones.
        peak_bytes: Largest peak of a process.
        results: As the processes printed them.
    """

    seconds: float
    before: float
    after: float
    losses: Sequence[float]
    peak_bytes: int
    results: Sequence[Result]

    @property
    def ratio(self) -> float:
        return 2 * self.seconds / (self.before + self.after)


def measure(bench: Bench) -> list[Table]:
    """The table of the yardstick step."""
    chosen = [s for s in systems(bench) if bench.effort.rounds > 1 or not s.extra]
    turns: dict[str, list[Turn]] = {s.name: [] for s in chosen}
    failed: dict[str, str] = {}
    before = _bare(bench)
    for number in range(bench.effort.rounds):
        for system in chosen:
            if system.name in failed:
                continue
            bench.say(f"step, round {number + 1} of {bench.effort.rounds}: {system.name}")
            try:
                results = system.run(bench, bench.effort.steps)
            except BenchError as error:
                failed[system.name] = str(error)
                bench.say(f"failed: {system.name}: {error}")
                continue
            after = _bare(bench)
            turns[system.name].append(_turn(results, before, after))
            before = after
    return [_table(bench, turns, failed)]


def _bare(bench: Bench) -> float:
    (result,) = bare()(bench, BARE_STEPS)
    return statistics.median(result["seconds"])


def _turn(results: Sequence[Result], before: float, after: float) -> Turn:
    return Turn(
        max(statistics.median(r["seconds"]) for r in results),
        before,
        after,
        results[0].get("losses", ()),
        max(r["peak_bytes"] for r in results),
        results,
    )


def check_losses(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """One line for each system whose first losses are not those of the first; or one for all.

    Args:
        losses: System -> its first losses.
    """
    if not losses:
        return []
    (reference, expected), *others = losses.items()
    lines, most = [], 0.0
    for name, found in others:
        off = max((abs(x - y) / abs(y) for x, y in zip(found, expected, strict=True)), default=0.0)
        most = max(most, off)
        if not off <= TOLERANCE:
            lines.append(
                f"**The first losses of {name} differ from those of {reference} by {off:.2g}**:"
                f" {_listed(found)} against {_listed(expected)}."
            )
    if lines:
        return lines
    return [
        f"First {CHECKED} losses of {reference}: {_listed(expected)}; the others' differ by at most"
        f" {most:.1e} (allowed: {TOLERANCE:g}), relatively."
    ]


def _listed(losses: Sequence[float]) -> str:
    return " ".join(f"{x:.5f}" for x in losses)


def _table(bench: Bench, turns: Mapping[str, Sequence[Turn]], failed: Mapping[str, str]) -> Table:
    calibrations = [t.before for ts in turns.values() for t in ts]
    rows: list[list[Cell]] = []
    if calibrations:
        name = f"{BARE} ({product_choice.chosen().name})"
        rows.append([name, 1e3 * statistics.median(calibrations), 1.0, None, None])
    for name, found in turns.items():
        if found:
            rows.append(_row(name, found))
    losses = {name: ts[0].losses for name, ts in turns.items() if ts and ts[0].losses}
    notes = [*check_losses(losses)]
    if calibrations:
        low, high = (1e3 * f(calibrations) for f in (min, max))
        notes.append(f"The bare products took {low:.3g} to {high:.3g} ms while this ran.")
    notes += bench.left_out("torch", "jax")
    notes += [f"Failed: {name}: {' '.join(why.split())}" for name, why in failed.items()]
    columns = ("system", "ms per step", "step / bare products", "peak MB per process", "share in collectives, %")
    title = f"One training step, {bench.effort.rounds} round(s) of {bench.effort.steps} steps"
    return Table("step", title, columns, rows, notes)


def _row(name: str, turns: Sequence[Turn]) -> list[Cell]:
    seconds = statistics.median(t.seconds for t in turns)
    waits = [sum(r["communicating"]) / sum(r["seconds"]) for t in turns for r in t.results if "communicating" in r]
    is_bare = name.startswith(BARE)
    return [
        name,
        1e3 * seconds,
        statistics.median(t.ratio for t in turns),
        None if is_bare else max(t.peak_bytes for t in turns) / 1e6,
        100 * statistics.median(waits) if waits else None,
    ]
