"""Systems that do the same work take turns, and are compared with a peer on as many cores."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apps.bench.bench import Bench
from apps.bench.workers import BenchError, Result

Rounds = Mapping[str, Sequence[Sequence[Result]]]
"""System -> the results of its processes, round by round."""


class System(NamedTuple):
    """One way to do a case.

    Attributes:
        name: For the table.
        cores: With which others it is compared.
        run: (bench, case, model, steps) -> results of its processes.
        peer: Whether it is another project's.
        least_batch: Smaller batches are not given to it.
    """

    name: str
    cores: int
    run: Callable[[Bench, Any, Path, int], list[Result]]
    peer: bool = False
    least_batch: int = 1


def take_turns(
    bench: Bench, title: str, case: Any, model: Path, chosen: Sequence[System], steps: int, notes: list[str]
) -> Rounds:
    """Runs every system once in each round; one that fails is noted and left out from then on."""
    found: dict[str, list[list[Result]]] = {s.name: [] for s in chosen}
    failed: list[str] = []
    for number in range(bench.effort.rounds):
        for system in chosen:
            if system.name in failed:
                continue
            bench.say(f"{title}, round {number + 1}: {system.name}")
            try:
                found[system.name].append(system.run(bench, case, model, steps))
            except BenchError as error:
                failed.append(system.name)
                notes.append(f"Failed: {title}, {system.name}: {' '.join(str(error).split())}")
    return found


def median_seconds(found: Rounds) -> dict[str, float]:
    """System -> the median over rounds of the slowest process's median."""
    return {
        name: statistics.median(max(statistics.median(r["seconds"]) for r in results) for results in rounds)
        for name, rounds in found.items()
        if rounds
    }


def peer_seconds(chosen: Sequence[System], seconds: Mapping[str, float]) -> dict[int, float]:
    """Number of cores -> seconds of the peer that ran on them."""
    return {s.cores: seconds[s.name] for s in chosen if s.peer and s.name in seconds}
