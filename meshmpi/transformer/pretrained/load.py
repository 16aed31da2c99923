"""Filling variables from a checkpoint: every rank reads the bytes of its own blocks.

Knows variables, the entries of an architecture and files; no model, no layout of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmpi.errors import CheckpointError, MeshmpiError
from meshmpi.runtime.agreement import first_error
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.pretrained.architectures import Architecture, Entry
from meshmpi.transformer.pretrained.blocks import part_of
from meshmpi.transformer.pretrained.files import Checkpoint

WRAPPERS = ("module.",)
"""Prefixes that wrappers add to every key; ``module.`` is added by PyTorch's data parallelism."""
_SHOWN = 4


@dataclass(frozen=True)
class Loaded:
    """What was read.

    Attributes:
        path: The file or index.
        variables: Names of the variables that were filled.
        bytes_read: Bytes of tensors that this process read.
    """

    path: str
    variables: tuple[str, ...]
    bytes_read: int


def load(target: Any, architecture: Architecture, checkpoint: str | os.PathLike[str] | Checkpoint) -> Loaded:
    """Fills the variables of a model from a checkpoint, in any layout and storage.  Collective.

    Everything is checked before the first variable changes.

    Args:
        target: A compiled step, or ``step.variables``.  It may lack variables of the architecture
            (an encoder without its head); slots of optimizers and caches stay as they are.
        architecture: What the checkpoint's config.json describes.
        checkpoint: Path of a file, an index or a folder; or an open one.

    Raises:
        CheckpointError: The checkpoint is damaged, lacks a tensor, has one that the architecture
            does not know, or one of another shape; the same on all ranks.
    """
    store: VariableStore = getattr(target, "variables", target)
    error: MeshmpiError | None = None
    result: Loaded | None = None
    opened: Checkpoint | None = None
    try:
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        entries = wanted(architecture, store)
        found = matched(architecture, opened, entries)
        for entry in entries:
            _check_ties(store, entry, opened, found[entry])
    except MeshmpiError as failure:
        error = failure
    error = first_error(store.mesh, error)
    try:
        if error is None:
            assert opened is not None
            before = opened.bytes_read
            try:
                for entry in entries:
                    _fill(store, entry, opened, found[entry][0])
            except MeshmpiError as failure:
                error = failure
            names = tuple(dict.fromkeys(e.variable for e in entries))
            result = Loaded(str(opened.path), names, opened.bytes_read - before)
            error = first_error(store.mesh, error)
    finally:
        if opened is not None and opened is not checkpoint:
            opened.close()
    if error is not None:
        raise error
    assert result is not None
    return result


def wanted(architecture: Architecture, store: VariableStore) -> list[Entry]:
    """The entries whose variables the step has, each with the right dims."""
    known = dict.fromkeys(e.variable for e in architecture.entries)
    strangers = [n for n, v in store.types.items() if v.trainable and n not in known]
    if strangers:
        raise CheckpointError(
            f"the model has {_listed(strangers)}, which a {architecture.name} checkpoint does not hold.",
            "Build the model from the architecture's own config.",
        )
    entries = [e for e in architecture.entries if e.variable in store.types]
    if not entries:
        raise CheckpointError(
            f"the step has no variable of a {architecture.name} model ({_listed(list(known))}).",
            "Build the model from the architecture's config.",
        )
    for entry in entries:
        shape = store.types[entry.variable].type.shape
        dims = sorted([*entry.dims, *(d for d, _ in entry.at)])
        if dims != sorted(shape):
            raise CheckpointError(
                f"variable '{entry.variable}' is {shape}, but '{entry.keys[0]}' of a"
                f" {architecture.name} checkpoint fills {list(map(str, dims))}.",
                "Build the model from the architecture's own config.",
            )
    return entries


def _fill(store: VariableStore, entry: Entry, checkpoint: Checkpoint, key: str) -> None:
    """Reads one entry's part of each block of its variable that is held here."""
    t, shape = store.types[entry.variable].type, store.mesh.shape
    for rank, block in store.blocks[entry.variable].items():
        part = part_of(entry, t.shape, t.block(shape, shape.coordinates(rank)))
        if part is None:
            continue
        array = checkpoint.read_pieces(key, part.pieces, t.dtype)
        block[part.place] = part.to_block(array)


