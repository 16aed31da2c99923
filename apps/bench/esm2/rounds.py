"""The table of ESM2's inference: all systems take turns, and what they compute is compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apps.bench import workers
from apps.bench.bench import FULL, TINY, Bench
from apps.bench.esm2.inputs import write_checkpoint
from apps.bench.tables import Cell, Table
from apps.bench.turns import Rounds, System, median_seconds, peer_seconds, take_turns
from apps.bench.workers import Result

TOLERANCE = 2e-5
"""Difference of logits, of the largest of them, that is put down to rounding."""


class Case(NamedTuple):
    """A model and the batch that it is given."""

    name: str
    layers: int
    d_model: int
    heads: int
    batch: int
    length: int


CASES = (
    Case("8M, 8 x 256", 6, 320, 20, 8, 256),
    Case("8M, 32 x 128", 6, 320, 20, 32, 128),
    Case("35M, 8 x 256", 12, 480, 20, 8, 256),
    Case("35M, 2 x 1024", 12, 480, 20, 2, 1024),
)
TOY = (Case("toy", 1, 32, 4, 4, 16),)


def _ours(layout: str, mesh: str, ranks: int) -> Callable[[Bench, Case, Path, int], list[Result]]:
    def run(bench: Bench, case: Case, model: Path, steps: int) -> list[Result]:
        arguments = ["--layout", layout, "--mesh", mesh, *_shared(case, model, steps)]
        return workers.on_ranks(ranks, "esm2.meshmpi_worker", arguments)

    return run


def _theirs(threads: int) -> Callable[[Bench, Case, Path, int], list[Result]]:
    def run(bench: Bench, case: Case, model: Path, steps: int) -> list[Result]:
        arguments = ["--threads", str(threads), *_shared(case, model, steps)]
        return [workers.alone(bench.peers.python, "esm2.torch_worker", arguments, threads=threads)]

    return run


def _shared(case: Case, model: Path, steps: int) -> list[str]:
    given = {"--model": model, "--batch": case.batch, "--length": case.length, "--steps": steps}
    return [str(part) for pair in given.items() for part in pair]


SYSTEMS = (
    System("meshmpi, 1 rank", 1, _ours("replicated", "all:1", 1)),
    System("transformers, 1 thread", 1, _theirs(1), peer=True),
    System("meshmpi, 2 ranks, batch split", 2, _ours("replicated", "all:2", 2)),
    System("meshmpi, 2 ranks, megatron", 2, _ours("megatron", "all:2", 2)),
    System("meshmpi, 2 ranks, 2d 1 x 2", 2, _ours("2d", "rows:1;cols:2", 2)),
    System("transformers, 2 threads", 2, _theirs(2), peer=True),
)


def measure(bench: Bench) -> list[Table]:
    """The table; its last column is the throughput over that of transformers on as many cores."""
    rows: list[list[Cell]] = []
    notes: list[str] = []
    there = [name for name in ("torch", "transformers") if not bench.peers.has(name)]
    notes += [f"Left out: {bench.peers.missing[name]}" for name in there]
    chosen = [s for s in SYSTEMS if not (s.peer and there)]
    cases = CASES[::2] if bench.effort.points < FULL.points else CASES
    for case in TOY if bench.effort.sizes == TINY.sizes else cases:
        model = bench.folder / f"esm2-{case.layers}-{case.d_model}-{case.heads}"
        if not (model / "config.json").exists():
            write_checkpoint(model, case.layers, case.d_model, case.heads)
        title, steps = f"esm2 {case.name}", bench.effort.steps
        found = take_turns(bench, title, case, model, chosen, steps, notes)
        notes += check_logits(case.name, {n: rs[0][0]["checked"] for n, rs in found.items() if rs})
        rows += _rows(case, chosen, found)
    columns = (
        "model, batch x length",
        "system",
        "tokens/s",
        "ms per batch",
        "share in collectives, %",
        "throughput / transformers'",
    )
    title = f"ESM2 inference, all logits of a batch, {bench.effort.rounds} round(s)"
    return [Table("esm2", title, columns, rows, notes)]


def check_logits(case: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    """A line on how far the systems' logits differ from those of the first.

    Args:
        case: What was computed.
        found: System -> some of its logits.
    """
    if len(found) < 2:
        return []
    (reference, first), *others = ((n, np.array(v)) for n, v in found.items())
    off = {name: float(np.abs(v - first).max() / np.abs(first).max()) for name, v in others}
    wrong = {name: d for name, d in off.items() if not d <= TOLERANCE}
    if wrong:
        differences = ", ".join(f"{name} by {d:.2g}" for name, d in wrong.items())
        return [f"**{case}: logits differ from those of {reference}**: {differences}."]
    return [
        f"{case}: logits of all systems differ by at most {max(off.values()):.1e} of the largest"
        f" (allowed: {TOLERANCE:g})."
    ]


def _rows(case: Case, chosen: Sequence[System], found: Rounds) -> list[list[Cell]]:
    """A row for each system that ran."""
    seconds = median_seconds(found)
    peers = peer_seconds(chosen, seconds)
    return [
        [
            case.name,
            s.name,
            case.batch * case.length / seconds[s.name],
            1e3 * seconds[s.name],
            _share_in_collectives(found[s.name]),
            peers[s.cores] / seconds[s.name] if s.cores in peers else None,
        ]
        for s in chosen
        if s.name in seconds
    ]


def _share_in_collectives(rounds: Sequence[Sequence[Result]]) -> float | None:
    """Percent of the time; None for systems that do not tell."""
    shares = [r["communicating"] / sum(r["seconds"]) for results in rounds for r in results if "communicating" in r]
    return 100 * statistics.median(shares) if shares else None
