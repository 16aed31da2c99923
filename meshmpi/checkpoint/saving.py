"""Saving: every rank writes what it holds, once; one rename makes it a checkpoint.

A checkpoint is a folder ``step-00001200`` with one file of tensors per writing rank and a manifest.
It is written beside its name and renamed when all of it is on disk: a folder of that name is whole.
A block that several ranks hold is written once, by the lowest of them.

Knows variables by name and block only: no model, no data, no training loop.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.checkpoint import disk
from meshmpi.checkpoint.folder import (
    GONE,
    MANIFEST,
    REPLACED,
    Turn,
    announce,
    clean,
    find,
    partial_name,
    revoke,
    set_aside,
    step_name,
    turn_back,
)
from meshmpi.checkpoint.folder import PARTIAL as PARTIAL  # trials look for it here
from meshmpi.checkpoint.manifest import (
    check_plain,
    manifest_text,
    read_manifest,
    size_problem,
)
from meshmpi.checkpoint.partners import Partners
from meshmpi.checkpoint.shard import Identity, Shard, make_shard
from meshmpi.dims import MeshShape
from meshmpi.errors import CheckpointError
from meshmpi.program import LocalType
from meshmpi.runtime.agreement import first_error, from_first, gathered
from meshmpi.runtime.variables import VariableStore

Records = dict[str, dict[str, Any]]
"""File -> what the manifest says of it."""


def save(
    folder: str | os.PathLike[str], store: VariableStore, step: int, about: Mapping[str, Any],
    keep: int = 0, partners: Partners | None = None,
    say: Callable[[str], None] = warnings.warn, after: int | None = None,
) -> Path:  # fmt: skip
    """Writes a checkpoint of all variables.  Collective.

    It is the newest one then, also where there were some of later steps: those are set aside.

    Args:
        folder: Where checkpoints are kept, on a file system that all ranks see.
        store: ``step.variables`` of a compiled step.
        step: Training steps done; names the checkpoint.
        about: Plain values for the manifest.
        keep: Newest checkpoints to keep; 0 keeps all.
        partners: Who else keeps a copy of each rank's file.
        say: Takes what was set aside, and what went wrong after the checkpoint was whole, on
            rank 0.
        after: The step that the training went back to: what was there of later steps is set aside;
            default: ``step``.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: It cannot be written; what was there before is untouched.
    """
    place = begin(store.mesh, folder, step, about)
    types = {name: v.type for name, v in store.types.items()}
    shards = [make_shard(place.identity, rank, owned(store, rank)) for rank in store.ranks]
    shards = [s for s in shards if s.data]
    if partners is not None:
        partners.exchange(place.target, place.identity, shards)
    error, records = None, {}
    try:
        records = place.write(shards)
        if partners is not None:
            partners.write(place.target)
    except OSError as failure:
        error = disk.unwritable(failure, store.mesh.rank)
    error = first_error(store.mesh, error)
    if error is not None:
        from_first(store.mesh, place.discard)
        raise error
    files = {f: r for part in gathered(store.mesh, records) for f, r in part.items()}
    shape, back_to = store.mesh.shape, place.identity.step if after is None else after
    from_first(store.mesh, lambda: place.commit(shape, types, about, files, keep, say, back_to))
    if partners is not None:
        partners.drop_old(place.target)
    return place.target


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


def begin(
    mesh: Any, folder: str | os.PathLike[str], step: int, about: Mapping[str, Any] | None = None
) -> Place:
    """Removes what killed saves have left and makes the folder of a new one.  Collective.

    Args:
        mesh: Of the run.
        folder: Of all checkpoints.
        step: Training steps done.
        about: What the manifest shall say.

    Raises:
        CheckpointError: It cannot be made, or ``step`` or ``about`` cannot be written.
    """
    folder = Path(folder)
    step = _checked_step(step)

    def prepare() -> str:
        check_plain(about or {})
        place = Place(folder, Identity(secrets.token_hex(8), step))
        try:
            disk.make_folder(folder)
            clean(folder)
            disk.make_folder(place.beside, sync=False)  # its last name is waited for
        except OSError as error:
            place.discard()
            raise disk.unwritable(error, 0) from error
        return place.identity.checkpoint

    return Place(folder, Identity(from_first(mesh, prepare), step))


def _checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"a checkpoint of step {step!r} would not be found again: steps are whole numbers from"
            " 0 on.", "Give the number of training steps done.",
        )  # fmt: skip
    return number


class Place:
    """Where one checkpoint is written, and what makes it valid.

    Args:
        folder: Of all checkpoints.
        identity: Of this one.

    Attributes:
        target: Its name once it is whole.
        beside: Where it is written; the name is of this save alone, so that nobody who still writes
            for one that was given up, a lost rank or a thread, writes into another.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self.target = folder / step_name(identity.step)
        self.beside = folder / partial_name(identity)
        self._turn: Turn | None = None

    def write(self, shards: list[Shard]) -> Records:
        """Writes files of this process; returns what the manifest shall say of them.

        Raises:
            OSError: It cannot.
        """
        for shard in shards:
            disk.write_file(self.beside / shard.file, shard.pieces)
        return {shard.file: shard.record() for shard in shards}

    def discard(self) -> None:
        """Removes what was written, as far as that can be done: the disk may be full of it."""
        with contextlib.suppress(OSError):
            if self._turn is not None and not self._turn.counts(self.folder):
                revoke(self.folder, self._turn)
            disk.remove(self.beside)

    def commit(
        self, mesh: MeshShape, types: Mapping[str, LocalType], about: Mapping[str, Any],
        files: Records, keep: int, say: Callable[[str], None], after: int | None = None,
    ) -> None:  # fmt: skip
        """Writes the manifest, gives the folder its name, removes old checkpoints.  Rank 0 only.

        Arguments are those of `save`; ``files`` is what all ranks have written.  Without ``after``
        nothing is set aside.

        Raises:
            CheckpointError: The checkpoint is not whole, or not certainly on disk.
        """
        try:
            self._check_visible(files)
            text = manifest_text(self.identity, mesh, types, about, files, time.time())
            disk.write_file(self.beside / MANIFEST, [text.encode()])
            disk.sync_folder(self.beside)
            if after is not None:
                self._turn = turn_back(self.folder, self.identity, after)
            if self._turn is not None:
                announce(self.folder, self._turn)
            self._rename()
        except OSError as failure:
            self.discard()
            raise disk.unwritable(failure, 0) from failure
        except CheckpointError:
            self.discard()
            raise
        try:
            if self._turn is not None and (line := set_aside(self.folder, self._turn)):
                say(line)
            drop_old(self.folder, keep)
        except OSError as failure:
            say(f"an old checkpoint stays: {failure.filename}: {failure.strerror}")

    def _check_visible(self, files: Records) -> None:
        for name in files:
            if not (self.beside / name).exists():
                raise CheckpointError(
                    f"rank 0 does not see {name}, which another rank has written to {self.beside}.",
                    "Keep checkpoints on a file system that all nodes share.",
                )

    def _rename(self) -> None:
        if self.target.exists():  # `find` and `clean` know what to do when killed between the two
            old = self.folder / f".{self.target.name}{REPLACED}"
            disk.rename(self.target, old)
            try:
                disk.rename(self.beside, self.target)
            except OSError:
                disk.rename(old, self.target)
                raise
            disk.sync_folder(self.folder)
            if self._turn is None or not self._turn.gives_up(old.name, self.identity.step):
                disk.remove(old)
        else:
            disk.rename(self.beside, self.target)
            disk.sync_folder(self.folder)


def drop_old(folder: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints; what looks damaged does not count.

    Raises:
        OSError: One cannot be removed.
    """
    whole = 0
    for path in find(folder) if keep else []:
        if whole >= keep:
            gone = folder / f".{path.name.lstrip('.')}{GONE}"
            disk.rename(path, gone)  # never a half-deleted folder under a good name
            disk.remove(gone)
        elif looks_whole(path):
            whole += 1


def looks_whole(path: Path) -> bool:
    """Whether the manifest is good and all files have the lengths that were written."""
    try:
        return not size_problem(read_manifest(path))
    except CheckpointError:
        return False
