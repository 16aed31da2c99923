"""Loads a checkpoint of any mesh, layout and storage into any other; each rank reads its own part.

Everything is read into separate memory and verified; variables are overwritten only when all ranks have all of their
data. If memory is short, the data are read twice instead.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshmpi.checkpoint.buddies import Buddies
from meshmpi.checkpoint.folder import clean, find
from meshmpi.checkpoint.manifest import ForeignCheckpointError, Manifest, check_same_model, read_manifest
from meshmpi.checkpoint.pieces import Piece
from meshmpi.checkpoint.shard import DamagedShardError
from meshmpi.errors import CheckpointError, MeshmpiError
from meshmpi.runtime.agreement import from_first, gathered
from meshmpi.runtime.cores import free_memory
from meshmpi.runtime.variables import VariableStore

MEMORY_SHARE = 0.5
"""Maximum share of the free memory that is used to read everything before it is copied.  Assumption."""


class Loaded(NamedTuple):
    """What `load_newest` has loaded; ``manifest, notes = loaded`` as well."""

    manifest: Manifest  # what the checkpoint says of itself
    notes: list[str]  # what was wrong with newer ones or was left by killed saves

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.manifest.folder

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.manifest.step

    @property
    def about(self) -> dict[str, Any]:
        """What the writer passed as ``about``."""
        return self.manifest.about

    def __repr__(self) -> str:
        notes = "".join(f"; note: {note}" for note in self.notes)
        return f"<Loaded {self.path}, step {self.step}{notes}>"


def load(
    checkpoint: str | os.PathLike[str] | Manifest,
    store: VariableStore,
    *,
    extra: bool = False,
    buddies: Buddies | None = None,
    say: Callable[[str], None] = warnings.warn,
) -> Manifest:
    """Reads all variables of ``store`` from a checkpoint of any mesh, layout and storage.

    The steps compiled for the store go on with the step numbers that they had when it was saved, so
    that dropout goes on with the same random numbers.

    Each rank reads the rows that it needs and verifies them before anything is overwritten.
    Collective: an error on one rank is raised on all.

    Args:
        checkpoint: Its folder or manifest.
        store: ``step.variables`` of a compiled step.
        extra: Whether the checkpoint may hold more than the store (sampling needs no optimizer).
        buddies: Who may have copies of damaged files.
        say: Takes what was restored, on rank 0.

    Returns:
        What the checkpoint says of itself: ``path``, ``step``, ``about`` ...

    Raises:
        CheckpointError: It is missing, damaged, or of another model.
    """
    if isinstance(checkpoint, Manifest):
        manifest = checkpoint
    else:
        manifest = from_first(store.mesh, lambda: read_manifest(checkpoint))
    check_same_model(manifest, store, extra)
    tried: set[str] = set()
    while True:
        staged, error = _staged(manifest, store)
        errors = [e for e in gathered(store.mesh, error) if e is not None]
        if not errors:
            break
        damaged = sorted({e.file for e in errors if isinstance(e, DamagedShardError)} - tried)
        tried.update(damaged)
        notes = buddies.restore(manifest, damaged) if buddies is not None and damaged else []
        if not notes:
            raise errors[0]
        problems = {getattr(e, "file", e.problem): e.problem for e in reversed(errors)}
        for line in [*problems.values(), *notes] if store.mesh.rank == 0 else []:
            say(line)  # what is wrong with a file once, not by every rank that reads it
    for place, array in staged if staged is not None else _arrays(manifest, store):
        place[...] = array
    store.step_numbers = manifest.step_numbers
    return manifest


def _staged(
    manifest: Manifest, store: VariableStore
) -> tuple[list[tuple[np.ndarray, np.ndarray]] | None, MeshmpiError | None]:
    """All parts, verified; None where memory is short.  Or what is wrong with them."""
    try:
        if fits_twice(store):
            return list(_arrays(manifest, store)), None
        for _ in _arrays(manifest, store):  # verifies
            pass
    except MeshmpiError as error:
        return None, error
    return None, None


def fits_twice(store: VariableStore) -> bool:
    """Whether second copies of the blocks fit into memory, if as many processes as there are cores do the same here."""
    needed = sum(x.nbytes for blocks in store.blocks.values() for x in blocks.values())
    free = free_memory()
    processes = 1 if store.mesh.comm is None else min(store.mesh.size, os.cpu_count() or 1)
    return math.isfinite(free) and needed * processes <= MEMORY_SHARE * free


def load_newest(
    folder: str | os.PathLike[str],
    store: VariableStore,
    *,
    buddies: Buddies | None = None,
    say: Callable[[str], None] = warnings.warn,
) -> Loaded:
    """Loads the newest whole checkpoint of a folder and removes what killed saves have left there.

    Collective; ``store``, ``buddies`` and ``say`` are as in `load`.

    Returns:
        What was loaded; ``.path``, ``.step``, ``.about``.

    Raises:
        CheckpointError: There is none, all are damaged, or the newest whole one is foreign.
    """
    folder, notes = Path(folder), list[str]()

    def look() -> tuple[list[Path], list[str]]:
        try:
            lines = clean(folder)
        except OSError as error:  # a folder that cannot be written can still be read
            lines = [f"leftovers stay: {error.filename}: {error.strerror}."]
        return find(folder), lines

    found, notes = from_first(store.mesh, look)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}.", "Start without resuming, or name another run.")
    damaged: list[str] = []
    for checkpoint in found:
        try:
            return Loaded(load(checkpoint, store, buddies=buddies, say=say), notes)
        except ForeignCheckpointError:
            raise
        except CheckpointError as error:
            damaged.append(error.problem)
            notes.append(
                f"{error.problem} Resuming from the newest undamaged checkpoint; remove {checkpoint} to silence this."
            )
    raise CheckpointError(
        f"all checkpoints in {folder} are damaged: {' '.join(damaged)}",
        "Put good copies of these files in their places, or start again in another folder.",
    )


def _arrays(manifest: Manifest, store: VariableStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For every part that this process needs its place in the store, and what was read and verified, file by file."""
    shape = store.mesh.shape
    by_file: dict[str, list[tuple[str, int, Piece]]] = {}
    for name, variable in store.types.items():
        for rank in store.ranks:
            for file, piece in manifest.pieces(name, variable.type.block(shape, shape.coordinates(rank))):
                by_file.setdefault(file, []).append((name, rank, piece))
    for file, parts in by_file.items():
        with manifest.open(file) as shard:
            for name, rank, piece in parts:
                place = store.blocks[name][rank][(..., *piece.target)]
                yield place, shard.read(name, piece.sizes, store.types[name].type.dtype, piece.source)
