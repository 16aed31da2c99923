"""Saving: every rank writes the blocks that it owns; one rename makes them a checkpoint.

A checkpoint is a folder ``step-00001200`` with a manifest and one file of tensors per writing rank.  A block that
several ranks hold is written once, by the lowest of them.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.checkpoint.buddies import Buddies
from meshmpi.checkpoint.folder import GONE, MANIFEST, announced, clean, durable_folder, find, set_aside, turn_back
from meshmpi.checkpoint.manifest import check_plain, manifest_text, read_manifest, size_problem
from meshmpi.checkpoint.shard import Identity, Shard, make_shard
from meshmpi.errors import CheckpointError
from meshmpi.files import disk
from meshmpi.ir.program import LocalType
from meshmpi.runtime.agreement import first_error, from_first, gathered
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.replicas import Replicas
from meshmpi.runtime.variables import VariableStore

Records = dict[str, dict[str, Any]]
"""File -> what the manifest says about it."""
Blocks = Mapping[int, Mapping[str, np.ndarray]]
"""Rank -> the blocks that it writes, by name of the variable."""


def save(
    folder: str | os.PathLike[str],
    store: VariableStore,
    step: int,
    about: Mapping[str, Any],
    keep: int = 0,
    buddies: Buddies | None = None,
    say: Callable[[str], None] = warnings.warn,
    after: int | None = None,
    compared: bool = False,
) -> Path:
    """Writes a checkpoint of all variables.  Collective.

    It becomes the newest checkpoint: those of later steps are set aside.

    Args:
        folder: Where checkpoints are kept, on a file system that all ranks see.
        store: ``step.variables`` of a compiled step.
        step: Training steps done; names the checkpoint.
        about: Plain values for the manifest.
        keep: Newest checkpoints to keep; 0 keeps all.
        buddies: Who else keeps a copy of each rank's file.
        say: Called on rank 0 with what was set aside, and with what went wrong after the checkpoint was whole.
        after: The step that the training went back to; checkpoints of later steps are set aside.
            Default: ``step``.
        compared: Whether it is known that ranks which hold the same block hold the same values.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: It cannot be written, or copies of a variable differ between ranks; earlier
            checkpoints are untouched.
    """
    saving = Save(folder, store, step, about, keep, buddies, say, after, compared)
    saving.take({rank: owned(store, rank) for rank in store.ranks})
    files, error = {}, None
    try:
        files = saving.write()
    except CheckpointError as failure:
        error = failure
    saving.check(error)
    files = saving.all_files(files)
    from_first(store.mesh, lambda: saving.commit(files))
    return saving.finish()


@dataclass
class Save:
    """One checkpoint on its way to disk: `take` its blocks, `write` them, `commit`, `finish`; arguments as of `save`.

    ``write`` and ``commit`` do not communicate and may run in a thread; everything else is collective.
    """

    folder: str | os.PathLike[str]
    store: VariableStore
    step: int
    about: Mapping[str, Any]
    keep: int
    buddies: Buddies | None
    say: Callable[[str], None]
    after: int | None
    compared: bool

    def __post_init__(self) -> None:
        differences = [] if self.compared else Replicas(self.store).differences()
        if differences:  # only one copy is written: the difference would be lost without a trace
            raise CheckpointError(
                f"nothing is saved, because replicas of variables differ: {differences[0]}.",
                "Continue from the last checkpoint. If the ranks were fed different arrays,"
                " mm.compile(..., debug=True) tells which.",
            )
        self._mesh, self.about = self.store.mesh, dict(self.about)
        self._types = {name: v.type for name, v in self.store.types.items()}
        self._step_numbers = self.store.step_numbers  # the training goes on while the manifest waits
        self.identity = begin(self._mesh, Path(self.folder), self.step, self.about)
        self.place = durable_folder(Path(self.folder), self.identity)
        self._blocks: Blocks = {}
        self._shards: list[Shard] | None = None

    def take(self, blocks: Blocks) -> None:
        """Says which blocks this process writes, and sends copies of them to buddies."""
        self._blocks = blocks
        if self.buddies is not None:
            self._shards = self._made()
            self.buddies.exchange(self.place.path, self.identity, self._shards)

    def _made(self) -> list[Shard]:
        return [make_shard(self.identity, rank, blocks) for rank, blocks in self._blocks.items() if blocks]

    def write(self) -> Records:
        """Writes the files of this process; returns what the manifest says about them."""
        shards = self._made() if self._shards is None else self._shards
        with disk.errors_of(self._mesh.rank):
            for shard in shards:
                self.place.write(shard.file, shard.pieces)
            if self.buddies is not None:
                self.buddies.write(self.place.path)
        return {shard.file: shard.record() for shard in shards}

    def check(self, error: CheckpointError | None) -> None:
        """Discards everything if any rank has an error, and raises that error on all ranks."""
        found = first_error(self._mesh, error)
        if found is not None:
            from_first(self._mesh, self.place.discard)
            raise found

    def all_files(self, records: Records) -> Records:
        """What the manifest says about the files of all ranks."""
        return {f: r for part in gathered(self._mesh, records) for f, r in part.items()}

    def commit(self, files: Records) -> None:
        """Writes the manifest, gives the folder its name, removes old checkpoints.  Rank 0 only."""
        folder, shape = self.place.path.parent, self._mesh.shape
        text = manifest_text(self.identity, shape, self._types, self.about, files, time.time(), self._step_numbers)
        with disk.errors_of(0):
            turn = turn_back(folder, self.identity, self.identity.step if self.after is None else self.after)
            with announced(folder, turn), self.place:
                for name in files:
                    if not (self.place.partial / name).exists():
                        raise CheckpointError(
                            f"rank 0 does not see {name}, which another rank has written to {self.place.partial}.",
                            "Keep checkpoints on a file system that all nodes share.",
                        )
                self.place.write(MANIFEST, [text.encode()])
        try:
            if turn is not None and (line := set_aside(folder, turn)):
                self.say(line)
            disk.remove(self.place.replaced)
            drop_old(folder, self.keep)
        except OSError as failure:
            self.say(f"an old checkpoint stays: {failure.filename}: {failure.strerror}")

    def finish(self) -> Path:
        """Drops buddies' copies of checkpoints that are gone; returns the folder of the new one."""
        if self.buddies is not None:
            self.buddies.drop_old(self.place.path)
        return self.place.path


