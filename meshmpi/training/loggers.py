"""Callbacks that record a run elsewhere than in its own files."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from meshmpi.errors import ConfigError
from meshmpi.graph.arguments.checked import check_all
from meshmpi.training.callback import Callback, Evaluation, Step


def _numbers(step: Step) -> dict[str, float]:
    """What is recorded of a step."""
    rate = {} if step.learning_rate is None else {"learning_rate": step.learning_rate}
    return {"loss": step.loss, **rate, "seconds": step.seconds, "comm_seconds": step.comm_seconds, **step.reports}


class CSVLogger(Callback):
    """Writes one line per step into a CSV file, on rank 0; its columns are those of the first step.

    Args:
        path: The file, inside the folder of the run unless it is absolute.  A resumed run appends to it, after the
            lines of the steps before.
    """

    def __init__(self, path: str | os.PathLike[str] = "steps.csv") -> None:
        self._path = Path(path)
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        if self.run.mesh.rank:
            return
        path = self.run.folder / self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[list[str]] = []
        if done and path.exists():
            with open(path, newline="", encoding="utf-8") as before:
                rows = [r for r in csv.reader(before) if r]
            self._columns = rows[0] if rows else []
            kept = [rows[0], *(r for r in rows[1:] if r[0].isdecimal() and int(r[0]) <= done)] if rows else []
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed at the end of the run)
        csv.writer(self._file).writerows(kept)

    def on_step(self, step: Step) -> None:
        if self._file is None:
            return
        numbers, writer = {"step": step.number, **_numbers(step)}, csv.writer(self._file)
        if not self._columns:
            self._columns = list(numbers)
            writer.writerow(self._columns)
        writer.writerow([numbers.get(name, "") for name in self._columns])
        self._file.flush()

    def on_end(self, stopped_by: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def on_failure(self, error: BaseException) -> None:
        self.on_end("")


class WandbLogger(Callback):
    """Sends steps and evaluations to Weights & Biases, from rank 0, by the package wandb.

    ``WANDB_MODE=offline`` keeps them in the folder of the run.

    Args:
        **init: Arguments of ``wandb.init``, such as ``project="mine"``.

    Raises:
        ConfigError: The package wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "WandbLogger needs the package wandb, which is not installed.",
                "Install it with: pip install 'meshmpi[wandb]', or leave the callback out.",
            )
        self._init = init
        self._wandb: Any = None

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        if self.run.mesh.rank == 0:
            wandb = importlib.import_module("wandb")
            self.run.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._wandb = wandb.init(**{"dir": str(self.run.folder), "resume": "allow", **self._init})
            except (TypeError, wandb.Error) as error:
                given = ", ".join(f"{name}={value!r}" for name, value in self._init.items())
                raise ConfigError(
                    f"WandbLogger: wandb.init({given}) failed: {error}",
                    "Give arguments of wandb.init; without an account, set WANDB_MODE=offline.",
                ) from error

    def on_step(self, step: Step) -> None:
        if self._wandb is not None:
            self._wandb.log(_numbers(step), step=step.number)

    def on_evaluate(self, number: int, evaluation: Evaluation) -> None:
        if self._wandb is not None:
            self._wandb.log({f"evaluation/{k}": v for k, v in evaluation.numbers().items()}, step=number)

    def on_end(self, stopped_by: str) -> None:
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def on_failure(self, error: BaseException) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=1)
            self._wandb = None


check_all(globals(), ["CSVLogger", "WandbLogger"])
