"""Variables to save in trials: every data type, uneven blocks, ranks that hold nothing."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from meshmpi.dims import Layout, MeshShape, Shape
from meshmpi.ir.program import LocalType, VariableType
from meshmpi.kernels import numpy_dtype
from meshmpi.runtime.arrays import block_of
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.runtime.variables import VariableStore

TENSORS: dict[str, tuple[list[tuple[str, int]], str]] = {
    "embedding": ([("vocab", 37), ("model", 12)], "float32"),
    "layers/0/in": ([("model", 12), ("hidden", 7)], "float32"),
    "layers/0/out": ([("hidden", 7), ("model", 12)], "bfloat16"),
    "layers/0/heads": ([("heads", 3), ("model", 12), ("key", 5)], "float64"),
    "layers/0/scale": ([("model", 12)], "float32"),
    "frozen": ([("vocab", 37)], "int64"),
    "mask": ([("heads", 3), ("vocab", 37)], "bool"),
    "steps": ([], "int32"),
}
"""Name -> dims, data type."""
WIDE = {"wide": ([("wide", 700), ("model", 999)], "float32")}
"""A tensor of several pieces under a hash each."""


class Placed(NamedTuple):
    """A mesh and how variables are kept on it."""

    mesh: str
    layout: str = ""
    storage: str = ""


LAYOUTS = (
    Placed("all:1"),
    Placed("all:2", "vocab:all"),
    Placed("all:5", "model:all"),
    Placed("all:8", "hidden:all"),
    Placed("all:4", "heads:all"),
    Placed("rows:2;cols:2", "vocab:rows;model:cols"),
    Placed("rows:2;cols:3", "hidden:cols;model:rows"),
    Placed("rows:3;cols:2", "heads:rows;key:cols"),
    Placed("rows:2;cols:3", "model:rows+cols"),
    Placed("rows:3;cols:2", "hidden:cols", "model:rows"),
    Placed("rows:2;cols:2", "", "vocab:rows;model:cols"),
    Placed("rows:2;cols:2;deep:2", "vocab:rows+deep;hidden:cols", "key:deep;model:rows"),
    Placed("rows:1;cols:7", "vocab:cols;key:cols"),
    Placed("all:40", "vocab:all;hidden:all"),
)
"""Data, model, storage layouts; even and uneven; more ranks than elements."""


def values(seed: int, wide: bool = False) -> dict[str, np.ndarray]:
    """Whole arrays of any bits, but for ``frozen``, which is the same for all seeds."""
    rng, found = np.random.default_rng(seed), {}
    for name, (dims, dtype) in _tensors(wide).items():
        sizes = tuple(n for _, n in dims)
        t = numpy_dtype(dtype)
        if name == "frozen":
            found[name] = np.arange(sizes[0], dtype=t)
        elif dtype == "bool":
            found[name] = rng.integers(0, 2, sizes).astype(t)
        else:
            count = int(np.prod(sizes, dtype=np.int64)) * t.itemsize
            found[name] = rng.integers(0, 256, count, np.uint8).view(t).reshape(sizes)
    return found


def _tensors(wide: bool) -> dict[str, tuple[list[tuple[str, int]], str]]:
    return TENSORS | WIDE if wide else TENSORS


def store(
    placed: Placed,
    given: dict[str, np.ndarray] | None = None,
    wide: bool = False,
    mesh=None,
    tensors: dict[str, tuple[list[tuple[str, int]], str]] | None = None,
) -> VariableStore:
    """Variables on a mesh, simulated unless one is given.

    Args:
        placed: The layout.
        given: Name -> whole array; default: zeros.
        wide: Whether the tensor of several pieces is among them.
        mesh: A mesh of that shape.
        tensors: Name -> dims, data type, in the place of those of all trials.
    """
    mesh = SimulatedMesh(placed.mesh) if mesh is None else mesh
    ranks = list(range(mesh.size)) if mesh.simulated else [mesh.rank]
    made = VariableStore(mesh, ranks)
    layout, storage = Layout(placed.layout), Layout(placed.storage)
    for name, (dims, dtype) in (tensors or _tensors(wide)).items():
        used: list[str] = []
        splits = []
        for dim, _ in dims:
            axes = storage.axes(dim) or layout.axes(dim)
            splits.append(() if set(axes) & set(used) else axes)
            used += splits[-1]
        value = np.zeros([n for _, n in dims], numpy_dtype(dtype))
        t = LocalType(Shape(dims), dtype, tuple(splits))
        made.add(VariableType(name, t, value if given is None else given[name]), 0)
    return made


def equal(found: VariableStore, expected: dict[str, np.ndarray]) -> bool:
    """Whether every block has the very bits that it should."""
    shape: MeshShape = found.mesh.shape
    for name, blocks in found.blocks.items():
        for rank, block in blocks.items():
            want = block_of(expected[name], found.types[name].type, shape, shape.coordinates(rank))
            if block.tobytes() != want.tobytes():
                return False
    return True


def fingerprint(made: VariableStore) -> str:
    """A digest of all bits of all blocks."""
    digest = hashlib.blake2b()
    for name in made.types:
        for block in made.blocks[name].values():
            digest.update(block.tobytes())
    return digest.hexdigest()
