"""The table of decoding: all systems take turns, and the texts they draw are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from apps.bench import workers
from apps.bench.bench import FULL, TINY, Bench
from apps.bench.decoding.inputs import write_checkpoint
from apps.bench.tables import Cell, Table
from apps.bench.turns import Rounds, System, median_seconds, peer_seconds, take_turns
from apps.bench.workers import Result


class Case(NamedTuple):
    """A model, and how many prompts of which length are continued by how many tokens."""

    name: str
    layers: int
    d_model: int
    vocab: int
    batch: int
    prompt: int
    new: int


CASES = tuple(
    Case(f"6 layers of {d_model}, batch {batch}", 6, d_model, 50257, batch, 64, 128)
    for d_model in (384, 512)
    for batch in (1, 8, 32)
)
TOY = (Case("toy", 1, 64, 100, 2, 5, 4),)


def _ours(ranks: int, layout: str) -> Callable[[Bench, Case, Path, int], list[Result]]:
    def run(bench: Bench, case: Case, model: Path, steps: int) -> list[Result]:
        arguments = ["--layout", layout, "--mesh", f"all:{ranks}", *_shared(case, model, steps)]
        return workers.on_ranks(ranks, "decoding.meshmpi_worker", arguments)

    return run


def _theirs(threads: int) -> Callable[[Bench, Case, Path, int], list[Result]]:
    def run(bench: Bench, case: Case, model: Path, steps: int) -> list[Result]:
        arguments = ["--threads", str(threads), *_shared(case, model, steps)]
        python = bench.peers.python
        return [workers.alone(python, "decoding.torch_worker", arguments, threads=threads)]

    return run


def _shared(case: Case, model: Path, steps: int) -> list[str]:
    given = {
        "--model": model,
        "--batch": case.batch,
        "--prompt": case.prompt,
        "--new": case.new,
        "--vocab": case.vocab,
        "--steps": steps,
    }
    return [str(part) for pair in given.items() for part in pair]


SYSTEMS = (
    System("meshmpi, 1 rank", 1, _ours(1, "")),
    System("transformers, 1 thread", 1, _theirs(1), peer=True),
    System("meshmpi, 2 ranks, batch split", 2, _ours(2, "batch:all"), least_batch=2),
    System("meshmpi, 2 ranks, heads split", 2, _ours(2, "heads:all;d_ff:all;vocab:all")),
    System("transformers, 2 threads", 2, _theirs(2), peer=True),
)


def measure(bench: Bench) -> list[Table]:
    """The table; its last column is the throughput over that of transformers on as many cores."""
    notes = bench.left_out("torch", "transformers")
    systems = [s for s in SYSTEMS if not (s.peer and notes)]
    rows: list[list[Cell]] = []
    cases = CASES[: len(CASES) // 2] if bench.effort.points < FULL.points else CASES
    for case in TOY if bench.effort.sizes == TINY.sizes else cases:
        model = bench.folder / f"gpt2-{case.layers}-{case.d_model}-{case.vocab}"
        if not (model / "config.json").exists():
            positions = case.prompt + case.new
            write_checkpoint(model, case.layers, case.d_model, case.vocab, positions)
        chosen = [s for s in systems if case.batch >= s.least_batch]
        steps = max(2, bench.effort.steps // 3)  # each is a hundred programs
        title = f"decoding, {case.name}"
        found = take_turns(bench, title, case, model, chosen, steps, notes)
        notes += compare_texts(case.name, {n: r[0][0]["texts"] for n, r in found.items() if r})
        rows += _rows(case, chosen, found)
    columns = ("model, prompts", "system", "new tokens/s", "ms per token of the batch", "throughput / transformers'")
    title = f"Greedy decoding of prompts of 64 tokens by 128 more, {bench.effort.rounds} round(s)"
    return [Table("decoding", title, columns, rows, notes)]


def compare_texts(case: str, found: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """A line on how far the texts of all systems are those of the first.

    Args:
        case: What was continued.
        found: System -> its tokens.
    """
    if len(found) < 2:
        return []
    first, *others = found.values()
    worst = 1.0
    for texts in others:
        same = sum(_agreeing(a, b) for a, b in zip(first, texts, strict=True))
        worst = min(worst, same / sum(map(len, first)))
    return [
        f"{case}: at least {100 * worst:.0f} % of the tokens stand before a text of any system"
        " first differs from that of the first: rounding turns near ties."
    ]


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _rows(case: Case, chosen: Sequence[System], found: Rounds) -> list[list[Cell]]:
    """A row for each system that ran."""
    seconds = median_seconds(found)
    peers = peer_seconds(chosen, seconds)
    return [
        [
            case.name,
            s.name,
            case.batch * case.new / seconds[s.name],
            1e3 * seconds[s.name] / case.new,
            peers[s.cores] / seconds[s.name] if s.cores in peers else None,
        ]
        for s in chosen
        if s.name in seconds
    ]
