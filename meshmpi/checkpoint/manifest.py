"""What a checkpoint says of itself.

The manifest names every file with the hash of its header, in which the hashes of all blocks are;
it says how tensors are split, so that its length grows with tensors and files, not with blocks.
Knows no arrays and no stores but their types: what is read here is small.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.checkpoint.folder import MANIFEST, NAME
from meshmpi.checkpoint.shard import Identity, file_name
from meshmpi.dims import MeshShape, Shape, block_range
from meshmpi.errors import CheckpointError
from meshmpi.program import LocalType
from meshmpi.runtime.variables import VariableStore

FORMAT = 2
"""Raised when the meaning of a manifest changes."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        folder: Where it is.
        step: Training steps done.
        about: What the writer told: settings, layout, data and so on.
        tensors: Name -> ``dims``, ``shape`` (global), ``dtype``, ``split`` (axes of each dim).
        identity: The number of this checkpoint and its step, which its files name too.
        mesh: Of the ranks that wrote it.
        files: Name -> ``bytes`` and ``header``, the hash of its header.
        time: When it was written, seconds since 1970.
    """

    folder: Path
    step: int
    about: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    identity: Identity
    mesh: MeshShape
    files: dict[str, dict[str, Any]]
    time: float

    @property
    def data_bytes(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(f["bytes"] for f in self.files.values())

    def type(self, name: str) -> LocalType:
        """How a tensor is split over the mesh that wrote it."""
        t = self.tensors[name]
        shape = Shape(list(zip(t["dims"], t["shape"], strict=True)))
        return LocalType(shape, t["dtype"], tuple(tuple(axes) for axes in t["split"]))

    def split(self) -> str:
        """How its files split tensors: a layout; ``|`` where tensors differ, ``-`` is whole."""
        found: dict[str, dict[str, None]] = {}
        for t in self.tensors.values():
            for dim, axes in zip(t["dims"], t["split"], strict=True):
                found.setdefault(dim, {})["+".join(axes) or "-"] = None
        return ";".join(f"{d}:{'|'.join(a)}" for d, a in found.items() if list(a) != ["-"])

    def what(self, file: str) -> str:
        """How messages call a file."""
        return f"shard {file.removesuffix('.safetensors')} of step {self.step}"

    def blocks(self, name: str, wanted: Ranges) -> Iterator[Block]:
        """The stored blocks of a tensor that have a part of ``wanted`` (global ranges)."""
        t = self.type(name)
        along = [
            list(_overlapping(self.mesh, d.size, axes, w))
            for d, axes, w in zip(t.shape, t.splits, wanted, strict=True)
        ]
        for parts in itertools.product(*along):
            coordinates = dict.fromkeys(self.mesh.names, 0)
            for _, where in parts:
                coordinates |= where
            ranges = tuple(r for r, _ in parts)
            yield Block(file_name(self.mesh.rank(coordinates)), ranges)


class Block(NamedTuple):
    """A stored block: its file, and its global ranges."""

    file: str
    ranges: Ranges


def _overlapping(
    mesh: MeshShape, size: int, axes: tuple[str, ...], wanted: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], dict[str, int]]]:
    """Blocks of one dim that overlap a range, and the coordinates of those who hold them."""
    count = mesh.count(axes) if axes else 1
    for k in range(count):
        start, stop = block_range(size, count, k)
        if max(start, wanted[0]) < min(stop, wanted[1]):
            where, rest = {}, k
            for axis in reversed(axes):  # the first axis is the major one
                rest, where[axis] = divmod(rest, mesh.axis_size(axis))
            yield (start, stop), where


def digest(text: str) -> str:
    """Vouches for the text of a manifest."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_plain(about: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless all values can be written into a manifest."""
    for key, value in about.items():
        if problem := _not_plain(value, f"about[{key!r}]"):
            raise CheckpointError(
                f"what a checkpoint says of itself must be plain values: {problem}.",
                "Give numbers of Python, texts, lists and dicts, as float(x) or x.tolist().",
            )


def _not_plain(value: Any, where: str) -> str:
    """The first part of a value that JSON does not have, or empty."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | None):
                return f"{where} has the key {key!r}, a {type(key).__name__}"
        inner = [(v, f"{where}[{k!r}]") for k, v in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(v, f"{where}[{k}]") for k, v in enumerate(value)]
    else:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return f"{where} is {value!r}, a {type(value).__name__}"
        return ""
    return next(filter(None, (_not_plain(v, name) for v, name in inner)), "")


def manifest_text(
    identity: Identity, mesh: MeshShape, types: Mapping[str, LocalType], about: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]], time: float,
) -> str:  # fmt: skip
    """The text of a manifest; its first line vouches for the second.

    Args:
        identity: Of the checkpoint.
        mesh: Of the ranks that write it.
        types: Name -> how the tensor is split.
        about: Plain values.
        files: Name -> what `Shard.record` says.
        time: Now, seconds since 1970.
    """
    tensors = {
        name: {
            "dims": list(t.shape.names), "shape": list(t.shape.sizes), "dtype": t.dtype,
            "split": [list(axes) for axes in t.splits],
        }
        for name, t in types.items()
    }  # fmt: skip
    text = json.dumps(
        {
            "format": FORMAT, "checkpoint": identity.checkpoint, "step": identity.step,
            "time": time, "mesh": [[a, mesh.axis_size(a)] for a in mesh.names],
            "about": dict(about), "tensors": tensors, "files": dict(files),
        }
    )  # fmt: skip
    return f"{digest(text)}\n{text}\n"


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Reads and verifies the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, of another step, or of another version.
    """
    folder = Path(checkpoint)
    path = folder / MANIFEST
    try:
        expected, text, rest = path.read_bytes().decode("utf-8").split("\n")
        if (found := digest(text)) != expected or rest:
            raise ValueError(f"checksum {found[:8]}.. expected {expected[:8]}..")
        content = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: {MANIFEST} is missing.",
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
    named = NAME.match(folder.name)
    if named and int(named[1]) != content["step"]:
        raise CheckpointError(
            f"the manifest of {folder} is of step {content['step']}: files of two checkpoints were"
            " mixed.", f"Remove {folder}.",
        )  # fmt: skip
    return Manifest(
        folder, content["step"], content["about"], content["tensors"],
        Identity(content["checkpoint"], content["step"]),
        MeshShape([(a, n) for a, n in content["mesh"]]), content["files"], content["time"],
    )  # fmt: skip


def size_problem(manifest: Manifest) -> str:
    """The first file that is missing or has another length than was written, or empty."""
    for name, record in manifest.files.items():
        try:
            size = (manifest.folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != record["bytes"]:
            return f"{name} has {size} bytes, {record['bytes']} were written"
    return ""


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
        elif there["dims"] != list(t.shape.names):
            differences.append(f"'{name}' is {manifest.type(name).shape} there and {t.shape} here")
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
