"""Verifies, compares, converts and exports checkpoints outside of training.

Works in one process without MPI, with one tensor in memory at a time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshmpi.checkpoint.folder import MANIFEST, durable_folder, find
from meshmpi.checkpoint.manifest import Manifest, manifest_text, size_problem
from meshmpi.checkpoint.pieces import Ranges
from meshmpi.checkpoint.saving import owns_block
from meshmpi.checkpoint.shard import FORMAT_NAMES, Identity, Shard, make_shard
from meshmpi.checkpoint.tensor_header import make_header
from meshmpi.compiler.lowering.placement import Placement
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import CheckpointError
from meshmpi.files import disk
from meshmpi.graph import Graph
from meshmpi.graph.ops.sources import get_variable
from meshmpi.ir.program import LocalType
from meshmpi.runtime.arrays import numpy_dtype


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints of a run or of a folder of checkpoints, newest first; or the one given."""
    if (path / MANIFEST).exists():
        return [path]
    found = find(path / "checkpoints") or find(path)
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {path}.",
            "Give the folder of a run, as runs/quickstart, or one of its checkpoints.",
        )
    return found


def problems(manifest: Manifest) -> Iterator[str]:
    """Reads every byte; yields what is wrong, naming file, tensor and bytes."""
    for file in manifest.files:
        try:
            with manifest.open(file) as shard:
                for name in shard.tensors:
                    try:
                        shard.verify(name)
                    except CheckpointError as error:
                        yield error.problem
        except CheckpointError as error:
            yield error.problem
    for name, t in manifest.tensors.items():
        try:
            for _ in manifest.pieces(name, tuple((0, n) for n in t["shape"])):
                pass
        except CheckpointError as error:
            yield error.problem


def read_part(manifest: Manifest, name: str, wanted: Ranges) -> np.ndarray:
    """A part of a tensor, verified."""
    if problem := size_problem(manifest):  # before memory is asked for
        raise CheckpointError(f"{manifest.folder} is damaged: {problem}.", "Take an older one.")
    dtype = manifest.tensors[name]["dtype"]
    out = np.empty([b - a for a, b in wanted], numpy_dtype(dtype))
    for file, piece in manifest.pieces(name, wanted):
        with manifest.open(file) as shard:
            out[piece.target] = shard.read(name, piece.sizes, dtype, piece.source)
    return out


def read_whole(manifest: Manifest, name: str) -> np.ndarray:
    """A whole tensor, verified."""
    return read_part(manifest, name, tuple((0, n) for n in manifest.tensors[name]["shape"]))


# ---- compare ---------------------------------------------------------------------------------


class Difference(NamedTuple):
    """How a tensor differs between two checkpoints."""

    name: str  # of the tensor
    what: str  # what differs besides values, or empty
    different: int = 0  # elements whose bits differ
    elements: int = 0  # of the tensor
    largest: float = 0.0  # largest absolute difference; NaN where one side is NaN and the other is not


def differences(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Tensors that are not bit-equal in both."""
    for name in [*a.tensors, *(n for n in b.tensors if n not in a.tensors)]:
        if name not in b.tensors or name not in a.tensors:
            yield Difference(name, f"only in {(b if name in b.tensors else a).folder}")
            continue
        ta, tb = a.tensors[name], b.tensors[name]
        keys = ("dims", "shape", "dtype")
        if any(ta[k] != tb[k] for k in keys):
            here, there = (f"{t['dtype']} {m.type(name).shape}" for m, t in ((a, ta), (b, tb)))
            yield Difference(name, f"{here} and {there}")
            continue
        x, y = read_whole(a, name), read_whole(b, name)
        bits = f"u{x.itemsize}"
        different = int(np.count_nonzero(x.reshape(-1).view(bits) != y.reshape(-1).view(bits)))
        if different:
            with np.errstate(invalid="ignore"):  # NaN, and inf - inf
                p, q = (np.atleast_1d(v).astype(np.float64) for v in (x, y))
                gap = np.abs(p - q)
            gap[(p == q) | (np.isnan(p) & np.isnan(q))] = 0
            yield Difference(name, "", different, x.size, float(gap.max()))


# ---- write -----------------------------------------------------------------------------------


def convert(manifest: Manifest, folder: Path, mesh: MeshShape, layout: Layout, storage: Layout) -> Path:
    """Writes a checkpoint again, split otherwise; returns the folder of the new checkpoint."""
    old = {n: manifest.type(n) for n in manifest.tensors}
    with Graph() as graph:
        for name, t in old.items():
            get_variable(name, t.shape, t.dtype, trainable=False)
    placement = Placement(graph, mesh, layout, storage, [])
    types = {n: replace(t, splits=placement.stored(graph.variables[n])) for n, t in old.items()}
    identity = Identity(secrets.token_hex(8), manifest.step)
    place = durable_folder(folder, identity)
    if place.path.exists():
        raise CheckpointError(f"{place.path} is there already.", "Choose another folder.")
    about = manifest.about | {"converted_from": str(manifest.folder), "converted_at": time.time()}
    with disk.errors_of(0):
        disk.make_folder(folder)
        with place:
            files = {}
            for rank in range(mesh.size):
                for shard in _shards(manifest, types, mesh, rank, identity):
                    place.write(shard.file, shard.pieces)
                    files[shard.file] = shard.record()
            text = manifest_text(identity, mesh, types, about, files, time.time())
            place.write(MANIFEST, [text.encode()])
    return place.path


def _shards(
    manifest: Manifest, types: Mapping[str, LocalType], mesh: MeshShape, rank: int, identity: Identity
) -> list[Shard]:
    """The file of a rank, unless it owns nothing."""
    coordinates, blocks = mesh.coordinates(rank), {}
    for name, t in types.items():
        wanted = t.block(mesh, coordinates)
        if owns_block(t, coordinates) and all(a < b for a, b in wanted):
            blocks[name] = read_part(manifest, name, wanted)
    return [make_shard(identity, rank, blocks)] if blocks else []


def export(manifest: Manifest, path: Path, only: Sequence[str], without: Sequence[str]) -> int:
    """Writes whole tensors under their names into one plain safetensors file; returns how many."""
    names = [n for n in manifest.tensors if (not only or _matches(n, only)) and not _matches(n, without)]
    if not names:
        raise CheckpointError(
            f"no tensor of {manifest.folder} is left by these patterns.",
            f"Its names are {', '.join(list(manifest.tensors)[:5])} ...",
        )
    kinds = {n: (FORMAT_NAMES[manifest.tensors[n]["dtype"]], manifest.tensors[n]["shape"]) for n in names}
    header, order = make_header(kinds)
    with disk.errors_of(0):
        disk.make_folder(path.parent)
        disk.replace_file(path, _bytes(header, manifest, list(order)))
    return len(names)


def _bytes(header: bytes, manifest: Manifest, names: Sequence[str]) -> Iterator[object]:
    yield header
    for name in names:
        yield np.ascontiguousarray(read_whole(manifest, name)).reshape(-1).view(np.uint8).data


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)
