"""Continues a training when ranks are lost: on fewer ranks, with a smaller mesh, from the last step.

If the survivors hold all variables of one step, they continue from it; otherwise from the newest checkpoint. A step
changes its variables only after all ranks have passed its collectives (``atomic``), so either no survivor has those
of the next step, or each can finish it alone. `meshmpi.guard.recovery` finds the survivors,
`meshmpi.checkpoint.surviving` the blocks that they hold.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
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
from meshmpi.runtime.variables import VariableStore
from meshmpi.training.callback import Interrupted
from meshmpi.training.loop import Position, Result
from meshmpi.training.signals import StopSignals
from meshmpi.training.starting import Initialize, Resume, run_loop
from meshmpi.transformer.training.settings import MeshSettings, Settings
from meshmpi.transformer.training.setup import chosen_layout, mesh_shape
from meshmpi.transformer.training.trainer import Trainer

Begin = Callable[[Mesh, Resume | Initialize[Trainer]], Trainer]
"""Makes a trainer on a mesh that goes on from there."""


class Checkpoints:
    """The checkpoints of a folder, which need not exist, that were made after this object was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = {_made_at(path) for path in checkpoint.find(folder)}

    def newest(self) -> Path | None:
        return next((p for p in checkpoint.find(self._folder) if _made_at(p) not in self._before), None)


def _made_at(path: Path) -> tuple[int, int]:
    """Identifies a checkpoint, whatever its name and also after a file of it was restored."""
    manifest = path / "manifest.json"
    try:
        found = (manifest if manifest.exists() else path).stat()
    except FileNotFoundError:  # just removed for a newer one
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def next_mesh(settings: MeshSettings, wanted: MeshShape, ranks: int) -> MeshShape:
    """The mesh for ``ranks`` in place of ``wanted``, see `smaller_mesh`."""
    split = Layout(chosen_layout(settings, wanted)).axes("batch")
    return smaller_mesh(wanted, ranks, tuple(a for a in wanted.names if a not in split))


def train_on_survivors(
    settings: Settings, folder: str | os.PathLike[str], resume: Resume, say: Callable[[str], None], begin: Begin
) -> Result:
    """Trains on all ranks of this job, without those that are lost on the way; arguments as `run.train`.  Collective.

    Raises:
        ConfigError: This MPI job would not outlive a rank.
    """
    with StopSignals():
        survivors = Survivors()
        wanted = mesh_shape(settings.mesh, survivors.size)
        run = _Run(settings, Path(folder), resume, say, begin, survivors)
        while True:
            shape = next_mesh(settings.mesh, wanted, survivors.size)
            result = run.attempt(wanted if run.first else shape)
            bits = FINISHED | TO_THE_END if run.finished else 0
            if result is not None and result.stopped_by:
                bits -= TO_THE_END
            bits = survivors.agree(bits)
            if bits & FINISHED:
                # A rank to spare has no result of its own.
                return result or Result(stopped_by="" if bits & TO_THE_END else "another rank")
            run.lost += survivors.shrink()


@dataclass
class _Held:
    """The variables that this rank holds of one mesh."""

    attempt: int  # for which the mesh was made
    store: VariableStore
    trainer: Trainer | None  # None when its memory was given up
    position: Position = field(default_factory=Position)  # of the trainer then

    @property
    def done(self) -> int:
        return self.position.done if self.trainer is None else self.trainer.done

    def holdings(self) -> list[Holding]:
        """What the others need to know of it; nothing where a step was left half done."""
        ready = False
        if self.trainer is not None:
            progress = self.trainer.step.executor.progress
            if not self.trainer.whole or progress == "writing":
                return []
            ready = progress == "ready"
        mesh = self.store.mesh
        return [Holding(self.attempt, mesh.shape, mesh.rank, self.done, ready, splits_of(self.store))]

    def settle(self, step: int) -> bool:
        """Ends the last step where all agreed that it counts; whether these are its variables."""
        if self.trainer is not None:
            if self.trainer.done + 1 == step:
                self.trainer.finish_step()
            self.position, self.trainer = self.trainer.position(), None
        return self.position.done == step


