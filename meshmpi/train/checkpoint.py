"""Checkpoints: every rank writes what it holds; any mesh, layout or storage reads it back.

A checkpoint is a folder ``step-00001200`` with one file of tensors per writing rank and a manifest.
It is written beside its name and renamed when all of it is on disk: a folder of that name is whole.
A block that several ranks hold is written once, by the lowest of them.

Knows variables by name and block only: no model, no data, no training loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshmpi.errors import CheckpointError, MeshmpiError
from meshmpi.program import LocalType
from meshmpi.runtime.variables import VariableStore
from meshmpi.train.agreement import first_error, from_first, gathered
from meshmpi.train.tensor_file import TensorFile, write_tensors

FORMAT = 1
"""Raised when the meaning of a manifest changes."""
_NAME = re.compile(r"^step-(\d{8,})$")
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        folder: Where it is.
        step: Training steps done.
        about: What the writer told: settings, mesh, layout, data and so on.
        tensors: Name -> global shape, data type and blocks with their files and checksums.
    """

    folder: Path
    step: int
    about: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


# ---- writing ---------------------------------------------------------------------------------


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
        file.write(f"{_digest(text)}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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


# ---- finding and reading ---------------------------------------------------------------------


def find(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.match(p.name))]
    return [p for _, p in sorted(found, reverse=True)]


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Reads and verifies the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another version.
    """
    folder = Path(checkpoint)
    path = folder / "manifest.json"
    try:
        digest, text = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        if _digest(text) != digest:
            raise ValueError(f"checksum {_digest(text)[:8]}.. expected {digest[:8]}..")
        content = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: manifest.json is missing.",
            "Give a folder such as runs/name/checkpoints/step-00001200.",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the manifest of {folder} is damaged ({error}).", f"Remove {folder}."
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content.get('format')}, this version of meshmpi"
            f" reads {FORMAT}.", "Use the version that wrote it.",
        )  # fmt: skip
    return Manifest(folder, content["step"], content["about"], content["tensors"])


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


class ForeignCheckpointError(CheckpointError):
    """A checkpoint of another model: its variables differ."""


def check_same_model(manifest: Manifest, store: VariableStore, extra: bool = False) -> None:
    """Raises ForeignCheckpointError unless names, shapes and types are those of ``store``."""
    differences = []
    for name, variable in store.types.items():
        there, t = manifest.tensors.get(name), variable.type
        if there is None:
            differences.append(f"it has no '{name}'")
        elif (there["shape"], there["dtype"]) != (list(t.shape.sizes), t.dtype):
            differences.append(
                f"'{name}' is {there['dtype']}{there['shape']} there and"
                f" {t.dtype}{list(t.shape.sizes)} here"
            )
    if not extra:
        differences += [
            f"it has '{name}' in addition" for name in manifest.tensors if name not in store.types
        ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ForeignCheckpointError(
            f"the checkpoint {manifest.folder} belongs to another model:"
            f" {'; '.join(differences[:3])}{more}.",
            "Use the configuration that it was made with, or start anew in another folder.",
        )


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
