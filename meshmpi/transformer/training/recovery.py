"""Training that goes on when ranks are lost: fewer ranks, a smaller mesh, the last step.

Where the survivors hold all variables of one step, they go on from it; else from the newest
checkpoint.  A step's variables change only after all ranks have come through its collectives
(``atomic``): either no survivor holds those of the next step, or each can end it alone.

Knows when to turn back and what to say; how survivors find each other is
`meshmpi.guard.recovery`'s business, what they hold `meshmpi.checkpoint.surviving`'s.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi import checkpoint
from meshmpi.checkpoint.loading import fits_twice
from meshmpi.checkpoint.surviving import Holding, Source, hand_over, newest, splits_of, types_of, wanted_by
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import CheckpointError
from meshmpi.guard.recovery import FINISHED, TO_THE_END, LostRank, Survivors, is_loss, named, smaller_mesh
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.tasks.base import Task
from meshmpi.transformer.training.beginning import ready, run_trainer
from meshmpi.transformer.training.loop import Result, Trainer
from meshmpi.transformer.training.settings import MeshSettings, Settings
from meshmpi.transformer.training.setup import chosen_layout, mesh_shape
from meshmpi.transformer.training.signals import StopSignals
from meshmpi.transformer.training.stopping import Interrupted

BATCH = "batch"
Resume = bool | str | os.PathLike[str]


class Checkpoints:
    """Which of the checkpoints in a folder were made since this was.

    Args:
        folder: Folder of the checkpoints; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = {_made_at(path) for path in checkpoint.find(folder)}

    def newest(self) -> Path | None:
        """The newest one made since, or None."""
        return next((p for p in checkpoint.find(self._folder) if _made_at(p) not in self._before), None)


def _made_at(path: Path) -> tuple[int, int]:
    """Tells checkpoints apart, whatever their names are and though files of one were restored."""
    manifest = path / "manifest.json"
    try:
        found = (manifest if manifest.exists() else path).stat()
    except FileNotFoundError:  # just removed for a newer one
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def next_mesh(settings: MeshSettings, wanted: MeshShape, ranks: int) -> MeshShape:
    """The mesh for this number of ranks in place of ``wanted``, see `smaller_mesh`."""
    split = Layout(chosen_layout(settings, wanted)).axes(BATCH)
    return smaller_mesh(wanted, ranks, tuple(a for a in wanted.names if a not in split))


