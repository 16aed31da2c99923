"""The variables of compiled steps: blocks that live between steps, shared between programs."""

from __future__ import annotations

import weakref
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from meshmpi.dims import MeshShape
from meshmpi.errors import VariableError, suggest
from meshmpi.ir.program import LocalType, VariableType
from meshmpi.kernels import random_block
from meshmpi.kernels.native.normal import fill_normal
from meshmpi.nn.initializers import default_initializer
from meshmpi.runtime.arrays import LocalBlock, block_of, gather_whole, numpy_dtype, view_of
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.values import conversion, first_value, unfit


class VariableStore(Mapping[str, np.ndarray]):
    """Blocks of variables, one per rank played by this process.

    As a mapping: name -> the whole array (``store["w"]`` gathers it, collectively);
    ``store["w"] = array`` is `assign`.

    Args:
        mesh: A Mesh or SimulatedMesh.
        ranks: The ranks played by this process.

    Attributes:
        types: Name -> type and initializer.
        blocks: Name -> rank -> its block.
        wholes: Name -> rank -> the array that its block lies in, with those of the ranks that share it.
    """

    def __init__(self, mesh: AnyMesh, ranks: list[int]):
        self.mesh, self.ranks = mesh, ranks
        self._steps: list[weakref.ref[Any]] = []
        self.types: MutableMapping[str, VariableType] = {}
        self.blocks: MutableMapping[str, dict[int, np.ndarray]] = {}
        self.wholes: MutableMapping[str, dict[int, np.ndarray]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        self._known(name)
        return gather_whole(self.mesh, self.types[name].type, self.blocks[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.assign({name: value})

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __repr__(self) -> str:  # without the values: they would have to be gathered
        held = "; ".join(f"{name} {v.type}" for name, v in self.types.items())
        return f"<VariableStore on mesh {self.mesh.shape}: {held or 'empty'}>"

    def __len__(self) -> int:
        return len(self.types)

    def changed_by(self, step: Any) -> None:
        """Notes a compiled step that updates these variables."""
        self._steps.append(weakref.ref(step))

    @property
    def step_numbers(self) -> list[int]:
        """How often each step that updates these variables has run, in the order of compiling.

        Random numbers depend on it, so that it belongs to what is saved.  Assigned to, it sets the
        numbers of as many steps as there are.
        """
        return [step.step_number for step in self._alive()]

    @step_numbers.setter
    def step_numbers(self, numbers: Sequence[int]) -> None:
        for step, number in zip(self._alive(), numbers, strict=False):
            step.step_number = number

    def _alive(self) -> list[Any]:
        return [step for ref in self._steps if (step := ref()) is not None]

    def _known(self, name: str) -> None:
        if name not in self.types:
            raise VariableError(f"there is no variable '{name}'.", suggest(name, self.types))

    def add(self, variable: VariableType, seed: int, native: bool = False) -> None:
        """Makes the blocks of a variable and fills them by its initializer; known ones are kept.

        Args:
            variable: The variable of a program.
            seed: Seed of its first value.
            native: Whether C may draw large blocks of numbers; they are the same in any case.

        Raises:
            VariableError: It is known with another type or storage layout.
        """
        old = self.types.get(variable.name)
        if old is not None:
            if (old.type, old.joined) != (variable.type, variable.joined):
                raise VariableError(
                    f"variable '{variable.name}' is kept as {old.type} by one program and as"
                    f" {variable.type} by another.",
                    "Compile both with the same layout and storage rules.",
                )
            return
        self.types[variable.name] = variable
        self.blocks[variable.name] = blocks = {}
        self.wholes[variable.name] = wholes = {}
        arrays: dict[int, np.ndarray] = {}  # rank that owns one -> the array
        for rank in self.ranks:
            coordinates = self.mesh.shape.coordinates(rank)
            sizes = variable.whole.local_sizes(self.mesh.shape, coordinates)
            owner = self.mesh.shape.group(rank, variable.joined)[0]
            if owner not in arrays:
                nbytes = int(np.prod(sizes, dtype=np.int64)) * numpy_dtype(variable.type.dtype).itemsize
                buffer = self.mesh.allocate(nbytes, owner if variable.joined else None)
                arrays[owner] = view_of(buffer, 0, sizes, variable.type.dtype)
            wholes[rank] = arrays[owner]
            blocks[rank] = within(arrays[owner], variable.type, variable.whole, self.mesh.shape, coordinates)
            self._fill(blocks[rank], variable, coordinates, seed, native)

    def _fill(self, block: np.ndarray, variable: VariableType, coordinates: dict, seed: int, native: bool) -> None:
        """First values.  No array is made that need not be: new pages cost as much as numbers."""
        t, initializer = variable.type, variable.initializer
        if initializer is None:
            initializer = default_initializer(t.shape, t.dtype)
        d = first_value(variable.name, t.shape, t.dtype, initializer)
        if isinstance(d, np.ndarray):
            block[...] = block_of(d, t, self.mesh.shape, coordinates)
            return
        ranges = t.block(self.mesh.shape, coordinates)
        key, sizes = f"variable {variable.name}", t.shape.sizes
        if d.kind == "constant":
            block[...] = d.shift
        elif not (native and d.kind == "normal" and fill_normal(block, seed, key, sizes, ranges, d.scale, d.shift)):
            # In float64, so that rounding to the stored type happens once, everywhere alike.
            z = random_block(d.kind, seed, key, 0, sizes, ranges, "float64")
            np.multiply(z, d.scale, out=z)
            block[...] = np.add(z, d.shift, out=z)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Writes variables: name -> global array, or `local` block of this rank.

        Raises:
            VariableError: An unknown name, a wrong shape, or values that the variable's type does
                not have (see `meshmpi.values.unfit`); nothing is written then.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for name, value in values.items():
            self._known(name)
            t, whole = self.types[name].type, not isinstance(value, LocalBlock)
            array = np.asarray(value if whole else value.block)
            if why := unfit(array, t.dtype):
                raise VariableError(
                    f"the value for variable '{name}' has {why}, the variable has {t.dtype}.", conversion(t.dtype)
                )
            for rank, block in self.blocks[name].items():
                part = array
                if whole and array.shape == t.shape.sizes:
                    part = block_of(array, t, self.mesh.shape, self.mesh.shape.coordinates(rank))
                if part.shape != block.shape:
                    raise VariableError(
                        f"variable '{name}' is {t.shape} (block {block.shape} on rank {rank}), the"
                        f" value has shape {part.shape}.",
                        f"Give an array of shape {t.shape.sizes}, or the block as mm.local(block).",
                    )
                parts.append((block, part))
        for block, part in parts:
            block[...] = part


def within(
    whole: np.ndarray, t: LocalType, of: LocalType, mesh: MeshShape, coordinates: Mapping[str, int]
) -> np.ndarray:
    """The rows of ``whole``, a block of type ``of``, that a block of type ``t`` has; they differ in the first dim."""
    if t == of:
        return whole
    (start, stop), (begin, _) = t.block(mesh, coordinates)[0], of.block(mesh, coordinates)[0]
    return whole[start - begin : stop - begin]


class OverlaidStore(VariableStore):
    """Variables of its own, and all those of another store, which are kept only there.

    What a program adds is its own; so caches do not get into the checkpoints of parameters.
    """

    def __init__(self, below: VariableStore):
        super().__init__(below.mesh, below.ranks)
        self.types = ChainMap(self.types, below.types)
        self.blocks = ChainMap(self.blocks, below.blocks)
        self.wholes = ChainMap(self.wholes, below.wholes)

    def drop(self, names: Sequence[str]) -> None:
        """Forgets variables of its own; programs that use them must be forgotten too."""
        for name in names:
            del self.types[name], self.blocks[name], self.wholes[name]
