"""The beginning of a run on ranks that are there: its lock, its trainer, its folder."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshmpi.guard.status import publish
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.tasks.base import Task
from meshmpi.transformer.training.lock import held
from meshmpi.transformer.training.loop import Result, Trainer
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import set_aside, write_settings
from meshmpi.transformer.training.stopping import Interrupted


def run_trainer(
    mesh: AnyMesh, folder: str | os.PathLike[str], say: Callable[[str], None], make: Callable[[], Trainer]
) -> Result:
    """Makes a trainer and runs it; it may be asked to stop at any time.  Collective.

    Raises:
        ConfigError: Another job writes the folder of the run.
    """
    with held(mesh, folder):
        try:
            trainer = make()
        except Interrupted as stop:
            if mesh.rank == 0:
                say(f"stopped by {stop.reason} before the first step: there is nothing to save")
            return Result(0, None, None, None, "", stop.reason)
        return trainer.run()


def ready(
    settings: Settings,
    mesh: AnyMesh,
    folder: str | os.PathLike[str],
    say: Callable[[str], None],
    task: type[Task] | None,
    resume: bool | str | os.PathLike[str] | Callable[[Trainer], None],
    initialize: Callable[[Trainer], None] | None,
) -> Trainer:
    """A trainer whose variables and folder are as they must be before its first step.

    Args: as `train`, and

        resume: Or what gives the trainer its variables.
    """
    trainer = Trainer(settings, mesh, folder, say, task)
    if callable(resume):
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
    from_first(mesh, lambda: write_settings(settings, folder))
    publish(folder)
    return trainer