def train_on_survivors(
    settings: Settings,
    folder: str | os.PathLike[str],
    resume: Resume,
    say: Callable[[str], None],
    task: type[Task] | None,
    initialize: Callable[[Trainer], None] | None,
) -> Result:
    """Trains on all ranks of this job, without those that are lost on the way.  Collective.

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
            run.lost += survivors.shrink()


@dataclass
class _Held:
    """The variables that this rank holds of one mesh.

    Attributes:
        attempt: Number of the attempt for which the mesh was made.
        store: The variables.
        trainer: Who trains them; None when its memory was given up.
        position: Its `Trainer.position` then.
    """

    attempt: int
    store: VariableStore
    trainer: Trainer | None
    position: dict[str, Any]

    def holdings(self) -> list[Holding]:
        """What the others need to know of it; nothing where a step was left half done."""
        step, ready = self.position.get("done", 0), False
        if self.trainer is not None:
            progress = self.trainer.step.executor.progress
            if not self.trainer.whole or progress == "writing":
                return []
            step, ready = self.trainer.done, progress == "ready"
        mesh = self.store.mesh
        return [Holding(self.attempt, mesh.shape, mesh.rank, step, ready, splits_of(self.store))]

    def settle(self, step: int) -> bool:
        """Ends the last step where it was agreed to count; whether these are its variables."""
        if self.trainer is not None:
            if self.trainer.done + 1 == step:
                self.trainer.finish_step()
            self.position, self.trainer = self.trainer.position, None
        return self.position["done"] == step


class _Run:
    """A training that is tried again from where it can go on.

    Attributes:
        lost: Ranks whose loss was not reported yet.
        first: Whether nothing has been lost yet.
        finished: Whether this rank got through the last attempt.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        resume: Resume,
        say: Callable[[str], None],
        task: type[Task] | None,
        initialize: Callable[[Trainer], None] | None,
    ) -> None:
        self._settings, self._folder, self._resume, self._say = settings, folder, resume, say
        self._task, self._initialize = task, initialize
        self._made = Checkpoints(folder / "checkpoints")
        self._attempts = 0
        self._held: list[_Held] = []
        self._source: Source | None = None  # until it was handed over
        self.lost: list[LostRank] = []
        self.first, self.finished = True, False

    def attempt(self, survivors: Survivors, shape: MeshShape) -> Result | None:
        """Trains until the end or a loss; None after a loss, and on ranks to spare."""
        result, self.finished = None, False
        self._attempts += 1
        try:
            if not self.first:
                self._look(survivors, shape)
                self._put_back(survivors, shape)
            mesh = survivors.first(shape.size, lambda comm: Mesh(shape, comm))
            if mesh is not None:
                ready_on = functools.partial(self._ready, survivors, mesh)
                result = run_trainer(mesh, self._folder, self._say, ready_on)
            elif self._source is not None:
                self._take_over(survivors, None)
            self.finished = True
        except Exception as error:
            if not is_loss(error):
                raise
            survivors.turn_back()
            for held in self._held:
                if held.trainer is not None:
                    held.trainer.abandon()
        self.first = False
        return result

    def _look(self, survivors: Survivors, shape: MeshShape) -> None:
        """Finds where to go on, and gives up the memory of all else.  Collective."""
        self._source = None
        mine = [holding for held in self._held for holding in held.holdings()]
        done = [held.position["done"] if held.trainer is None else held.trainer.done for held in self._held]
        fits = all(fits_twice(held.store) for held in self._held)
        told = survivors.gathered((mine, done, fits))
        if all(fitting for _, _, fitting in told):
            self._source = newest([holdings for holdings, _, _ in told])
        source = self._source
        self._held = [
            held
            for held in self._held
            if source is not None and held.attempt == source.attempt and held.settle(source.step)
        ]
        gc.collect()  # arenas, before there are new ones
        if survivors.rank == 0:
            after = max((n for _, part, _ in told for n in part), default=None)
            self._tell(shape, survivors.size, after)
        self.lost = []

    def _put_back(self, survivors: Survivors, shape: MeshShape) -> None:
        """Has copies that ranks to spare keep put in place of files lost with a rank.  Collective.

        The ranks of the next mesh do the same among themselves when they load.
        """
        where = self._settings.checkpoint.partner
        if self._source is not None or not where or survivors.size == shape.size:
            return
        try:
            manifest = from_first(survivors, self._manifest)
        except CheckpointError:
            return  # whoever loads it will say so
        if manifest is None:
            return
        buddies = checkpoint.Buddies(survivors, where)
        mine = buddies.damaged(manifest) if survivors.rank >= shape.size else []
        found = sorted({file for part in survivors.gathered(mine) for file in part})
        for note in buddies.restore(manifest, found):
            if survivors.rank == 0:
                self._say(note)

    def _ready(self, survivors: Survivors, mesh: AnyMesh) -> Trainer:
        resume: Any = self._resume if self.first else from_first(mesh, self._checkpoint)
        if self._source is not None:
            resume = functools.partial(self._take_over, survivors)
        try:
            trainer = ready(self._settings, mesh, self._folder, self._say, self._task, resume, self._initialize)
        except Interrupted:
            if self._source is not None:
                self._take_over(survivors, None, stops=True)
            raise
        if all(held.trainer is not trainer for held in self._held):
            self._held.append(_Held(self._attempts, trainer.step.variables, trainer, {}))
        return trainer

    def _take_over(self, survivors: Survivors, trainer: Trainer | None, stops: bool = False) -> None:
        """Fills the variables of the new mesh.  Collective.

        Args:
            survivors: All of them.
            trainer: On ranks of the new mesh.
            stops: Whether the run was asked to stop before there was one.
        """
        source = self._source
        assert source is not None
        self._source = None
        new = None if trainer is None else trainer.step.variables
        wants: list[Any] = survivors.gathered(stops or (None if new is None else wanted_by(new)))
        if any(wanted is True for wanted in wants):
            return
        old = self._held[0] if self._held else None
        mine = None if old is None else (types_of(old.store), old.position)
        types, position = survivors.given_by(min(source.holders.values()), mine)
        hand_over(survivors.comm, source, types, None if old is None else old.store, new, wants)
        if trainer is not None:
            self._held.append(_Held(self._attempts, trainer.step.variables, trainer, {}))
            trainer.go_on(position)
        survivors.gathered(None)  # the old ones may be needed until all new ones are there
        self._held = [held for held in self._held if held.trainer is not None]

    def _checkpoint(self) -> Resume:
        """Where to go on otherwise: the newest checkpoint that this run made, or the beginning.

        Older ones in the folder may be later steps of another training.
        """
        made = self._made.newest()
        if made is None:
            return self._resume
        return True if isinstance(self._resume, bool) else made

    def _tell(self, shape: MeshShape, ranks: int, done: int | None) -> None:
        """Says what was lost and how the others go on."""
        lost = self.lost
        spare = f", {ranks - shape.size} to spare" if ranks > shape.size else ""
        step, where = self._next_step()
        if done is not None and self._source is not None:
            done = max(done, step)  # survivors end a step in which they need nobody any more
        at = f" after step {done}" if done is not None else ""
        repeated = max(0, (done or 0) - step)
        self._say(
            f"{named(lost)} {'was' if len(lost) == 1 else 'were'} lost{at}:"
            f" {shape.size} rank{'s go' if shape.size > 1 else ' goes'} on with mesh {shape}{spare}"
            f" from step {step}{where}; {repeated} step{'' if repeated == 1 else 's'} to repeat"
        )

    def _next_step(self) -> tuple[int, str]:
        if self._source is not None:
            return self._source.step, ", which is in memory"
        manifest = self._manifest()
        return (0 if manifest is None else manifest.step), ""

    def _manifest(self) -> checkpoint.Manifest | None:
        """The step of the checkpoint to go on from; None for the beginning."""
        source = self._checkpoint()
        if source is False:
            return None
        found = checkpoint.find(self._folder / "checkpoints") if source is True else [source]
        return checkpoint.read_manifest(found[0]) if found else None
