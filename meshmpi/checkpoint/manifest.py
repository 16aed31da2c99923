"""The manifest of a checkpoint.

It lists every file with the hash of its header, which has the hashes of all blocks. It says how tensors are split, so
its size grows with the number of tensors and files, not of blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.checkpoint.folder import MANIFEST, NAME, find
from meshmpi.checkpoint.pieces import Piece, Ranges, pieces
from meshmpi.checkpoint.shard import FORMAT_NAMES, Identity, ShardReader, file_name
from meshmpi.checkpoint.tensor_header import MOST_DIMS, MOST_SIZE
from meshmpi.dims import MeshShape, Shape
from meshmpi.errors import CheckpointError
from meshmpi.files import plain
from meshmpi.ir.program import LocalType
from meshmpi.runtime.arrays import numpy_dtype
from meshmpi.runtime.variables import VariableStore

FORMAT = 2
"""Raised when the meaning of a manifest changes."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    folder: Path  # where it is
    step: int  # training steps done
    about: dict[str, Any]  # what the writer passed as ``about``: settings, layout, data and so on
    tensors: dict[str, dict[str, Any]]  # name -> ``dims``, ``shape`` (global), ``dtype``, ``split`` (axes of each dim)
    identity: Identity  # the number of this checkpoint and its step, which its files name too
    mesh: MeshShape  # of the ranks that wrote it
    files: dict[str, dict[str, Any]]  # name -> ``bytes`` and ``header``, the hash of its header
    time: float  # when it was written, seconds since 1970
    step_numbers: tuple[int, ...] = ()  # as `VariableStore.step_numbers`; empty where an earlier version wrote it

    def __repr__(self) -> str:
        return f"<Checkpoint {self.folder}, step {self.step}: {len(self.tensors)} tensors, {self.data_bytes} bytes>"

    @property
    def path(self) -> Path:
        """Where it is: the same as ``folder``."""
        return self.folder

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

    def pieces(self, name: str, wanted: Ranges) -> Iterator[tuple[str, Piece]]:
        """The pieces of a part of a tensor (global ranges), each with the file that has it."""
        for piece in pieces(self.type(name), self.mesh, wanted):
            file = file_name(self.mesh.rank(piece.holder))
            if file not in self.files:
                raise CheckpointError(
                    f"the checkpoint {self.folder} is damaged ({file}, which has a part of"
                    f" '{name}', is not in its manifest).",
                    f"Remove {self.folder}.",
                )
            yield file, piece

    def open(self, file: str) -> ShardReader:
        """Opens one of its files."""
        return ShardReader(self.folder / file, self.files[file], self.what(file))


def digest(text: str) -> str:
    """Vouches for the text of a manifest."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_plain(about: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless all values can be written into a manifest."""
    for key, value in about.items():
        if problem := _not_plain(value, f"about[{key!r}]"):
            raise CheckpointError(
                f"a checkpoint's `about` must hold plain values:  {problem}.",
                "Give Python numbers, strings, lists and dicts, such as float(x) or x.tolist().",
            )


def _not_plain(value: Any, where: str) -> str:
    """The first part of a value that JSON does not have, or empty."""
    if isinstance(value, Mapping):
        wrong = [k for k in value if not isinstance(k, str | int | float | None)]
        if wrong:
            return f"{where} has the key {wrong[0]!r}, a {type(wrong[0]).__name__}"
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
    identity: Identity,
    mesh: MeshShape,
    types: Mapping[str, LocalType],
    about: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    time: float,
    step_numbers: Sequence[int] = (),
) -> str:
    """The text of a manifest; its first line vouches for the second."""
    tensors = {
        name: {"dims": t.shape.names, "shape": t.shape.sizes, "dtype": t.dtype, "split": t.splits}
        for name, t in types.items()
    }
    text = json.dumps(
        {
            "format": FORMAT,
            "checkpoint": identity.checkpoint,
            "step": identity.step,
            "time": time,
            "mesh": mesh.axes,
            "step_numbers": step_numbers,
            "about": dict(about),
            "tensors": tensors,
            "files": dict(files),
        }
    )
    return f"{digest(text)}\n{text}\n"