class _Run:
    """A training that is attempted again after each loss."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        resume: Resume,
        say: Callable[[str], None],
        begin: Begin,
        survivors: Survivors,
    ) -> None:
        self._settings, self._folder, self._resume, self._say = settings, folder, resume, say
        self._begin, self._survivors = begin, survivors
        self._made = Checkpoints(folder / "checkpoints")
        self._attempts = 0
        self._held: list[_Held] = []
        self._source: Source | None = None  # until it was handed over
        self.lost: list[LostRank] = []  # their loss was not reported yet
        self.first = True  # nothing has been lost yet
        self.finished = False  # whether this rank got through the last attempt

    def attempt(self, shape: MeshShape) -> Result | None:
        """Trains until the end or a loss; None after a loss, and on ranks to spare."""
        result, self.finished = None, False
        self._attempts += 1
        try:
            if not self.first:
                self._look(shape)
                self._put_back(shape)
            mesh = self._survivors.first(shape.size, lambda comm: Mesh(shape, comm))
            if mesh is not None:
                on = mesh
                result = run_loop(on, self._folder, self._say, lambda: self._ready(on))
            elif self._source is not None:
                self._take_over(None)
            self.finished = True
        except Exception as error:
            if not is_loss(error):
                raise
            self._survivors.turn_back()
            for held in self._held:
                if held.trainer is not None:
                    held.trainer.abandon()
        self.first = False
        return result

    def _look(self, shape: MeshShape) -> None:
        """Finds where to go on, and gives up the memory of all else.  Collective."""
        self._source = None
        mine = [holding for held in self._held for holding in held.holdings()]
        fits = all(fits_twice(held.store) for held in self._held)
        found = self._survivors.gathered((mine, [held.done for held in self._held], fits))
        if all(fitting for _, _, fitting in found):
            self._source = newest([holdings for holdings, _, _ in found])
        source = self._source
        kept = [h for h in self._held if source and h.attempt == source.attempt and h.settle(source.step)]
        self._held = kept
        gc.collect()  # arenas, before there are new ones
        if self._survivors.rank == 0:
            self._report_loss(shape, max((n for _, part, _ in found for n in part), default=None))
        self.lost = []

    def _put_back(self, shape: MeshShape) -> None:
        """Restores lost files from copies of ranks to spare, as the ranks of the next mesh do when they load."""
        where, survivors = self._settings.checkpoint.partner, self._survivors
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

    def _ready(self, mesh: Mesh) -> Trainer:
        resume: Resume | Initialize[Trainer] = self._resume if self.first else from_first(mesh, self._checkpoint)
        if self._source is not None:
            resume = self._take_over
        try:
            trainer = self._begin(mesh, resume)
        except Interrupted:
            if self._source is not None:
                self._take_over(None, stops=True)
            raise
        if all(held.trainer is not trainer for held in self._held):
            self._held.append(_Held(self._attempts, trainer.step.variables, trainer))
        return trainer

    def _take_over(self, trainer: Trainer | None, stops: bool = False) -> None:
        """Fills the variables of the new mesh, whose ranks have a trainer unless the run stops.  Collective."""
        source, survivors = self._source, self._survivors
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
            self._held.append(_Held(self._attempts, trainer.step.variables, trainer))
            trainer.go_on(position)
        survivors.gathered(None)  # the old ones may be needed until all new ones are there
        self._held = [held for held in self._held if held.trainer is not None]

    def _checkpoint(self) -> Resume:
        """Where to go on otherwise: the newest checkpoint that this run made, or the beginning."""
        made = self._made.newest()  # older ones in the folder may be later steps of another training
        if made is None:
            return self._resume
        return True if isinstance(self._resume, bool) else made

    def _report_loss(self, shape: MeshShape, done: int | None) -> None:
        """Says what was lost and how the others go on; some survivor has done ``done`` steps."""
        lost, spare = self.lost, self._survivors.size - shape.size
        if self._source is not None:
            step, where = self._source.step, ", which is in memory"
            done = None if done is None else max(done, step)  # survivors end a step in which they need nobody
        else:
            manifest = self._manifest()
            step, where = (0 if manifest is None else manifest.step), ""
        at = "" if done is None else f" after step {done}"
        repeated = max(0, (done or 0) - step)
        self._say(
            f"{named(lost)} {'was' if len(lost) == 1 else 'were'} lost{at}:"
            f" {shape.size} rank{'s go' if shape.size > 1 else ' goes'} on with mesh {shape}"
            f"{f', {spare} to spare' if spare else ''}"
            f" from step {step}{where}; {repeated} step{'' if repeated == 1 else 's'} to repeat"
        )

    def _manifest(self) -> checkpoint.Manifest | None:
        """The manifest of the checkpoint to go on from; None for the beginning."""
        source = self._checkpoint()
        if source is False:
            return None
        found = checkpoint.find(self._folder / "checkpoints") if source is True else [source]
        return checkpoint.read_manifest(found[0]) if found else None
