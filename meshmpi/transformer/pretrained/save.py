"""Writes variables as a checkpoint for `transformers`: every rank writes its own blocks.

Files are made at full size with their headers; then each rank writes its pieces at their offsets.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshmpi.checkpoint import owns_block
from meshmpi.checkpoint.tensor_header import ITEM_BYTES, Stored, make_header
from meshmpi.errors import CheckpointError, MeshmpiError, suggest
from meshmpi.runtime.agreement import from_first, gathered, together
from meshmpi.runtime.arrays import numpy_dtype
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.pretrained.architectures import Architecture, Entry
from meshmpi.transformer.pretrained.files import INDEX, READ_AS, WEIGHTS, Checkpoint, contiguous_runs
from meshmpi.transformer.pretrained.load import left_over, parts_of, variables_of, wanted

KINDS = {READ_AS[k]: k for k in ("F64", "F32", "F16", "BF16")}
"""Data type -> that of the format."""
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files of a checkpoint's folder that belong to the weights and do not change with them."""


Shards = dict[str, dict[str, tuple[str, tuple[int, ...]]]]
"""Name of a file -> key -> type of the format and shape."""


class _Target(NamedTuple):
    """Where an array is written: its file and its first byte there."""

    file: Path
    place: int


def save(
    source: CompiledStep | VariableStore,
    architecture: Architecture,
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes a model's variables, config.json and index into a new folder.  Collective.

    ``transformers``' ``from_pretrained(folder)`` gives the same weights to the last bit (rounded
    once, where ``dtype`` is narrower than the variables').

    Args:
        source: A compiled step, or ``step.variables``, with all variables of the architecture.
        architecture: Says names and shapes of the arrays; its values become config.json.
        folder: Made here, on a file system that all ranks see; it appears when it is complete.
        dtype: float64, float32, float16 or bfloat16.
        max_shard_bytes: Where there is more, it is written as several files and an index; None:
            one file.
        like: The checkpoint that the variables came from: its tokenizer is copied, and so are its
            tensors that the model does not need, as heads for other tasks.

    Returns:
        The folder.

    Raises:
        CheckpointError: A variable is missing, or the folder exists or cannot be written.
    """
    store = variables_of(source)
    mesh, folder = store.mesh, Path(folder)
    draft = folder.with_name(f".{folder.name}.partial")
    _check(architecture, store, dtype)
    extras = from_first(mesh, lambda: _extras(architecture, like))
    shards = _shards(architecture, dtype, max_shard_bytes, extras)
    targets = from_first(mesh, lambda: _make_files(draft, folder, shards))

    def write() -> None:
        with _errors_of(folder):
            _write_blocks(store, architecture, targets, dtype)
            if mesh.rank == 0 and like is not None:
                _copy_extras(extras, like, targets)

    try:
        together(mesh, write)
    except MeshmpiError:
        from_first(mesh, lambda: shutil.rmtree(draft, ignore_errors=True))
        raise
    from_first(mesh, lambda: _finish(draft, folder, architecture, shards, dtype, like))
    gathered(mesh, None)  # nobody returns before the folder is there
    return folder


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error.strerror or error}.",
            "Make room or choose another folder, on a file system that all ranks see.",
        ) from error


def _check(architecture: Architecture, store: VariableStore, dtype: str) -> None:
    if dtype not in KINDS:
        raise CheckpointError(f"a checkpoint cannot be written as {dtype}.", suggest(dtype, KINDS))
    wanted(architecture, store)
    sizes: dict[str, int] = {}
    for entry in architecture.entries:
        if entry.variable not in store.types:
            raise CheckpointError(
                f"the step has no variable '{entry.variable}', so '{entry.keys[0]}' of the"
                f" {architecture.name} checkpoint would be missing.",
                "Build the whole model, with its head.",
            )
        mine = math.prod(d.extent for d in entry.file_dims)
        sizes[entry.keys[0]] = sizes.get(entry.keys[0], 0) + mine
    for entry in architecture.entries:
        if sizes[entry.keys[0]] != math.prod(entry.file_shape):
            raise CheckpointError(
                f"the entries of '{entry.keys[0]}' cover {sizes[entry.keys[0]]} of its"
                f" {math.prod(entry.file_shape)} numbers.",
                "Complete the architecture's entries.",
            )


def _extras(architecture: Architecture, like: str | os.PathLike[str] | None) -> dict[str, tuple[str, Stored]]:
    """Tensors to be copied: name -> key in ``like``, type and shape there."""
    if like is None:
        return {}
    with Checkpoint(like) as checkpoint:
        names = left_over(architecture, checkpoint)
        return {name: (key, checkpoint.places[key].stored) for name, key in names.items()}


def _shards(
    architecture: Architecture, dtype: str, most: int | None, extras: Mapping[str, tuple[str, Stored]]
) -> Shards:
    """Files and what is in them, filled in the order of the entries as ``transformers`` does."""
    arrays = {e.keys[0]: (KINDS[dtype], e.file_shape) for e in architecture.entries}
    arrays |= {name: (stored.kind, stored.shape) for name, (_, stored) in extras.items()}
    parts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    used = 0
    for key, (kind, shape) in arrays.items():
        size = math.prod(shape) * ITEM_BYTES[kind]
        if most is not None and parts[-1] and used + size > most:
            parts.append({})
            used = 0
        parts[-1][key] = (kind, shape)
        used += size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{n + 1:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts)}


def _make_files(draft: Path, folder: Path, shards: Shards) -> dict[str, _Target]:
    """Files with headers, at their full size; where each array belongs."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already.", "Give a new folder, or remove what is there.")
    targets: dict[str, _Target] = {}
    with _errors_of(folder):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, part in shards.items():
            header, places = make_header(part, {"format": "pt"})
            with open(draft / name, "wb") as file:
                file.write(header)
                file.truncate(len(header) + max((p.stop for p in places.values()), default=0))
            targets |= {key: _Target(draft / name, len(header) + place.start) for key, place in places.items()}
    return targets


