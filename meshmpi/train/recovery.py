"""Training that goes on when ranks are lost: fewer ranks, a smaller mesh, the last checkpoint.

Knows when to turn back and what to say; how survivors find each other is
`meshmpi.runtime.recovery`'s business.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshmpi import checkpoint
from meshmpi.dims import Layout, MeshShape
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.recovery import (
    FINISHED,
    TO_THE_END,
    LostRank,
    Survivors,
    is_loss,
    named,
    smaller_mesh,
)
from meshmpi.train.loop import Result, Trainer, ready, run_trainer
from meshmpi.train.settings import MeshSettings, Settings
from meshmpi.train.setup import chosen_layout, mesh_shape
from meshmpi.train.signals import StopSignals
from meshmpi.train.tasks.base import Task

BATCH = "batch"
Source = bool | str | os.PathLike[str]


class Checkpoints:
    """Which of the checkpoints in a folder were made since this was.

    Args:
        folder: Of the checkpoints; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = {_made_at(path) for path in checkpoint.find(folder)}

    def newest(self) -> Path | None:
        """The newest one made since, or None."""
        return next(
            (p for p in checkpoint.find(self._folder) if _made_at(p) not in self._before), None
        )


def _made_at(path: Path) -> tuple[int, int]:
    """Tells checkpoints apart, whatever their names are and though files of one were restored."""
    manifest = path / "manifest.json"
    try:
        found = (manifest if manifest.exists() else path).stat()
    except FileNotFoundError:  # just removed for a newer one
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def next_mesh(settings: MeshSettings, wanted: MeshShape, ranks: int) -> MeshShape:
    """The mesh for so many ranks in the place of ``wanted``, see `smaller_mesh`."""
    split = Layout(chosen_layout(settings, wanted)).axes(BATCH)
    return smaller_mesh(wanted, ranks, tuple(a for a in wanted.names if a not in split))


def train_on_survivors(
    settings: Settings, folder: str | os.PathLike[str], resume: Source,
    say: Callable[[str], None], task: type[Task] | None,
    initialize: Callable[[Trainer], None] | None,
) -> Result:  # fmt: skip
    """As `loop.train` on all ranks of this job, those that are lost left behind.  Collective.

    Returns:
        How it ended; with ranks to spare, what they know of it.

    Raises:
        ConfigError: This MPI job would not outlive a rank.
    """
    with StopSignals():
        survivors = Survivors()
        wanted = mesh_shape(settings.mesh, survivors.size)
        run = _Run(settings, Path(folder), resume, say, task, initialize)
        while True:
            shape = next_mesh(settings.mesh, wanted, survivors.size)
            result = run.attempt(survivors, wanted if run.first else shape)
            bits = FINISHED | TO_THE_END if run.finished else 0
            if result is not None and result.stopped_by:
                bits -= TO_THE_END
            bits = survivors.agree(bits)
            if bits & FINISHED:
                if result is None:  # a rank to spare
                    stopped_by = "" if bits & TO_THE_END else "another rank"
                    result = Result(0, None, None, None, "", stopped_by)
                return result
            lost = survivors.shrink()
            if survivors.rank == 0:
                shape = next_mesh(settings.mesh, wanted, survivors.size)
                run.tell(lost, shape, survivors.size)


class _Run:
    """What is tried again: a training, from where it can be taken up.

    Attributes:
        first: Whether nothing has been lost yet.
        finished: Whether this rank got through the last attempt.
    """

    def __init__(
        self, settings: Settings, folder: Path, resume: Source, say: Callable[[str], None],
        task: type[Task] | None, initialize: Callable[[Trainer], None] | None,
    ) -> None:  # fmt: skip
        self._settings, self._folder, self._resume, self._say = settings, folder, resume, say
        self._task, self._initialize = task, initialize
        self._made = Checkpoints(folder / "checkpoints")
        self._trainer: Trainer | None = None
        self._done: int | None = None
        self.first, self.finished = True, False

    def attempt(self, survivors: Survivors, shape: MeshShape) -> Result | None:
        """Trains until the end or a loss; None after a loss, and on ranks to spare."""
        result, self.finished, self._done = None, False, None
        try:
            mesh = survivors.mesh(shape)
            if mesh is not None:
                result = run_trainer(mesh, self._say, functools.partial(self._ready, mesh))
            self.finished = True
        except Exception as error:
            if not is_loss(error):
                raise
            survivors.turn_back()
        if self._trainer is not None:
            self._done = self._trainer.done
            if not self.finished:
                self._trainer.abandon()
        self.first, self._trainer = False, None
        gc.collect()  # the variables of a lost attempt, before there are new ones
        return result

    def _ready(self, mesh: Any) -> Trainer:
        source = self._resume if self.first else from_first(mesh, self._source)
        self._trainer = ready(
            self._settings, mesh, self._folder, self._say, self._task, source, self._initialize
        )
        return self._trainer

    def _source(self) -> Source:
        """Where to go on: the newest checkpoint that this run made, or else as in the beginning.

        Older ones in the folder may be later steps of another training.
        """
        newest = self._made.newest()
        if newest is None:
            return self._resume
        return True if isinstance(self._resume, bool) else newest

    def tell(self, lost: list[LostRank], shape: MeshShape, ranks: int) -> None:
        """Says what was lost and how the others go on; on the first of them."""
        spare = f", {ranks - shape.size} to spare" if ranks > shape.size else ""
        at = f" after step {self._done}" if self._done is not None else ""
        step, source = 0, self._source()
        if source is not False:
            found = checkpoint.find(self._folder / "checkpoints") if source is True else [source]
            step = checkpoint.read_manifest(found[0]).step if found else 0
        repeated = max(0, (self._done or 0) - step)
        self._say(
            f"{named(lost)} {'was' if len(lost) == 1 else 'were'} lost{at}:"
            f" {shape.size} rank{'s go' if shape.size > 1 else ' goes'} on with mesh {shape}{spare}"
            f" from step {step}; {repeated} step{'' if repeated == 1 else 's'} to repeat"
        )
