"""The training loop: batches in, progress, metrics, evaluations and checkpoints out.

Every rank runs the same loop on its own block of each batch; rank 0 alone prints and writes the
metrics.  Knows nothing of how a model is built or what an option means.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshmpi.api import compile as compile_step
from meshmpi.errors import CheckpointError
from meshmpi.guard.flight import phase
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.tasks.base import Sample, Task
from meshmpi.transformer.tasks.registry import task_class
from meshmpi.transformer.training.evaluation import BlockFeeder, Evaluation, Evaluator
from meshmpi.transformer.training.extras import Extras
from meshmpi.transformer.training.guard import Guard, TrainingError
from meshmpi.transformer.training.limits import find_limit
from meshmpi.transformer.training.live import LiveLine
from meshmpi.transformer.training.lock import check_held
from meshmpi.transformer.training.metrics import plot_losses, read_metrics
from meshmpi.transformer.training.observe import Observer
from meshmpi.transformer.training.progress import Progress
from meshmpi.transformer.training.saves import Saves
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import chosen_layout
from meshmpi.transformer.training.signals import StopSignals, work_begins
from meshmpi.transformer.training.stopping import Interrupted, Stopping
from meshmpi.transformer.training.tensorboard import check_available


@dataclass(frozen=True)
class Result:
    """How a training ended.

    Attributes:
        step: Steps done, also before it was resumed.
        loss: Loss of the last step, nats per token; None when there was none.
        evaluation: The last one.
        checkpoint: The last one written.
        sample: What the model wrote at the end, or empty.
        stopped_by: What ended it early, as "SIGTERM on rank 1" or a time limit, or empty.
        measures: Numbers of the sample, such as ``bleu``.
    """

    step: int
    loss: float | None
    evaluation: Evaluation | None
    checkpoint: Path | None
    sample: str
    stopped_by: str
    measures: Mapping[str, float] = field(default_factory=dict)


OVERLAP = {"auto": None, "on": True, "off": False}
"""Setting ``mesh.overlap`` -> argument of `mm.compile`."""


class Trainer:
    """A training run.

    Args:
        settings: Settings of the run.
        mesh: A Mesh, or a SimulatedMesh.
        folder: Folder of the run: checkpoints, metrics and the loss curve.
        say: Takes lines of progress, on rank 0 only.
        task: What the model learns; default: the setting ``task``.

    Attributes:
        task: What the model learns.
        step: The compiled training step.
        done: Training steps done.
        reports: Other numbers of the last step, see `model.TrainingGraph.reports`.
        whole: Whether the variables are those of step ``done``, and not first values still.
    """

    def __init__(
        self,
        settings: Settings,
        mesh: AnyMesh,
        folder: str | os.PathLike[str],
        say: Callable[[str], None] = print,
        task: type[Task] | None = None,
    ) -> None:
        began = time.perf_counter()
        self.settings, self.mesh, self.folder = settings, mesh, Path(folder)
        self._live = LiveLine(settings.train.progress if mesh.rank == 0 else "off", say)
        self.say: Callable[[str], None] = self._live.say if mesh.rank == 0 else lambda line: None
        self._extras = Extras(self.say)
        self._stop = Stopping(mesh)
        phase("load")
        self.task: Task = (task or task_class(settings.task))(settings, mesh, self.say)
        self.task.between = self._stop.check
        self.config = self.task.config
        self.layout = chosen_layout(settings.mesh, mesh.shape)
        self._stop.check()
        if settings.train.tensorboard:
            check_available()
        phase("compile")
        self._compile()
        self.done, self.reports = 0, dict[str, float]()
        self.whole = False
        self._loss_value: float | None = None
        self._last: dict[str, float] = {}
        self._observer = Observer(self.step, settings, self.folder, self.say, self._extras)
        self._saved_at = self._evaluated_at = -1
        self.checkpoint: Path | None = None
        self._saves = Saves(settings.checkpoint, self.checkpoints, self.step.variables, self.say)
        self._report_start(time.perf_counter() - began)
        held = sum(a.nbytes for b in self.step.variables.blocks.values() for a in b.values())
        self._stop.limit = from_first(mesh, lambda: find_limit(settings.train.time_limit, held))
        self._stop.check()

    def _compile(self) -> None:
        s, task = self.settings, self.task
        built = task.build(s, self.config)
        shared = {"storage": s.mesh.storage or None, "seed": s.train.seed}
        self.step = compile_step(
            built.graph,
            self.mesh,
            self.layout,
            fetches=built.fetches,
            updates=built.updates,
            overlap=OVERLAP[s.mesh.overlap],
            memory_limit=s.mesh.memory_limit or None,
            atomic=s.mesh.recover,
            **shared,
        )
        evaluation = compile_step(
            built.graph,
            self.mesh,
            self.layout,
            fetches=[built.held_out_loss],
            updates=[],
            variables=self.step.variables,
            **shared,
        )
        self._guard = Guard(s, self.step, built, self.layout, self.say)
        self._loss, self._rate, self._reports = built.loss, built.learning_rate, built.reports
        self._batches, self._feeder = task.batches(), BlockFeeder(self.step, built.feeds)
        self._evaluator = Evaluator(
            evaluation,
            built.held_out_feeds,
            lambda rows: task.held_out(built.evaluation_batch, rows),
            task.evaluation,
            self._stop.check,
        )

    def _report_start(self, seconds: float) -> None:
        program, cost = self.step.program, self.step.cost
        self.say(
            f"{self.task.parameter_count(self.config):,} parameters on mesh {self.mesh.shape},"
            f" layout '{self.layout}'; {self.task.describe()}"
        )
        self.say(
            f"ready in {seconds:.1f} s: {len(program.instructions)} instructions; per rank and step"
            f" {cost.flops / 1e9:.3g} GFLOP, {cost.bytes_sent / 1e6:.3g} MB sent,"
            f" {cost.peak_memory / 1e6:.3g} MB of memory"
        )
        self._observer.introduce()

    # ---- checkpoints ---------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def resume(self, source: str | os.PathLike[str] | None = None) -> None:
        """Goes on from a checkpoint; on the same mesh and layout exactly.  Collective.

        Args:
            source: The folder of one; None takes the newest whole one of this run.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of another model.
        """
        phase("load")
        manifest = self._saves.load(source)
        about, s = manifest.about, self.settings
        if about.get("data_digest") != self.task.digest:
            before = about.get("data") or about["settings"]["data"]["corpus"]
            raise CheckpointError(
                f"the checkpoint {manifest.folder} was trained on another text or vocabulary:"
                f" '{before}', now '{self.task.source(s)}'.",
                "Give the same data, or start anew in another folder.",
            )
        if about["seed"] != s.train.seed:
            self.say(f"note: the seed was {about['seed']} and is now {s.train.seed}")
        self.done, self.step.step_number = manifest.step, about["step_number"]
        self._saved_at = manifest.step if source is None else -1
        self._evaluated_at = about.get("evaluated_at", manifest.step)
        self.checkpoint = manifest.folder
        differs = [
            what
            for what, before, now in (
                ("mesh", about["mesh"], dict(self.mesh.shape.axes)),
                ("layout", about["layout"], self.layout),
                ("program", about["program_digest"], self.step.program.digest()),
            )
            if before != now
        ]
        if differs:
            self.say(f"note: another {differs[0]} than before: losses agree but for rounding")
        self.whole = True
        self.say(f"resumed from {manifest.folder}, step {manifest.step}")

    @property
    def position(self) -> dict[str, Any]:
        """Where this training is, in plain values, for `go_on`."""
        return {
            "done": self.done,
            "step_numbers": self.step.variables.step_numbers,
            "saved_at": self._saved_at,
            "evaluated_at": self._evaluated_at,
            "last": self._last,
            "checkpoint": self.checkpoint,
        }

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Takes the place of a trainer whose variables this one was given.

        Args:
            position: What its `position` was.
        """
        self.done, self._last = position["done"], position["last"]
        self.step.variables.step_numbers = position["step_numbers"]
        self._saved_at, self._evaluated_at = position["saved_at"], position["evaluated_at"]
        self.checkpoint, self._loss_value = position["checkpoint"], self._last.get("loss")
        self.whole = True

    def save(self, background: bool = False) -> Path | None:
        """Writes a checkpoint.  Collective.

        Args:
            background: Whether it may be written while the next steps run; then None is returned.
        """
        phase("save", self.done)
        from_first(self.mesh, lambda: check_held(self.folder))
        self._guard.before_save(self.done)
        about = {
            "step_number": self.step.step_number,
            "evaluated_at": self._evaluated_at,
            "program_digest": self.step.program.digest(),
            "settings": asdict(self.settings),
            "mesh": dict(self.mesh.shape.axes),
            "layout": self.layout,
            "seed": self.settings.train.seed,
            "data_digest": self.task.digest,
            "data": self.task.source(self.settings),
            "vocabulary": self.task.vocabulary.state(),
        }
        self._saved(self._saves.wait())
        path = self._saves.save(self.done, about, background, self._guard.finite)
        self._saved_at = self.done
        self._saved(path)
        return path

    def _saved(self, path: Path | None) -> None:
        """Notes a checkpoint that has become whole, if one has."""
        if path is not None:
            self.checkpoint = path
            self._stop.took(save=self._saves.seconds)

    def abandon(self) -> None:
        """Ranks were lost: another trainer takes over.  Not collective."""
        self._saves.abandon()

    # ---- the loop ------------------------------------------------------------------------

    def one_step(self) -> tuple[float, float]:
        """One training step.  Collective.

        Returns:
            Loss, nats per token, and learning rate.
        """
        phase("step", self.done + 1)
        blocks = self._batches.feeds(self.done, self._feeder.held)
        return self._ended(self.step(self._feeder.feeds(blocks)))

    def finish_step(self) -> None:
        """Ends the step in which another rank was lost, see `CompiledStep.finish`."""
        self._ended(self.step.finish())

    def _ended(self, found: Mapping[Any, Any]) -> tuple[float, float]:
        self.done += 1
        self.reports = {name: found[t] for name, t in self._reports.items()}
        loss, rate = found[self._loss], found[self._rate]
        self._last = {"loss": loss, "learning_rate": rate, **self.reports}
        return loss, rate

    def run(self) -> Result:
        """Trains to ``train.steps``, or until a signal or a time limit asks to stop.  Collective.

        Asked to stop, it ends the step, or leaves an evaluation between two of its batches, and
        saves.
        """
        first = self.mesh.rank == 0
        progress = Progress(
            self.settings,
            self.folder,
            self.done,
            self.mesh,
            self._live,
            self.task.tokens_per_step,
            self._extras,
            self._observer.fastest,
        )
        if first:
            progress.complete(self._last)
            self._observer.write_facts(
                parameters=self.task.parameter_count(self.config),
                layout=self.layout,
                tokens_per_step=self.task.tokens_per_step,
            )
        sample, stopped_by = Sample(), ""
        with StopSignals(), progress:
            work_begins()
            try:
                self._steps(progress)
                self._stop.limit.counts = True  # also where all steps were done before
                if self.settings.checkpoint.at_end:
                    self._save_once(progress)
                self._observer.report()
                self._evaluate(progress, self.settings.evaluate.final_windows)
                sample = self._sample(progress)
            except Interrupted as stop:
                stopped_by = stop.reason
                self.say(f"stopping after step {self.done}, on {stopped_by}")
                self._save_once(progress)
            except TrainingError:  # raised on all ranks
                self._saved(self._saves.wait())
                raise
            phase("end", self.done)
            self._saved(self._saves.wait())
            if first and self.settings.train.plot and not stopped_by:
                self._extras("loss curve", self._plot)
        return Result(
            self.done, self._loss_value, progress.evaluation, self.checkpoint, sample.text, stopped_by, sample.measures
        )

    def _steps(self, progress: Progress) -> None:
        s, first = self.settings, self.done
        while self.done < s.train.steps:
            self._between_steps(progress)
            self._observer.before(self.done - first, s.train.steps - first)
            began, communicating = time.perf_counter(), self.step.comm_seconds
            loss, rate = self.one_step()
            seconds = time.perf_counter() - began
            self._loss_value = loss
            self._stop.took(step=seconds)
            progress.step(
                loss, rate, seconds, self.step.comm_seconds - communicating, **self.reports, **self._guard.reports
            )
            self._observer.after(seconds)
            if not self._guard.after(self.done, loss):
                self._saves.proven()
            if self.done < s.train.steps:
                self._stop.check()

    def _between_steps(self, progress: Progress) -> None:
        """The evaluation and the checkpoint that are due, also after resuming from a stop."""
        s = self.settings
        self._saved(self._saves.poll())
        if not self.done:
            return
        if s.evaluate.every and self.done % s.evaluate.every == 0 and self._evaluated_at < self.done:
            self._evaluate(progress, s.evaluate.windows)
        due = s.checkpoint.every and self.done % s.checkpoint.every == 0
        if due and not self._guard.in_a_row:  # else variables are those of a step before
            self._save_once(progress, s.checkpoint.background)

    def _evaluate(self, progress: Progress, windows: int) -> None:
        phase("evaluate", self.done)
        progress.evaluated(self._evaluator.evaluate(windows))
        self._evaluated_at = self.done

    def _save_once(self, progress: Progress, background: bool = False) -> None:
        if self._saved_at != self.done:
            progress.flush()
            self.save(background)

    def _sample(self, progress: Progress) -> Sample:
        phase("sample", self.done)
        sample = self.task.sample(self.step.variables, self.layout)
        if sample.text:
            self.say(f"---- {sample.heading} ----\n{sample.text}\n----")
        progress.measured(sample.measures)
        return sample

    def _plot(self) -> None:
        path = plot_losses(
            read_metrics(self.folder),
            self.folder / "loss.png",
            title=self.settings.title,
            baselines=self.settings.baselines,
        )
        self.say(f"drew {path}")
