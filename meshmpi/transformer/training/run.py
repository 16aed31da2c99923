"""A whole training run: the function that users call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.callback import Callback
from meshmpi.training.loop import Result
from meshmpi.training.signals import StopSignals
from meshmpi.training.starting import Initialize, Resume, ready, run_loop
from meshmpi.transformer.tasks.base import Task
from meshmpi.transformer.training.config import SAVED, written
from meshmpi.transformer.training.recovery import train_on_survivors
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import make_mesh
from meshmpi.transformer.training.trainer import Trainer


def train(
    settings: Settings,
    folder: str | os.PathLike[str],
    *,
    mesh: AnyMesh | None = None,
    resume: Resume = False,
    say: Callable[[str], None] = print,
    task: type[Task] | None = None,
    initialize: Initialize[Trainer] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """A whole training run.  Collective.

    Args:
        settings: All settings.
        folder: For the files of the run; an earlier run there is renamed, unless it is resumed.
        mesh: Default: a Mesh of all ranks of this job, as the settings say.
        resume: Whether to go on from the newest checkpoint of the folder; or a checkpoint.
        say: Takes lines of progress, on rank 0 only.
        task: What the model learns; default: the setting ``task``.
        initialize: Called before the first step unless the run is resumed, to give
            ``trainer.step.variables`` other first values.
        callbacks: Called at every step, evaluation, save and failure, on all ranks; see `Callback`.
    """

    def begin(on: AnyMesh, source: Resume | Initialize[Trainer]) -> Trainer:
        trainer = ready(Trainer(settings, on, folder, say, task, callbacks), source, initialize)
        from_first(on, lambda: Path(folder, SAVED).write_text(written(settings), encoding="utf-8"))
        return trainer

    if settings.mesh.recover and mesh is None:
        return train_on_survivors(settings, folder, resume, say, begin)
    with StopSignals():
        on = make_mesh(settings.mesh) if mesh is None else mesh
        return run_loop(on, folder, say, lambda: begin(on, resume))
