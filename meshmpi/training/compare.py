"""Compares two or more runs: settings that differ, and results.

Reads the files of running and stopped runs alike.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.training.metrics import curve, new_figure, read_metrics, save_figure, smooth

FACTS = "facts.json"
"""File of facts about a run that are not settings; written when the run begins."""
WARMING = 2
"""The first steps touch memory for the first time: their times are left out."""
_COMMON_STEPS = 5
_NONE = "-"


@dataclass(frozen=True)
class Run:
    """What the folder of a run holds."""

    name: str  # the shortest end of its path that differs from the others
    settings: Mapping[str, Any]  # by "section.key"
    facts: Mapping[str, Any]  # what is in `FACTS`; empty for runs without it
    records: Sequence[Mapping[str, Any]]  # metrics of rank 0

    @property
    def steps(self) -> int:
        return max((int(r["step"]) for r in self.records if "loss" in r), default=0)

    def losses(self, key: str = "loss") -> dict[int, float]:
        """Step -> loss; that of training as the mean of the steps around, as in the picture."""
        steps, values = curve(self.records, key)
        return dict(zip(steps, smooth(values) if key == "loss" else values, strict=True))

    @property
    def step_seconds(self) -> float:
        """Median time of a step; NaN before the first."""
        found = [float(r["seconds"]) for r in self.records if "loss" in r and "seconds" in r]
        return statistics.median(found[WARMING:] or found) if found else math.nan

    @property
    def communicating(self) -> float:
        """Share of the time of rank 0 in collectives; NaN before the first step."""
        found = [(r["comm_seconds"], r["seconds"]) for r in self.records if "comm_seconds" in r]
        total = sum(seconds for _, seconds in found)
        return sum(comm for comm, _ in found) / total if total else math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.number("tokens_per_step") / self.step_seconds

    def data(self) -> dict[str, Any]:
        """For programs: settings, facts, losses by step; seconds and shares are medians."""
        return {
            "name": self.name,
            "steps": self.steps,
            "settings": self.settings,
            "facts": self.facts,
            "losses": self.losses(),
            "held_out_losses": self.losses("held_out_loss"),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "communicating": self.communicating,
        }

    def number(self, key: str) -> float:
        """A fact; NaN where it is not known."""
        return float(self.facts.get(key, math.nan))


def read_run(folder: str | os.PathLike[str], name: str = "") -> Run:
    """Reads the folder of a run.

    Raises:
        DataError: It is not the folder of a run, or a file of it is damaged.
    """
    folder = Path(folder)
    settings = _json(folder / "settings.json", f"{folder} is not the folder of a run")
    facts = _json(folder / FACTS, "") if (folder / FACTS).exists() else {}
    try:
        records = read_metrics(folder)
    except DataError:
        if any(folder.glob("metrics-rank-*.jsonl")):
            raise
        records = []  # the run has not made a step yet
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        section = isinstance(value, Mapping) and value
        flat |= {f"{key}.{k}": v for k, v in value.items()} if section else {key: value}
    return Run(name or str(folder), flat, facts, records)


def _json(path: Path, problem: str) -> dict[str, Any]:
    try:
        return plain.json_table(path)
    except OSError as error:
        raise DataError(
            f"{problem or path}: {path.name}: {error.strerror}.", "Give folders of runs, as runs/quickstart."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.", "Resume the run, which writes it.") from error


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads several runs, and gives them names that differ."""
    parts = [Path(os.path.abspath(f)).parts for f in folders]
    longest = max(map(len, parts))
    length = next((n for n in range(1, longest) if len({p[-n:] for p in parts}) == len(parts)), longest)
    return [read_run(f, "/".join(p[-length:])) for f, p in zip(folders, parts, strict=True)]


Row = tuple[str, list[str]]


