"""Loads variables from a checkpoint: every rank reads the bytes of its own blocks."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshmpi.dims import Range, Shape
from meshmpi.errors import CheckpointError
from meshmpi.runtime.agreement import together
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.pretrained.architectures import Architecture, Entry, FileDim
from meshmpi.transformer.pretrained.files import Checkpoint

WRAPPERS = ("module.",)
"""Prefixes that wrappers add to every key; ``module.`` is added by PyTorch's data parallelism."""
_SHOWN = 4


@dataclass(frozen=True)
class Loaded:
    """The result of `load`."""

    path: str  # the file or index
    variables: tuple[str, ...]  # names of the variables that were filled
    bytes_read: int  # bytes of tensors that this process read


def variables_of(holder: CompiledStep | VariableStore) -> VariableStore:
    """The variables of a compiled step, or those that are given."""
    return holder if isinstance(holder, VariableStore) else holder.variables


def load(
    target: CompiledStep | VariableStore, architecture: Architecture, checkpoint: str | os.PathLike[str] | Checkpoint
) -> Loaded:
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
    store = variables_of(target)
    with contextlib.ExitStack() as stack:

        def check() -> tuple[Checkpoint, dict[Entry, str]]:
            opened = checkpoint
            if not isinstance(opened, Checkpoint):
                opened = stack.enter_context(Checkpoint(opened))
            entries = wanted(architecture, store)
            found = matched(architecture, opened, entries)
            for entry in entries:
                _check_ties(store, entry, opened, found[entry])
            return opened, {entry: found[entry][0] for entry in entries}

        def fill() -> None:
            for entry, key in keys.items():
                for rank, part in parts_of(store, entry):
                    dtype = store.types[entry.variable].type.dtype
                    array = opened.read_pieces(key, part.pieces, dtype)
                    store.blocks[entry.variable][rank][part.place] = part.to_block(array)

        opened, keys = together(store.mesh, check)
        before = opened.bytes_read
        together(store.mesh, fill)
        names = tuple(dict.fromkeys(e.variable for e in keys))
        return Loaded(str(opened.path), names, opened.bytes_read - before)


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


def _check_ties(store: VariableStore, entry: Entry, checkpoint: Checkpoint, keys: Sequence[str]) -> None:
    """Raises CheckpointError where several keys of one array hold different numbers."""
    for _, part in parts_of(store, entry) if len(keys) > 1 else ():
        first, *others = (checkpoint.read_pieces(k, part.pieces, "float64") for k in keys)
        for key, other in zip(keys[1:], others, strict=True):
            if not np.array_equal(first, other, equal_nan=True):
                raise CheckpointError(
                    f"'{keys[0]}' and '{key}' of {checkpoint.path} differ, but the config says"
                    " that they are one (tie_word_embeddings).",
                    "Set tie_word_embeddings to false in config.json.",
                )