def _near(folder: Path) -> str:
    """The checkpoint that is meant where the folder of a run or of checkpoints was given, or a folder beside one."""
    places = (folder / "checkpoints", folder, folder.parent)
    found = next((newest for place in places for newest in find(place)), None)
    return f"Give {found or 'a folder such as runs/name/checkpoints/step-00001200'}."


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Reads and verifies the manifest of a checkpoint."""
    folder = Path(checkpoint)
    path = folder / MANIFEST
    try:
        data = plain.contents(path, links=False)
        lines = data.decode("utf-8").split("\n")
        if len(lines) != 3:
            raise ValueError(f"{len(lines) - 1} whole lines, expected 2")
        expected, text, rest = lines
        if (found := digest(text)) != expected or rest:
            raise ValueError(f"checksum {found[:8]}.. expected {expected[:8]}..")
        content = plain.parse_json(text)
        if not isinstance(content, dict) or content.get("format") == FORMAT:
            _check(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"there is no checkpoint in {folder}: {MANIFEST} is missing.", _near(folder)) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the manifest of {folder} is damaged ({error}).", f"Remove {folder}.") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content.get('format')}, this version of meshmpi reads {FORMAT}.",
            "Use the version that wrote it.",
        )
    named = NAME.match(folder.name)
    if named and int(named[1]) != content["step"]:
        raise CheckpointError(
            f"the manifest of {folder} is of step {content['step']}: files of two checkpoints were mixed.",
            f"Remove {folder}.",
        )
    return Manifest(
        folder,
        content["step"],
        content["about"],
        content["tensors"],
        Identity(content["checkpoint"], content["step"]),
        MeshShape([(a, n) for a, n in content["mesh"]]),
        content["files"],
        content["time"],
        tuple(content.get("step_numbers", ())),
    )


_FILE = re.compile(r"^rank-\d{5,9}\.safetensors\Z", re.ASCII)
_TABLES = ("about", "tensors", "files")


def _check(content: Any) -> None:
    """ValueError unless made as by `manifest_text`: nobody asks for memory for tensors that no file holds."""
    try:
        step, number, time = content["step"], content["checkpoint"], content["time"]
        axes = [(a, n) for a, n in content["mesh"]]
        tables = [content[name] for name in _TABLES]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it has no {error}") from None
    _need(all(isinstance(t, dict) for t in tables), f"{', '.join(_TABLES)} are not tables")
    right = type(step) is int and step >= 0 and isinstance(number, str)
    _need(right, f"it is of step {step!r}, checkpoint {number!r}")
    _need(isinstance(time, int | float), f"it was written at {time!r}")
    _, tensors, files = tables
    for name, record in files.items():
        _need(_FILE.match(name) is not None, f"{name!r} is not the name of a file of a rank")
        _need(isinstance(record, dict) and isinstance(record.get("header"), str), f"{name} has no hash")
        _check_sizes(name, [record.get("bytes")])
    numbers = content.get("step_numbers", [])
    _check_sizes("a step number", numbers if isinstance(numbers, list) else [numbers])
    _check_sizes("the mesh", [n for _, n in axes])
    _need(len(axes) <= MOST_DIMS and all(isinstance(a, str) and n for a, n in axes), f"its mesh is {axes}")
    names = [a for a, _ in axes]
    needed = sum(_checked_bytes(name, t, names) for name, t in tensors.items())
    held = sum(record["bytes"] for record in files.values())
    _need(needed <= held, f"its tensors take {needed} bytes, its files have {held}")


def _need(right: bool, problem: str) -> None:
    if not right:
        raise ValueError(problem[:200])


def _check_sizes(what: str, sizes: list[Any]) -> None:
    for n in sizes:
        _need(type(n) is int and 0 <= n < MOST_SIZE, f"{what} has the size {n!r}")


def _checked_bytes(name: str, t: Any, axes: list[str]) -> int:
    """Bytes of a tensor of a manifest; ValueError unless it is described as it should be."""
    parts = ("dims", "shape", "split")
    there = isinstance(t, dict) and all(isinstance(t.get(part), list) for part in parts)
    _need(there, f"tensor '{name}' has no {', '.join(parts)}")
    dims, shape, split = (t[part] for part in parts)
    one = len(dims) == len(shape) == len(split) <= MOST_DIMS
    dtype: Any = t.get("dtype")
    known = all(isinstance(d, str) for d in (*dims, dtype)) and dtype in FORMAT_NAMES
    _need(one and known, f"tensor '{name}' is {dtype!r}{dims}")
    _check_sizes(f"tensor '{name}'", shape)
    over = [axis for each in split for axis in (each if isinstance(each, list) else [None])]
    once = len(over) == len({*map(str, over)}) and all(axis in axes for axis in over)
    _need(once, f"tensor '{name}' is split over {split}")
    return math.prod(shape) * numpy_dtype(dtype).itemsize


def size_problem(manifest: Manifest) -> str:
    """The first file that is missing or has another length than was written, or empty."""
    for name, record in manifest.files.items():
        try:
            size = (manifest.folder / name).lstat().st_size
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
                f"'{name}' is {there['dtype']}{there['shape']} there and {t.dtype}{list(t.shape.sizes)} here"
            )
        elif there["dims"] != list(t.shape.names):
            differences.append(f"'{name}' is {manifest.type(name).shape} there and {t.shape} here")
    if not extra:
        differences += [f"it has '{name}' in addition" for name in manifest.tensors if name not in store.types]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ForeignCheckpointError(
            f"the checkpoint {manifest.folder} belongs to another model: {'; '.join(differences[:3])}{more}.",
            "Use the configuration that it was made with, or start again in another folder.",
        )
