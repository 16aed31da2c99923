"""The variables of compiled steps: blocks that live between steps, shared between programs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from meshmpi.errors import VariableError, suggest
from meshmpi.kernels import random_block
from meshmpi.kernels.native.normal import fill_normal
from meshmpi.nn.initializers import default_initializer
from meshmpi.program import VariableType
from meshmpi.runtime.arrays import (
    LocalBlock,
    aligned_empty,
    block_of,
    gather_whole,
    numpy_dtype,
    view_of,
)  # fmt: skip


class VariableStore(Mapping[str, np.ndarray]):
    """Blocks of variables, one per rank played by this process.

    As a mapping: name -> the whole array (``store["w"]`` gathers it, collectively).

    Args:
        mesh: A Mesh or SimulatedMesh.
        ranks: The ranks played by this process.
    """

    def __init__(self, mesh: Any, ranks: list[int]):
        self.mesh, self.ranks = mesh, ranks
        self.types: MutableMapping[str, VariableType] = {}
        self.blocks: MutableMapping[str, dict[int, np.ndarray]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        self._known(name)
        return gather_whole(self.mesh, self.types[name].type, self.blocks[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __repr__(self) -> str:  # without the values: they would have to be gathered
        held = "; ".join(f"{name} {v.type}" for name, v in self.types.items())
        return f"<VariableStore on mesh {self.mesh.shape}: {held or 'empty'}>"

    def __len__(self) -> int:
        return len(self.types)

    def _known(self, name: str) -> None:
        if name not in self.types:
            raise VariableError(f"there is no variable '{name}'.", suggest(name, self.types))

    def add(self, variable: VariableType, seed: int, native: bool = False) -> None:
        """Makes the blocks of a variable and fills them by its initializer; known ones are kept.

        Args:
            variable: Of a program.
            seed: Of its first value.
            native: Whether C may draw large blocks of numbers; they are the same in any case.

        Raises:
            VariableError: It is known with another type or storage layout.
        """
        old = self.types.get(variable.name)
        if old is not None:
            if old.type != variable.type:
                raise VariableError(
                    f"variable '{variable.name}' is kept as {old.type} by one program and as"
                    f" {variable.type} by another.",
                    "Compile both with the same layout and storage rules.",
                )
            return
        self.types[variable.name] = variable
        self.blocks[variable.name] = blocks = {}
        for rank in self.ranks:
            coordinates = self.mesh.shape.coordinates(rank)
            sizes = variable.type.local_sizes(self.mesh.shape, coordinates)
            dtype = numpy_dtype(variable.type.dtype)
            buffer = aligned_empty(int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize)
            blocks[rank] = view_of(buffer, 0, sizes, variable.type.dtype)
            self._fill(blocks[rank], variable, coordinates, seed, native)

    def _fill(
        self, block: np.ndarray, variable: VariableType, coordinates: dict, seed: int, native: bool
    ) -> None:
        """First values.  No array is made that need not be: new pages cost as much as numbers."""
        t, initializer = variable.type, variable.initializer
        if initializer is None:
            initializer = default_initializer(t.shape, t.dtype)
        if not hasattr(initializer, "resolve"):
            block[...] = self._given(np.asarray(initializer), variable, coordinates)
            return
        d, ranges = initializer.resolve(t.shape), t.block(self.mesh.shape, coordinates)
        key, sizes = f"variable {variable.name}", t.shape.sizes
        if d.kind == "constant":
            block[...] = d.shift
        elif not (
            native and d.kind == "normal"
            and fill_normal(block, seed, key, sizes, ranges, d.scale, d.shift)
        ):  # fmt: skip
            # In float64, so that rounding to the stored type happens once, everywhere alike.
            z = random_block(d.kind, seed, key, 0, sizes, ranges, "float64")
            np.multiply(z, d.scale, out=z)
            block[...] = np.add(z, d.shift, out=z)

    def _given(self, array: np.ndarray, variable: VariableType, coordinates: dict) -> np.ndarray:
        """This rank's block of a first value that is an array."""
        if array.shape != variable.type.shape.sizes:
            raise VariableError(
                f"the initializer of variable '{variable.name}' has shape {array.shape}, the"
                f" variable {variable.type.shape}.",
                f"Give an array of shape {variable.type.shape.sizes}, or one of mm's initializers.",
            )  # fmt: skip
        return block_of(array, variable.type, self.mesh.shape, coordinates)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Writes variables: name -> global array, or `local` block of this rank.

        Raises:
            VariableError: An unknown name or a wrong shape; nothing is written then.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for name, value in values.items():
            self._known(name)
            t = self.types[name].type
            for rank, block in self.blocks[name].items():
                if isinstance(value, LocalBlock):
                    part = np.asarray(value.block)
                else:
                    part = np.asarray(value)
                    if part.shape == t.shape.sizes:
                        part = block_of(part, t, self.mesh.shape, self.mesh.shape.coordinates(rank))
                if part.shape != block.shape:
                    raise VariableError(
                        f"variable '{name}' is {t.shape} (block {block.shape} on rank {rank}), the"
                        f" value has shape {part.shape}.",
                        f"Give an array of shape {t.shape.sizes}, or the block as mm.local(block).",
                    )  # fmt: skip
                parts.append((block, part))
        for block, part in parts:
            block[...] = part


class OverlaidStore(VariableStore):
    """Variables of its own beside all those of another store, which stay there alone.

    What a program adds is its own; so caches do not get into the checkpoints of parameters.

    Args:
        below: The other store.
    """

    def __init__(self, below: VariableStore):
        super().__init__(below.mesh, below.ranks)
        self.types = ChainMap(self.types, below.types)
        self.blocks = ChainMap(self.blocks, below.blocks)

    def drop(self, names: Sequence[str]) -> None:
        """Forgets variables of its own; programs that use them must be forgotten too."""
        for name in names:
            del self.types[name], self.blocks[name]