# ---- blocks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The part of a block that one entry fills.

    Attributes:
        pieces: Along each dim of the file's array the (start, stop) that belong to the block.
    """

    pieces: tuple[tuple[Range, ...], ...]
    place: tuple[slice | int, ...]  # index of the entry's part in the block
    sizes: tuple[int, ...]  # sizes of that part, in the order of the file's dims
    order: tuple[int, ...]  # position in ``sizes`` of each dim of the part, in the variable's order

    def to_block(self, array: np.ndarray) -> np.ndarray:
        """The pieces as the file has them, in the variable's order."""
        return array.reshape(self.sizes).transpose(self.order)

    def from_block(self, block: np.ndarray) -> np.ndarray:
        """The entry's part of a block, in the order of the file; C-contiguous."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return np.ascontiguousarray(block[self.place].transpose(back))


def part_of(entry: Entry, order: Shape, block: tuple[Range, ...]) -> Part | None:
    """The part of a block that ``entry`` fills; None if it fills nothing of it.

    ``order`` is the shape of the variable, ``block`` has (start, stop) along each of its dims.
    """
    ranges = dict(zip(order.names, block, strict=True))
    fixed = {dim.name: index for dim, index in entry.at}
    if any(not ranges[name][0] <= index < ranges[name][1] for name, index in fixed.items()):
        return None
    names = [d.name for d in entry.dims]
    if any(ranges[name][0] >= ranges[name][1] for name in names):
        return None
    place = tuple(fixed[name] - a if name in fixed else slice(None) for name, (a, _) in ranges.items())
    return Part(
        tuple(file_pieces(d, ranges) for d in entry.file_dims),
        place,
        tuple(ranges[n][1] - ranges[n][0] for n in names),
        tuple(names.index(n) for n in order.names if n not in fixed),
    )


def file_pieces(dim: FileDim, ranges: Mapping[str, Range]) -> tuple[Range, ...]:
    """The (start, stop) along a dim of a file that a block takes, those that touch joined.

    ``ranges`` has (start, stop) of the block along each of our dims that it runs over.
    """
    indices = np.zeros(1, np.int64)
    steps = [math.prod(later.size for later in dim.dims[k + 1 :]) for k in range(len(dim.dims))]
    if dim.period:
        steps[0] = dim.period
    for d, step in zip(dim.dims, steps, strict=True):
        a, b = ranges[d.name]
        indices = (indices[:, None] + step * np.arange(a, b, dtype=np.int64)).reshape(-1)
    if not indices.size:
        return ()
    cuts = np.flatnonzero(np.diff(indices) != 1)
    first, last = np.r_[0, cuts + 1], np.r_[cuts, indices.size - 1]
    return tuple(
        (int(indices[i]) + dim.start, int(indices[j]) + dim.start + 1) for i, j in zip(first, last, strict=True)
    )


def parts_of(store: VariableStore, entry: Entry) -> Iterator[tuple[int, Part]]:
    """(rank, what the entry contributes to its block) for the ranks of this process."""
    t, shape = store.types[entry.variable].type, store.mesh.shape
    for rank in store.blocks[entry.variable]:
        part = part_of(entry, t.shape, t.block(shape, shape.coordinates(rank)))
        if part is not None:
            yield rank, part


# ---- keys ------------------------------------------------------------------------------------


def matched(architecture: Architecture, checkpoint: Checkpoint, needed: Sequence[Entry]) -> dict[Entry, list[str]]:
    """The key of each entry in a file, and those of its ties that the file has too.

    Raises:
        CheckpointError: A key of the ``needed`` entries is missing; one is unknown or of another shape.
    """
    known: dict[str, str] = {}
    for key in checkpoint.places:
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
        for key in here:
            checkpoint.dtype(key)  # refuses types that are not read
            if checkpoint.shape(key) != entry.file_shape:
                raise CheckpointError(
                    f"tensor '{key}' of {checkpoint.path} is {list(checkpoint.shape(key))}, but"
                    f" variable '{entry.variable}' needs {list(entry.file_shape)}.",
                    "Give the config.json that belongs to this checkpoint.",
                )
        found[entry] = here
        used.update(dict.fromkeys(here))
    _complain(architecture, checkpoint, missing, [k for k in checkpoint.places if k not in used])
    return found


def _unwrapped(key: str) -> str:
    for wrapper in WRAPPERS:
        key = key.removeprefix(wrapper)
    return key


def _bare(architecture: Architecture, key: str) -> str:
    """A key without wrappers and without the prefix of the inner model."""
    return _unwrapped(key).removeprefix(architecture.prefix)


def _complain(architecture: Architecture, checkpoint: Checkpoint, missing: list[str], left: list[str]) -> None:
    """Raises CheckpointError for tensors that are missing or that the model does not know."""
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {_listed(list(dict.fromkeys(missing)))} of a {architecture.name} model; it has"
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
    names = (_unwrapped(key), architecture.prefix + bare, bare)
    return next((n for n in names if any(re.fullmatch(p, n) for p in architecture.ignored)), None)


def left_over(architecture: Architecture, checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors of a file that no variable is filled from: full name -> key in the file."""
    used = [k for keys in matched(architecture, checkpoint, ()).values() for k in keys]
    names = {ignored_name(architecture, k): k for k in checkpoint.places if k not in used}
    return {name: key for name, key in names.items() if name is not None}


def _listed(names: Sequence[str]) -> str:
    """Some names: "'a', 'b' and 7 more"."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{n}'" for n in names[:_SHOWN]) + more
