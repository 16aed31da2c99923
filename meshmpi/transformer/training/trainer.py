"""Training of a Transformer: connects its task, compiled steps and callbacks to a `Loop`."""

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
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.feeding import BlockFeeder
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.callback import Callback, Evaluation, Sample
from meshmpi.training.loop import Loop
from meshmpi.training.metrics import check_tensorboard
from meshmpi.training.progress import Extras, LiveLine
from meshmpi.training.starting import equip
from meshmpi.training.stopping import Stopping
from meshmpi.transformer.tasks.base import Evaluator, Task
from meshmpi.transformer.tasks.registry import task_class
from meshmpi.transformer.training.model import TrainingGraph, schedule_steps
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import chosen_layout

OVERLAP = {"auto": None, "on": True, "off": False}
"""Setting ``mesh.overlap`` -> argument of `mm.compile`."""


class Trainer(Loop):
    """A training run of a Transformer; the arguments are those of `run.train`."""

    settings: Settings

    def __init__(
        self,
        settings: Settings,
        mesh: AnyMesh,
        folder: str | os.PathLike[str],
        say: Callable[[str], None] = print,
        task: type[Task] | None = None,
        callbacks: Sequence[Callback] = (),
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
        dtype = settings.model.activation_dtype or settings.model.dtype
        lead = f"{parameters:,} parameters on mesh {mesh.shape}, layout '{layout}'; {self.task.describe()}"
        total, steps = schedule_steps(settings.optimizer.learning_rate), settings.train.steps
        if total > steps:
            say(
                f"note: the schedule of the learning rate has {total:,} steps and the run {steps:,}: it ends"
                " before the rate has fallen"
            )
        how = {"machine": settings.mesh.machine, "dtype": dtype}
        equip(self, live, extras, lead, began, facts, (tokens, "tokens"), built.finite, callbacks, **how)

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

    def feeds(self, number: int) -> Mapping[str, Any]:
        return self._feeder.feeds(self._batches.feeds(number, self._feeder.held))

    def evaluate(self, final: bool) -> Evaluation:
        s = self.settings.evaluate
        return self._evaluator.evaluate(s.final_windows if final else s.windows)

    def sample(self) -> Sample:
        return self.task.sample(self.step.variables, self.layout)

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
