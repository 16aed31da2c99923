"""Where the numbers of a variable stand in a checkpoint: data, so that blocks can be read alone.

Nothing here opens a file or knows a mesh: `meshmpi.pretrained` reads and writes by these entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import CheckpointError
from meshmpi.nn.transformer import TransformerConfig


@dataclass(frozen=True)
class FileDim:
    """One dim of an array in a file, as dims of our variable.

    Attributes:
        dims: The dims of ours that it runs over, the last fastest: the 768 columns of a projection
            of 12 heads are ``(heads=12, d_kv=64)``.
        start: Where our block of it begins: of a matrix that holds queries, keys and values side by
            side, the keys begin at ``heads * d_kv``.
        total: Size of the dim in the file; 0: the product of ``dims``.
    """

    dims: tuple[Dimension, ...]
    start: int = 0
    total: int = 0

    @property
    def extent(self) -> int:
        """Number of its indices that are ours."""
        return math.prod(d.size for d in self.dims)

    @property
    def size(self) -> int:
        """Its size in the file."""
        return self.total or self.extent


@dataclass(frozen=True)
class Entry:
    """One array of a file that is one variable of ours, or a part of one.

    Several entries may fill one variable (each expert is an array of its own), and several may take
    from one array (queries, keys and values side by side).

    Attributes:
        variable: Name of the variable.
        keys: Names that the array has in files: the present one, which is written, then legacy
            ones.  Those of the inner model may lack `Architecture.prefix` in a file.
        file_dims: Dims of the array, in its order.
        at: (dim, index) of dims of the variable that the array lacks: the number of the expert.
        ties: Keys of other arrays that a file may hold too, with the same numbers; not written.  A
            file in which they differ contradicts its config.
    """

    variable: str
    keys: tuple[str, ...]
    file_dims: tuple[FileDim, ...]
    at: tuple[tuple[Dimension, int], ...] = ()
    ties: tuple[str, ...] = ()

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the array in the file."""
        return tuple(d.size for d in self.file_dims)

    @property
    def dims(self) -> tuple[Dimension, ...]:
        """Dims of the variable that the array runs over, in the file's order."""
        return tuple(d for f in self.file_dims for d in f.dims)

    def read_whole(self, array: np.ndarray, order: Shape) -> np.ndarray:
        """What the file's array means, in the order of the variable (without the dims of ``at``).

        The plain meaning of an entry; reading blocks must give blocks of this.

        Args:
            array: Of `file_shape`.
            order: The variable's shape.

        Raises:
            CheckpointError: The array has another shape.
        """
        if tuple(array.shape) != self.file_shape:
            raise CheckpointError(
                f"'{self.keys[0]}' is {list(array.shape)}, but variable '{self.variable}' needs"
                f" {list(self.file_shape)}.", "Give the checkpoint that belongs to the config.",
            )  # fmt: skip
        mine = array[tuple(slice(d.start, d.start + d.extent) for d in self.file_dims)]
        dims = self.dims
        kept = [d.name for d in order if d.name in [e.name for e in dims]]
        names = [d.name for d in dims]
        return mine.reshape([d.size for d in dims]).transpose([names.index(n) for n in kept])

    def write_whole(self, value: np.ndarray, order: Shape, array: np.ndarray) -> None:
        """The inverse of `read_whole`: puts a variable's numbers into the file's array.

        Args:
            value: The whole variable, of shape ``order``.
            order: Its shape.
            array: Of `file_shape`; only our block of it is written.
        """
        at = {d.name: i for d, i in self.at}
        value = value[tuple(at.get(d.name, slice(None)) for d in order)]
        kept = [d.name for d in order if d.name not in at]
        mine = value.transpose([kept.index(d.name) for d in self.dims])
        block = tuple(slice(d.start, d.start + d.extent) for d in self.file_dims)
        array[block] = mine.reshape([d.extent for d in self.file_dims])


@dataclass(frozen=True)
class Architecture:
    """A kind of model as its files describe it: config, variables and where they stand.

    Attributes:
        name: Its ``model_type``, such as "gpt2".
        kind: "lm" (`mm.transformer.lm`), "encoder_decoder" or "encoder" (with `masked_lm`).
        config: The Transformer.
        entries: Every variable of ours, from arrays of files.
        prefix: What the keys of the inner model begin with, as "transformer."; files of models
            saved without their head lack it.
        ignored: Regular expressions of whole keys that hold nothing the model needs: buffers, and
            heads for other tasks.
        special: Token ids by what they are for ("pad", "mask", "bos", "eos", "decoder_start"), as
            far as the config says them.
        values: The config as read from config.json, unchanged, to be written beside the weights.
    """

    name: str
    kind: str
    config: TransformerConfig
    entries: tuple[Entry, ...]
    prefix: str
    ignored: tuple[str, ...]
    special: Mapping[str, int]
    values: Mapping[str, object]

    def by_variable(self) -> dict[str, list[Entry]]:
        """Entries of each variable, in order."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.variable, []).append(entry)
        return found

    def variables_of(self, arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]):
        """Whole variables of whole arrays: for small models, and the oracle of partial reading.

        Args:
            arrays: Arrays of files by key.
            shapes: Of the variables, by name.

        Returns:
            name -> array in the order of its shape.

        Raises:
            CheckpointError: An array is missing or has another shape.
        """
        found = {}
        for name, entries in self.by_variable().items():
            order = shapes[name]
            value = np.zeros(order.sizes, np.float32)
            for entry in entries:
                at = {d.name: i for d, i in entry.at}
                place = tuple(at.get(d.name, slice(None)) for d in order)
                value[place] = entry.read_whole(self._array(arrays, entry), order)
            found[name] = value
        return found

    def _array(self, arrays: Mapping[str, np.ndarray], entry: Entry) -> np.ndarray:
        names = [*entry.keys, *entry.ties]
        names += [k.removeprefix(self.prefix) for k in names]
        for key in names:
            if key in arrays:
                return arrays[key]
        raise CheckpointError(
            f"no array for variable '{entry.variable}': there is no '{entry.keys[0]}'.",
            f"Give a checkpoint of a {self.name} model with these layers.",
        )

    def arrays_of(
        self, variables: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]
    ) -> dict[str, np.ndarray]:
        """The inverse of `variables_of`: arrays by their present keys."""
        arrays: dict[str, np.ndarray] = {}
        for entry in self.entries:
            value = variables[entry.variable]
            array = arrays.setdefault(entry.keys[0], np.zeros(entry.file_shape, value.dtype))
            entry.write_whole(value, shapes[entry.variable], array)
        return arrays
