"""Loading: any mesh, layout and storage reads what any other wrote, each rank its own part.

Knows variables by name and block only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshmpi.checkpoint.manifest import (
    ForeignCheckpointError,
    Manifest,
    check_same_model,
    find,
    read_manifest,
)
from meshmpi.checkpoint.tensor_file import TensorFile
from meshmpi.errors import CheckpointError, MeshmpiError
from meshmpi.runtime.agreement import first_error, from_first
from meshmpi.runtime.variables import VariableStore

Ranges = tuple[tuple[int, int], ...]


class _Part(NamedTuple):
    """A piece of a stored block and where it belongs."""

    name: str
    file: str
    checksums: list[int]
    stored_sizes: tuple[int, ...]
    source: Ranges
    target: tuple[slice, ...]
    rank: int


def load(
    checkpoint: str | os.PathLike[str] | Manifest, store: VariableStore, *, extra: bool = False
) -> Manifest:
    """Reads all variables of ``store`` from a checkpoint of any mesh, layout and storage.

    Each rank reads the rows that it needs and verifies them before anything is overwritten.
    Collective: an error on one rank is raised on all.

    Args:
        checkpoint: Its folder or manifest.
        store: ``step.variables`` of a compiled step.
        extra: Whether the checkpoint may hold more than the store (sampling needs no optimizer).

    Raises:
        CheckpointError: It is missing, damaged, or of another model.
    """
    manifest: Manifest | None = None
    error: MeshmpiError | None = None
    try:
        manifest = checkpoint if isinstance(checkpoint, Manifest) else read_manifest(checkpoint)
        check_same_model(manifest, store, extra)
        for _ in _arrays(manifest, store):  # verifies
            pass
    except MeshmpiError as failure:
        error = failure
    error = first_error(store.mesh, error)
    if error is not None:
        raise error
    assert manifest is not None
    for part, array in _arrays(manifest, store):
        store.blocks[part.name][part.rank][part.target] = array
    return manifest


def load_newest(folder: str | os.PathLike[str], store: VariableStore) -> tuple[Manifest, list[str]]:
    """Loads the newest whole checkpoint of a folder.  Collective.

    Returns:
        Its manifest, and what was wrong with newer ones.

    Raises:
        CheckpointError: There is none, all are damaged, or the newest whole one is foreign.
    """
    found = from_first(store.mesh, lambda: find(folder))
    notes: list[str] = []
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}.", "Start without --resume, or name another run."
        )
    for k, checkpoint in enumerate(found):
        try:
            return load(checkpoint, store), notes
        except ForeignCheckpointError:
            raise
        except CheckpointError as error:
            if k + 1 == len(found):
                raise
            notes.append(
                f"{error.problem} Resuming from the newest whole checkpoint; remove {checkpoint}"
                " to silence this."
            )
    raise AssertionError("the loop returns or raises")


def _arrays(manifest: Manifest, store: VariableStore) -> Iterator[tuple[_Part, np.ndarray]]:
    """Every part that this process needs, read and verified; one file is open at a time."""
    by_file: dict[str, list[_Part]] = {}
    for name in store.types:
        for rank in store.ranks:
            for part in _parts(manifest, store, name, rank):
                by_file.setdefault(part.file, []).append(part)
    for file, parts in by_file.items():
        what = f"shard {file.removesuffix('.safetensors')} of step {manifest.step}"
        with TensorFile(manifest.folder / file, what) as tensors:
            for part in parts:
                dtype = store.types[part.name].type.dtype
                yield (
                    part,
                    tensors.read(part.name, part.stored_sizes, dtype, part.source, part.checksums),
                )


def _parts(manifest: Manifest, store: VariableStore, name: str, rank: int) -> list[_Part]:
    """The pieces of stored blocks that make up one rank's block of a variable."""
    shape = store.mesh.shape
    wanted = store.types[name].type.block(shape, shape.coordinates(rank))
    here = [a for a, _ in wanted]
    parts, covered = [], 0
    for block in manifest.tensors[name]["blocks"]:
        common = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, block["ranges"], strict=True)
        ]
        if any(a >= b for a, b in common):
            continue
        stored = [c for c, _ in block["ranges"]]
        covered += math.prod(b - a for a, b in common)
        parts.append(
            _Part(
                name, block["file"], block["checksums"],
                tuple(d - c for c, d in block["ranges"]),
                tuple((a - c, b - c) for (a, b), c in zip(common, stored, strict=True)),
                tuple(slice(a - c, b - c) for (a, b), c in zip(common, here, strict=True)),
                rank,
            )
        )  # fmt: skip
    if covered != math.prod(b - a for a, b in wanted):
        raise CheckpointError(
            f"the checkpoint {manifest.folder} is damaged (it holds only part of '{name}').",
            f"Remove {manifest.folder}.",
        )
    return parts