def owns_block(t: LocalType, coordinates: Mapping[str, int]) -> bool:
    """Whether the rank at ``coordinates`` is the lowest of those that hold the same block."""
    return all(c == 0 for axis, c in coordinates.items() if axis not in t.used_axes)


def owned(store: VariableStore, rank: int) -> dict[str, np.ndarray]:
    """The blocks that a rank writes."""
    coordinates = store.mesh.shape.coordinates(rank)
    return {
        name: store.blocks[name][rank]
        for name, variable in store.types.items()
        if owns_block(variable.type, coordinates) and store.blocks[name][rank].size
    }


def begin(mesh: AnyMesh, folder: Path, step: int, about: Mapping[str, Any]) -> Identity:
    """Removes what killed saves have left and makes the folder of a new one.  Collective."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"a checkpoint of step {step!r} is not valid: steps are integers from 0 on.",
            "Give the number of training steps done.",
        )

    def prepare() -> Identity:
        check_plain(about)
        identity = Identity(secrets.token_hex(8), number)
        with disk.errors_of(0):
            disk.make_folder(folder)
            clean(folder)
            durable_folder(folder, identity).make()
        return identity

    return from_first(mesh, prepare)


def drop_old(folder: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints; those that look damaged do not count."""
    whole = 0
    for path in find(folder) if keep else []:
        if whole >= keep:
            gone = folder / f".{path.name.lstrip('.')}{GONE}"
            disk.rename(path, gone)  # never a half-deleted folder under a good name
            disk.remove(gone)
        else:
            with contextlib.suppress(CheckpointError):
                whole += not size_problem(read_manifest(path))
