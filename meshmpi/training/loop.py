"""The training loop: runs a compiled step, evaluates and saves when due, and calls callbacks, alike on every rank.

It knows no model and no task; a subclass gives batches, evaluations and what a checkpoint says of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshmpi.checkpoint import Manifest
from meshmpi.errors import TrainingError
from meshmpi.graph import Tensor
from meshmpi.guard.flight import phase
from meshmpi.guard.outcome import listening
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.training.callback import Callback, Evaluation, Interrupted, Sample, Step
from meshmpi.training.lock import check_held
from meshmpi.training.saves import Saves
from meshmpi.training.settings import LoopSettings
from meshmpi.training.signals import STOPPED, StopSignals, work_begins
from meshmpi.training.stopping import Stopping


@dataclass(frozen=True)
class Result:
    """How a training ended."""

    step: int = 0  # steps done, including those before it was resumed
    loss: float | None = None  # of the last step
    evaluation: Evaluation | None = None  # the last one
    checkpoint: Path | None = None  # the last one written
    sample: str = ""  # what the model wrote at the end
    stopped_by: str = ""  # what ended it early, such as "SIGTERM on rank 1" or a time limit
    measures: Mapping[str, float] = field(default_factory=dict)  # of the sample, such as ``bleu``

    @property
    def exit_status(self) -> int:
        """For ``sys.exit``: 75 (EX_TEMPFAIL) where the run was asked to stop and can be resumed, else 0."""
        return STOPPED if self.stopped_by else 0


@dataclass
class Position:
    """How far a training is, in plain values."""

    done: int = 0  # training steps
    step_numbers: list[int] = field(default_factory=list)  # `VariableStore.step_numbers`
    saved_at: int = -1  # the step after which it was last saved; -1: never
    evaluated_at: int = -1
    last: dict[str, float] = field(default_factory=dict)  # numbers of the last step by name
    checkpoint: Path | None = None  # the last one written


class Loop:
    """A training run.

    Args:
        step: The compiled training step, in the computation layout ``layout``.
        fetches: Tensors of a step by name: "loss", perhaps "learning_rate", and others to report.
        say: Takes lines of progress, on rank 0 only.

    Attributes:
        callbacks: They are called in this order.
        at: How far the training is.
        whole: Whether the variables are those of step ``done``, and no longer the initial values.
        healthy: Whether the last step was finite; None before the first.
        resume_by: What a user adds to go on with a run that has ended.
    """

    resume_by = "--resume"

    def __init__(
        self,
        settings: LoopSettings,
        step: CompiledStep,
        fetches: Mapping[str, Tensor],
        layout: str,
        folder: Path,
        say: Callable[[str], None],
        stop: Stopping,
    ) -> None:
        self.settings, self.step, self.layout, self.folder, self.say = settings, step, layout, folder, say
        self.mesh, self.stop, self.callbacks = step.mesh, stop, list[Callback]([stop])
        self.at, self.whole = Position(), False
        self.healthy: bool | None = None
        self.fetches = fetches
        self._loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._saves = Saves(settings.checkpoint, folder / "checkpoints", step.variables, say)

    # ---- what a subclass gives -----------------------------------------------------------

    def feeds(self, number: int) -> Mapping[str, Any]:
        """The arguments of the step, ``number`` counted from 0."""
        raise NotImplementedError

    def evaluate(self, final: bool) -> Evaluation | None:
        """What the model is worth now, ``final`` at the end of the run; None: it is not evaluated.  Collective."""
        return None

    def sample(self) -> Sample:
        """What the trained model shows of itself.  Collective."""
        return Sample()

    def about(self) -> dict[str, Any]:
        """What a checkpoint says of the data, in plain values."""
        return {}

    def accept(self, manifest: Manifest) -> None:
        """Raises CheckpointError where a checkpoint is of other data."""

    # ---- checkpoints ---------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Training steps done."""
        return self.at.done

    def resume(self, source: str | os.PathLike[str] | None = None) -> None:
        """Goes on from a checkpoint, or from the newest complete one of this run; collective.

        On the same mesh and layout the losses are those of a run that was never stopped.
        """
        phase("load")
        manifest = self._saves.load(source)
        self.accept(manifest)
        about = manifest.about
        if about["seed"] != self.settings.train.seed:
            self.say(f"note: the seed was {about['seed']} and is now {self.settings.train.seed}")
        self.step.step_number = about["step_number"]
        self.at.done, self.at.checkpoint = manifest.step, manifest.folder
        self.at.saved_at = manifest.step if source is None else -1
        self.at.evaluated_at = about.get("evaluated_at", manifest.step)
        differs = [what for what, now in self._program().items() if about[what] != now]
        if differs:
            what = differs[0].removesuffix("_digest")
            self.say(f"note: another {what} than before: losses agree but for rounding")
        self.whole = True
        self.say(f"resumed from {manifest.folder}, step {manifest.step}")

    def _program(self) -> dict[str, Any]:
        """What must be as before for losses of the same bits."""
        digest = self.step.program.digest()
        return {"mesh": dict(self.mesh.shape.axes), "layout": self.layout, "program_digest": digest}

    def position(self) -> Position:
        """How far this training is, for `go_on`."""
        self.at.step_numbers = self.step.variables.step_numbers
        return self.at

    def go_on(self, position: Position) -> None:
        """Takes the place of a loop that was at ``position`` and whose variables this one was given."""
        self.at, self.step.variables.step_numbers = position, position.step_numbers
        self._loss, self.whole = position.last.get("loss"), True

    def save(self, background: bool = False) -> Path | None:
        """Writes a checkpoint; in the background, None is returned and the next steps may run.  Collective."""
        phase("save", self.done)
        from_first(self.mesh, lambda: check_held(self.folder))
        for callback in self.callbacks:
            callback.before_save(self.done)
        about = {
            "step_number": self.step.step_number,
            "evaluated_at": self.at.evaluated_at,
            "settings": asdict(self.settings),
            "seed": self.settings.train.seed,
            **self._program(),
            **self.about(),
        }
        self._saved(self._saves.wait())
        path = self._saves.save(self.done, about, background, self.healthy is True)
        self.at.saved_at = self.done
        self._saved(path)
        return path

    def _saved(self, path: Path | None) -> None:
        """Notes a checkpoint that has become complete, if one has."""
        if path is not None:
            self.at.checkpoint = path
            for callback in self.callbacks:
                callback.on_save(path, self._saves.seconds)

    def abandon(self) -> None:
        """Ranks were lost: another loop takes over.  Not collective."""
        self._saves.abandon()

    # ---- the loop ------------------------------------------------------------------------

    def one_step(self) -> float:
        """One training step; returns the loss.  Collective."""
        phase("step", self.done + 1)
        return self._ended(self.step(self.feeds(self.done)))

    def finish_step(self) -> None:
        """Ends the step in which another rank was lost, see `CompiledStep.finish`."""
        self._ended(self.step.finish())

    def _ended(self, found: Mapping[Any, Any]) -> float:
        self.at.done += 1
        self.at.last = {name: found[tensor] for name, tensor in self.fetches.items()}
        return self.at.last["loss"]

    def run(self) -> Result:
        """Trains to ``train.steps``, or until a signal or a time limit asks to stop.  Collective.

        A run that is asked to stop finishes the step, or leaves an evaluation between two batches, and saves.
        """
        sample, stopped_by = Sample(), ""
        with StopSignals(), listening():
            try:
                for callback in self.callbacks:
                    callback.run = self
                    callback.on_begin(self.done, self.at.last)
                work_begins()
                try:
                    self._steps()
                    self.stop.limit.counts = True  # also where all steps were done before
                    if self.settings.checkpoint.at_end:
                        self._save_once()
                    for callback in self.callbacks:
                        callback.on_trained()
                    self._evaluate(final=True)
                    sample = self._sample()
                except Interrupted as stop:
                    stopped_by = stop.reason
                    self.say(f"stopping after step {self.done}, on {stopped_by}")
                    self._save_once()
                except TrainingError:  # raised on all ranks
                    self._saved(self._saves.wait())
                    raise
                phase("end", self.done)
                self._saved(self._saves.wait())
            except BaseException as error:
                for callback in self.callbacks:
                    callback.on_failure(error)
                raise
            for callback in self.callbacks:
                callback.on_end(stopped_by)
        at = self.at
        return Result(at.done, self._loss, self._evaluation, at.checkpoint, sample.text, stopped_by, sample.measures)

    def _steps(self) -> None:
        while self.done < self.settings.train.steps:
            self._between_steps()
            for callback in self.callbacks:
                callback.before_step(self.done + 1)
            began, communicating = time.perf_counter(), self.step.comm_seconds
            self._loss = self.one_step()
            seconds = time.perf_counter() - began
            reports = {k: v for k, v in self.at.last.items() if k not in ("loss", "learning_rate")}
            for callback in self.callbacks:
                reports |= callback.reports()
            rate, communicated = self.at.last.get("learning_rate"), self.step.comm_seconds - communicating
            made = Step(self.done, self._loss, rate, seconds, communicated, reports)
            self.healthy = True
            for callback in self.callbacks:
                callback.on_step(made)
            if self.healthy:  # the guard is one of the callbacks
                self._saves.proven()
            if self.done < self.settings.train.steps:
                self.stop.check()

    def _between_steps(self) -> None:
        """The evaluation and the checkpoint that are due, also after resuming from a stop."""
        s = self.settings
        self._saved(self._saves.poll())
        if not self.done:
            return
        if s.evaluate.every and self.done % s.evaluate.every == 0 and self.at.evaluated_at < self.done:
            self._evaluate(final=False)
        due = s.checkpoint.every and self.done % s.checkpoint.every == 0
        if due and self.healthy is not False:  # else the variables are those of a step before
            self._save_once(s.checkpoint.background)

    def _evaluate(self, final: bool) -> None:
        phase("evaluate", self.done)
        found = self.evaluate(final)
        if found is not None:
            self._evaluation = found
            for callback in self.callbacks:
                callback.on_evaluate(self.done, found)
        self.at.evaluated_at = self.done

    def _save_once(self, background: bool = False) -> None:
        if self.at.saved_at != self.done:
            self.save(background)

    def _sample(self) -> Sample:
        phase("sample", self.done)
        sample = self.sample()
        if sample.text:
            self.say(f"---- {sample.heading} ----\n{sample.text}\n----")
        for callback in self.callbacks:
            callback.on_sample(sample.measures)
        return sample