def comparison(runs: Sequence[Run]) -> str:
    """The table: a column for each run."""
    parts: list[tuple[str, list[Row]]] = [
        ("settings that differ", _settings(runs)),
        ("run", _facts(runs)),
        ("training loss, nats per token", _at_common_steps(runs, "loss")),
        ("held-out loss, nats per token", _at_common_steps(runs, "held_out_loss")),
        ("speed and cost", _costs(runs)),
    ]
    rows: list[Row] = [("", [r.name for r in runs])]
    for title, table in parts:
        if table:
            rows += [("", []), (title, []), *((f"  {label}", values) for label, values in table)]
    first = max(len(label) for label, values in rows if values)
    widths = [max(len(values[k]) for _, values in rows if values) for k in range(len(runs))]
    return "\n".join(
        f"{label:{first}}{'  '.join(v.rjust(w) for v, w in zip(values, widths, strict=False))}".rstrip()
        for label, values in rows
    )


def _settings(runs: Sequence[Run]) -> list[Row]:
    keys = list(dict.fromkeys(k for r in runs for k in r.settings))
    rows = [(k, [_shown(r.settings.get(k, _NONE)) for r in runs]) for k in keys]
    return [(k, values) for k, values in rows if len(set(values)) > 1]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _facts(runs: Sequence[Run]) -> list[Row]:
    rows = [("steps done", [f"{r.steps} of {r.settings.get('train.steps', '?')}" for r in runs])]
    rows += [("parameters", [_number(r.number("parameters"), ",.0f") for r in runs])]
    rows += [(key, [r.facts.get(key) or _NONE for r in runs]) for key in ("mesh", "layout")]
    skipped = [sum(1 for r in run.records if r.get("skipped")) for run in runs]
    return rows + ([("steps skipped", [str(n) for n in skipped])] if any(skipped) else [])


def _at_common_steps(runs: Sequence[Run], key: str) -> list[Row]:
    """Losses at a few steps that all runs have, and the last of each."""
    found = [r.losses(key) for r in runs]
    common = sorted(set(found[0]).intersection(*found[1:]))
    count = min(_COMMON_STEPS, len(common))
    places = [common[(k + 1) * len(common) // count - 1] for k in range(count)]
    rows = [(f"step {s}", [f"{losses[s]:.4f}" for losses in found]) for s in places]
    last = [f"{losses[max(losses)]:.4f}" if losses else _NONE for losses in found]
    if all(losses and max(losses) == places[-1] for losses in found if places):
        return rows if any(found) else []
    return [*rows, ("last", last)] if any(found) else []


def _costs(runs: Sequence[Run]) -> list[Row]:
    table: list[tuple[str, str, Callable[[Run], float]]] = [
        ("tokens/s (median step)", ",.0f", lambda r: r.tokens_per_second),
        ("ms per step (median)", ".4g", lambda r: 1e3 * r.step_seconds),
        ("communicating (rank 0)", ".0%", lambda r: r.communicating),
        ("MB of memory per rank", ",.4g", lambda r: r.number("memory_bytes") / 1e6),
        ("MB sent per rank and step", ",.4g", lambda r: r.number("bytes_sent") / 1e6),
        ("GFLOP per rank and step", ",.4g", lambda r: r.number("flops") / 1e9),
    ]
    return [(label, [_number(value(r), form) for r in runs]) for label, form, value in table]


def _number(x: float, form: str) -> str:
    return _NONE if math.isnan(x) else format(x, form)


def plot_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Draws the loss curves of all runs into one PNG file.

    Raises:
        DataError: The extra `plot` is not installed, or no run has made a step.
    """
    if not any(r.steps for r in runs):
        raise DataError("no run has made a step: there is no curve to draw.", "Wait for one.")
    figure, axes = new_figure()
    for k, run in enumerate(runs):
        training, held_out = run.losses(), run.losses("held_out_loss")
        axes.plot(list(training), list(training.values()), color=f"C{k}", label=run.name)
        if held_out:
            losses = list(held_out.values())
            label = f"{run.name}, held out (last {losses[-1]:.3f})"
            axes.plot(list(held_out), losses, f"C{k}o--", markersize=4, label=label)
    return save_figure(figure, axes, path, "")
