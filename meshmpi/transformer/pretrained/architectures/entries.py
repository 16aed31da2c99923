"""Where the numbers of a variable stand in a checkpoint, as data, so that each block can be read alone.

Opens no file and knows no mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshmpi.dims import Dimension
from meshmpi.transformer.models import TransformerConfig


@dataclass(frozen=True)
class FileDim:
    """One dim of an array in a file, as dims of our variable.

    Attributes:
        dims: The dims of ours that it runs over, the last fastest: the 768 columns of a projection
            of 12 heads are ``(heads=12, d_kv=64)``.
        start: Where our block of it begins: in a matrix that holds queries, keys and values side by
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
        special: Token ids by purpose ("pad", "mask", "bos", "eos", "decoder_start"), as far as the
            config has them.
        values: The content of config.json, to be written next to the weights.
    """

    name: str
    kind: str
    config: TransformerConfig
    entries: tuple[Entry, ...]
    prefix: str
    ignored: tuple[str, ...]
    special: Mapping[str, int]
    values: Mapping[str, object]
