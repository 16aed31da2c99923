"""Saving: every rank writes what it holds, once; one rename makes it a checkpoint.

A checkpoint is a folder ``step-00001200`` with one file of tensors per writing rank and a manifest.
It is written beside its name and renamed when all of it is on disk: a folder of that name is whole.
A block that several ranks hold is written once, by the lowest of them.

Knows variables by name and block only: no model, no data, no training loop.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshmpi.checkpoint.manifest import FORMAT, digest, find
from meshmpi.checkpoint.tensor_file import write_tensors
from meshmpi.errors import CheckpointError
from meshmpi.program import LocalType
from meshmpi.runtime.agreement import first_error, from_first, gathered
from meshmpi.runtime.variables import VariableStore


def save(
    folder: str | os.PathLike[str], store: VariableStore, step: int, about: Mapping[str, Any],
    keep: int = 0,
) -> Path:  # fmt: skip
    """Writes a checkpoint of all variables.  Collective.

    Args:
        folder: Where checkpoints are kept, on a file system that all ranks see.
        store: ``step.variables`` of a compiled step.
        step: Training steps done; names the checkpoint.
        about: Plain values for the manifest.
        keep: Newest checkpoints to keep; 0 keeps all.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: It cannot be written; what was there before is untouched.
    """
    mesh, folder = store.mesh, Path(folder)
    target = folder / f"step-{step:08d}"
    beside = folder / f".{target.name}.partial"
    from_first(mesh, lambda: _fresh(beside))
    error, blocks = None, []
    try:
        blocks = [b for rank in store.ranks for b in _write_rank(beside, store, rank)]
    except OSError as failure:
        error = _unwritable(beside, failure)
    error = first_error(mesh, error)
    if error is not None:
        raise error
    everything = [b for part in gathered(mesh, blocks) for b in part]

    def commit() -> None:
        _check_visible(beside, everything)
        try:
            _write_manifest(beside / "manifest.json", store, step, about, everything)
            _replace(beside, target)
            _drop_old(folder, keep)
        except OSError as failure:
            raise _unwritable(beside, failure) from failure

    from_first(mesh, commit)
    return target


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {error.strerror}.",
        "Make room or choose another folder; earlier checkpoints are untouched.",
    )


def _check_visible(folder: Path, blocks: list[dict[str, Any]]) -> None:
    missing = [
        file for file in dict.fromkeys(b["file"] for b in blocks) if not (folder / file).exists()
    ]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see {missing[0]}, which another rank has written to {folder}.",
            "Keep checkpoints on a file system that all nodes share.",
        )


def _fresh(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def owns_block(t: LocalType, coordinates: Mapping[str, int]) -> bool:
    """Whether the rank at ``coordinates`` is the lowest of those that hold the same block."""
    return all(c == 0 for axis, c in coordinates.items() if axis not in t.used_axes)


def _write_rank(folder: Path, store: VariableStore, rank: int) -> list[dict[str, Any]]:
    """Writes the file of one rank, if it owns anything; returns its blocks for the manifest."""
    shape = store.mesh.shape
    coordinates = shape.coordinates(rank)
    owned = {
        name: store.blocks[name][rank]
        for name, variable in store.types.items()
        if owns_block(variable.type, coordinates) and store.blocks[name][rank].size
    }
    if not owned:
        return []
    file = f"rank-{rank:05d}.safetensors"
    checksums = write_tensors(folder / file, owned)
    return [
        {
            "name": name, "file": file, "checksums": checksums[name],
            "ranges": [list(r) for r in store.types[name].type.block(shape, coordinates)],
        }
        for name in owned
    ]  # fmt: skip


def _write_manifest(
    path: Path, store: VariableStore, step: int, about: Mapping[str, Any],
    blocks: list[dict[str, Any]],
) -> None:  # fmt: skip
    tensors: dict[str, dict[str, Any]] = {}
    for name, variable in store.types.items():
        t = variable.type
        tensors[name] = {"dims": list(t.shape.names), "shape": list(t.shape.sizes)}
        tensors[name] |= {"dtype": t.dtype, "blocks": []}
    for block in blocks:
        tensors[block["name"]]["blocks"].append({k: v for k, v in block.items() if k != "name"})
    content = {"format": FORMAT, "step": step, "about": dict(about), "tensors": tensors}
    text = json.dumps(content)
    with open(path, "w", encoding="utf-8") as file:
        # The first line vouches for the second.
        file.write(f"{digest(text)}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(beside: Path, target: Path) -> None:
    """Gives a finished folder its name; one rename decides."""
    _sync(beside)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(beside, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(beside, target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _drop_old(folder: Path, keep: int) -> None:
    for old in find(folder)[keep:] if keep else []:
        gone = old.with_name(f".{old.name}.old")
        os.rename(old, gone)  # never a half-deleted folder under a good name
        shutil.rmtree(gone, ignore_errors=True)