def _check_ties(store: VariableStore, entry: Entry, checkpoint: Checkpoint, keys: Sequence[str]) -> None:
    """Raises CheckpointError where several keys of one array hold different numbers."""
    t, shape = store.types[entry.variable].type, store.mesh.shape
    for rank in store.ranks if len(keys) > 1 else ():
        part = part_of(entry, t.shape, t.block(shape, shape.coordinates(rank)))
        if part is None:
            continue
        first, *others = (checkpoint.read_pieces(k, part.pieces, "float64") for k in keys)
        for key, other in zip(keys[1:], others, strict=True):
            if not np.array_equal(first, other, equal_nan=True):
                raise CheckpointError(
                    f"'{keys[0]}' and '{key}' of {checkpoint.path} differ, but the config says"
                    " that they are one (tie_word_embeddings).",
                    "Set tie_word_embeddings to false in config.json.",
                )


# ---- keys ------------------------------------------------------------------------------------


def matched(architecture: Architecture, checkpoint: Checkpoint, needed: Sequence[Entry]) -> dict[Entry, list[str]]:
    """The key of each entry in a file, and those of its ties that the file has too.

    Args:
        architecture: Architecture of the checkpoint.
        checkpoint: The files.
        needed: Entries that must be there.

    Raises:
        CheckpointError: A key is missing, unknown or of another shape.
    """
    known: dict[str, str] = {}
    for key in checkpoint.keys():  # noqa: SIM118 - a method of ours
        known.setdefault(_bare(architecture, key), key)
    found: dict[Entry, list[str]] = {}
    used: dict[str, None] = {}
    missing: list[str] = []
    required = dict.fromkeys(needed)
    for entry in architecture.entries:
        names = [_bare(architecture, k) for k in (*entry.keys, *entry.ties)]
        here = [known[n] for n in dict.fromkeys(names) if n in known]
        if not here:
            missing += [entry.keys[0]] if entry in required else []
            continue
        _check_shape(entry, checkpoint, here)
        found[entry] = here
        used.update(dict.fromkeys(here))
    _complain(architecture, checkpoint, missing, [k for k in checkpoint.places if k not in used])
    return found


def _bare(architecture: Architecture, key: str) -> str:
    """A key without wrappers and without the prefix of the inner model."""
    for wrapper in WRAPPERS:
        key = key.removeprefix(wrapper)
    return key.removeprefix(architecture.prefix)


def _check_shape(entry: Entry, checkpoint: Checkpoint, keys: Iterable[str]) -> None:
    for key in keys:
        checkpoint.dtype(key)
        if checkpoint.shape(key) != entry.file_shape:
            raise CheckpointError(
                f"tensor '{key}' of {checkpoint.path} is {list(checkpoint.shape(key))}, but"
                f" variable '{entry.variable}' needs {list(entry.file_shape)}.",
                "Give the config.json that belongs to this checkpoint.",
            )


def _complain(architecture: Architecture, checkpoint: Checkpoint, missing: list[str], left: list[str]) -> None:
    """Raises CheckpointError for tensors that are missing or that the model does not know."""
    if missing:
        lacks = _listed(list(dict.fromkeys(missing)))
        raise CheckpointError(
            f"{checkpoint.path} lacks {lacks} of a {architecture.name} model; it has"
            f" {_listed(list(checkpoint.places))}.",
            "Give a checkpoint saved with its head, and the config.json that belongs to it.",
        )
    unknown = [key for key in left if ignored_name(architecture, key) is None]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} has {_listed(unknown)}, which a {architecture.name} model with this"
            " config does not have.",
            "Give the config.json that belongs to this checkpoint.",
        )


def ignored_name(architecture: Architecture, key: str) -> str | None:
    """The full name of a tensor that the model does not need; None for every other tensor."""
    bare = _bare(architecture, key)
    unwrapped = key
    for wrapper in WRAPPERS:
        unwrapped = unwrapped.removeprefix(wrapper)
    names = dict.fromkeys((unwrapped, architecture.prefix + bare, bare))
    patterns = [re.compile(p) for p in architecture.ignored]
    return next((n for n in names if any(p.fullmatch(n) for p in patterns)), None)


def left_over(architecture: Architecture, checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors of a file that no variable is filled from: full name -> key in the file."""
    used = [k for keys in matched(architecture, checkpoint, ()).values() for k in keys]
    names = {ignored_name(architecture, k): k for k in checkpoint.places if k not in used}
    return {name: key for name, key in names.items() if name is not None}


def _listed(names: Sequence[str]) -> str:
    """Some names: "'a', 'b' and 7 more"."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{n}'" for n in names[:_SHOWN]) + more
