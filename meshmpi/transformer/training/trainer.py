"""Training of a Transformer: connects its task, compiled steps and observers to a `Loop`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.api import compile as compile_step
from meshmpi.checkpoint import Manifest
from meshmpi.errors import CheckpointError
from meshmpi.guard.flight import phase
from meshmpi.guard.status import publish
from meshmpi.planner.report import network_lines
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.tasks.base import Evaluator, Task
from meshmpi.transformer.tasks.registry import task_class
from meshmpi.transformer.training.evaluation import BlockFeeder, Evaluation, Sample
from meshmpi.transformer.training.guard import Guard
from meshmpi.transformer.training.lock import held
from meshmpi.transformer.training.loop import Loop, Result
from meshmpi.transformer.training.measured import Measured
from meshmpi.transformer.training.metrics import check_tensorboard
from meshmpi.transformer.training.model import TrainingGraph
from meshmpi.transformer.training.observer import Interrupted, Observer
from meshmpi.transformer.training.progress import Extras, LiveLine, Progress
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import chosen_layout, set_aside, write_settings
from meshmpi.transformer.training.stopping import Stopping, find_limit

OVERLAP = {"auto": None, "on": True, "off": False}
"""Setting ``mesh.overlap`` -> argument of `mm.compile`."""


class Trainer(Loop):
    """A training run of a Transformer; the arguments are those of `run.train`."""

    def __init__(
        self,
        settings: Settings,
        mesh: AnyMesh,
        folder: str | os.PathLike[str],
        say: Callable[[str], None] = print,
        task: type[Task] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        began, folder, first = time.perf_counter(), Path(folder), mesh.rank == 0
        live = LiveLine(settings.train.progress if first else "off", say)
        say = live.say if first else lambda line: None
        stop, extras = Stopping(mesh), Extras(say)
        phase("load")
        self.task: Task = (task or task_class(settings.task))(settings, mesh, say)
        self.task.between = stop.check
        layout = chosen_layout(settings.mesh, mesh.shape)
        stop.check()
        if settings.train.tensorboard:
            check_tensorboard()
        phase("compile")
        built, step = self._compiled(settings, mesh, layout)
        fetches = {"loss": built.loss, "learning_rate": built.learning_rate, **built.reports}
        super().__init__(settings, step, fetches, layout, folder, say, stop)
        tokens, parameters = self.task.tokens_per_step, self.task.parameter_count(self.task.config)
        facts = {"parameters": parameters, "layout": layout, "tokens_per_step": tokens}
        measured = Measured(step, settings, folder, say, extras, facts)
        self._guard = Guard(self, built)
        self.observers += [
            Progress(settings, folder, mesh, live, tokens, extras, measured.fastest),
            measured,
            *observers,
            self._guard,
        ]
        self._report_start(parameters, time.perf_counter() - began)
        measured.introduce()
        variable_bytes = sum(a.nbytes for b in step.variables.blocks.values() for a in b.values())
        stop.limit = from_first(mesh, lambda: find_limit(settings.train.time_limit, variable_bytes))
        stop.check()

    def _compiled(self, s: Settings, mesh: AnyMesh, layout: str) -> tuple[TrainingGraph, CompiledStep]:
        """The graph and the training step; the evaluation shares the variables of the step."""
        task = self.task
        built = task.build(s, task.config)
        step = compile_step(
            built.graph,
            mesh,
            layout,
            fetches=built.fetches,
            updates=built.updates,
            overlap=OVERLAP[s.mesh.overlap],
            memory_limit=s.mesh.memory_limit or None,
            atomic=s.mesh.recover,
            storage=s.mesh.storage or None,
            seed=s.train.seed,
        )
        self._batches, self._feeder = task.batches(), BlockFeeder(step, built.feeds)
        self._evaluator = Evaluator(task, built, layout, step.variables)
        return built, step

    def _report_start(self, parameters: int, seconds: float) -> None:
        program, cost = self.step.program, self.step.cost
        self.say(f"{parameters:,} parameters on mesh {self.mesh.shape}, layout '{self.layout}'; {self.task.describe()}")
        self.say(
            f"ready in {seconds:.1f} s: {len(program.instructions)} instructions; per rank and step"
            f" {cost.flops / 1e9:.3g} GFLOP, {cost.bytes_sent / 1e6:.3g} MB sent,"
            f" {cost.peak_memory / 1e6:.3g} MB of memory"
        )
        for line in network_lines(cost, self.mesh.shape, self.mesh.axes_between_hosts):
            self.say(line)

    def feeds(self, number: int) -> Mapping[str, Any]:
        return self._feeder.feeds(self._batches.feeds(number, self._feeder.held))

    def evaluate(self, rows: int = 0) -> Evaluation:
        return self._evaluator.evaluate(rows)

    def sample(self) -> Sample:
        return self.task.sample(self.step.variables, self.layout)

    def reports(self) -> dict[str, float]:
        return self._guard.reports

    def about(self) -> dict[str, Any]:
        task = self.task
        return {"data_digest": task.digest, "data": task.source(self.settings), "vocabulary": task.vocabulary.state()}

    def accept(self, manifest: Manifest) -> None:
        about = manifest.about
        if about.get("data_digest") != self.task.digest:
            before = about.get("data") or about["settings"]["data"]["corpus"]
            raise CheckpointError(
                f"the checkpoint {manifest.folder} was trained on another text or vocabulary:"
                f" '{before}', now '{self.task.source(self.settings)}'.",
                "Give the same data, or start again in another folder.",
            )


Initialize = Callable[[Trainer], None]
"""Gives a new trainer other initial values, or those to go on from."""
Resume = bool | str | os.PathLike[str]
"""Whether to go on from the newest checkpoint, or the one to go on from."""


def ready(trainer: Trainer, resume: Resume | Initialize, initialize: Initialize | None) -> Trainer:
    """Prepares variables and folder of a new trainer for its first step, as `run.train`.  Collective."""
    folder, mesh = trainer.folder, trainer.mesh
    if callable(resume):  # it gives the trainer its variables
        resume(trainer)
    elif resume is False:
        old = from_first(mesh, lambda: set_aside(folder))
        if old is not None:
            trainer.say(f"renamed the earlier run {folder} to {old}")
        if initialize is not None:
            initialize(trainer)
        trainer.whole = True
    else:
        trainer.resume(None if resume is True else resume)
    from_first(mesh, lambda: write_settings(trainer.settings, folder))
    publish(folder.absolute())  # the working folder may change
    return trainer


def run_trainer(
    mesh: AnyMesh, folder: str | os.PathLike[str], say: Callable[[str], None], make: Callable[[], Trainer]
) -> Result:
    """Makes a trainer and runs it; ConfigError where another job writes the folder of the run.  Collective."""
    with held(mesh, folder):
        try:
            trainer = make()
        except Interrupted as stop:
            if mesh.rank == 0:
                say(f"stopped by {stop.reason} before the first step: there is nothing to save")
            return Result(stopped_by=stop.reason)
        return trainer.run()