def _write_blocks(store: VariableStore, architecture: Architecture, targets: dict[str, _Target], dtype: str) -> None:
    """Writes what the ranks of this process own of every array, one file open at a time."""
    by_file: dict[Path, list[Entry]] = {}
    for entry in architecture.entries:
        by_file.setdefault(targets[entry.keys[0]].file, []).append(entry)
    for path, entries in by_file.items():
        with _opened(path) as file:
            for entry in entries:
                for start, data in _runs(store, entry, dtype):
                    _write(file, targets[entry.keys[0]].place + start, data)


def _runs(store: VariableStore, entry: Entry, dtype: str) -> Iterator[tuple[int, memoryview]]:
    """(first byte in the array, bytes) of everything that is held and owned here."""
    t, item = store.types[entry.variable].type, ITEM_BYTES[KINDS[dtype]]
    for rank, part in parts_of(store, entry):
        if not owns_block(t, store.mesh.shape.coordinates(rank)):
            continue
        array = part.from_block(store.blocks[entry.variable][rank]).astype(numpy_dtype(dtype), copy=False)
        view, done = array.reshape(-1).view(np.uint8).data, 0
        for start, count in contiguous_runs(entry.file_shape, part.pieces):
            yield start * item, view[done : done + count * item]
            done += count * item


def _copy_extras(
    extras: Mapping[str, tuple[str, Stored]], like: str | os.PathLike[str], targets: Mapping[str, _Target]
) -> None:
    """Copies tensors that no variable holds, byte by byte."""
    with Checkpoint(like) as checkpoint:
        for name, (key, _) in extras.items():
            with _opened(targets[name].file) as file:
                _write(file, targets[name].place, memoryview(checkpoint.read_bytes(key)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file open for writing, on disk at the end."""
    file = os.open(path, os.O_WRONLY)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, place: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], place + done)


def _finish(
    draft: Path,
    folder: Path,
    architecture: Architecture,
    shards: Shards,
    dtype: str,
    like: str | os.PathLike[str] | None,
) -> None:
    """Writes what is not weights, and gives the folder its name."""
    with _errors_of(folder):
        if len(shards) > 1:
            _write_json(draft / INDEX, _index(shards))
        values = {k: v for k, v in architecture.values.items() if k != "torch_dtype"}
        _write_json(draft / "config.json", {**values, "dtype": dtype})
        if like is not None:
            there = Path(like) if Path(like).is_dir() else Path(like).parent
            for name in BESIDE:
                if (there / name).is_file():
                    shutil.copyfile(there / name, draft / name)
        if folder.exists():
            folder.rmdir()  # empty, as was checked
        os.rename(draft, folder)


def _index(shards: Shards) -> dict[str, object]:
    sizes = [(math.prod(shape), ITEM_BYTES[kind]) for part in shards.values() for kind, shape in part.values()]
    return {
        "metadata": {"total_parameters": sum(n for n, _ in sizes), "total_size": sum(n * item for n, item in sizes)},
        "weight_map": {key: file for file, part in shards.items() for key in part},
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")
