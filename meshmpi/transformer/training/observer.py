"""The interface of observers of a run, and the two exceptions that end a run early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import MeshmpiError
from meshmpi.transformer.training.evaluation import Evaluation


class TrainingError(MeshmpiError):
    """A training that cannot go on; raised on all ranks."""


class Interrupted(Exception):
    """The run has been asked to stop; raised on all ranks at the same place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # for example "SIGTERM on rank 3", or "SIGINT at the launching process"


class Step(NamedTuple):
    """A training step that has run."""

    number: int  # the first step is 1
    loss: float  # nats per token
    learning_rate: float  # that the update used
    seconds: float
    comm_seconds: float  # of these, in collectives
    reports: Mapping[str, float]  # other numbers of the step by name


class Observer:
    """Watches a run.  The loop calls these methods on all ranks at the same places, so they may communicate.

    An exception of any of them ends the run.
    """

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        """The run begins after ``done`` steps; ``last`` holds the numbers of the step before, if known."""

    def before_step(self, number: int) -> None:
        """Step ``number`` comes next."""

    def on_step(self, step: Step) -> None:
        """A step has run."""

    def on_evaluate(self, number: int, evaluation: Evaluation) -> None:
        """The held-out loss after step ``number`` is known."""

    def before_save(self, number: int) -> None:
        """The variables after step ``number`` are about to be saved."""

    def on_save(self, path: Path, seconds: float) -> None:
        """A checkpoint is complete; writing it took ``seconds``."""

    def on_trained(self) -> None:
        """All steps are done and saved; the last evaluation follows."""

    def on_sample(self, measures: Mapping[str, float]) -> None:
        """The sample at the end of the run gave these numbers."""

    def on_end(self, stopped_by: str) -> None:
        """The run ends; ``stopped_by`` says what ended it early, if anything did."""

    def on_failure(self, error: BaseException) -> None:
        """The run ends by an exception."""
