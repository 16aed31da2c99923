"""What the entries of an architecture mean, array by array: the oracle of reading and writing blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshmpi.dims import Shape
from meshmpi.transformer.pretrained.architectures import Architecture, Entry


def by_variable(architecture: Architecture) -> dict[str, list[Entry]]:
    """Entries of each variable, in order."""
    found: dict[str, list[Entry]] = {}
    for entry in architecture.entries:
        found.setdefault(entry.variable, []).append(entry)
    return found


def where(entry: Entry):
    """Index of the entry's elements in the file's array."""
    indices = []
    for d in entry.file_dims:
        rows = np.arange(d.size).reshape(d.dims[0].size, d.period) if d.period else np.arange(d.size)[None]
        indices.append(rows[:, d.start : d.start + d.extent // len(rows)].reshape(-1))
    return np.ix_(*indices)


def read_whole(entry: Entry, array: np.ndarray, order: Shape) -> np.ndarray:
    """The entry's part of a file's array in the order of its variable, without the dims of ``at``."""
    assert array.shape == entry.file_shape
    mine = array[where(entry)]
    names = [d.name for d in entry.dims]
    return mine.reshape([d.size for d in entry.dims]).transpose([names.index(n) for n in order.names if n in names])


def variables_of(architecture: Architecture, arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]):
    """Whole variables from whole arrays of files."""
    found = {}
    for name, entries in by_variable(architecture).items():
        order = shapes[name]
        found[name] = np.zeros(order.sizes, np.float32)
        for entry in entries:
            keys = [*entry.keys, *entry.ties]
            keys += [k.removeprefix(architecture.prefix) for k in keys]
            array = next(arrays[k] for k in keys if k in arrays)
            at = {d.name: i for d, i in entry.at}
            found[name][tuple(at.get(d.name, slice(None)) for d in order)] = read_whole(entry, array, order)
    return found


def arrays_of(architecture: Architecture, variables: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]):
    """The inverse of `variables_of`: whole arrays by their present keys."""
    arrays: dict[str, np.ndarray] = {}
    for entry in architecture.entries:
        value, order = variables[entry.variable], shapes[entry.variable]
        array = arrays.setdefault(entry.keys[0], np.zeros(entry.file_shape, value.dtype))
        at = {d.name: i for d, i in entry.at}
        kept = [d.name for d in order if d.name not in at]
        mine = value[tuple(at.get(d.name, slice(None)) for d in order)]
        mine = mine.transpose([kept.index(d.name) for d in entry.dims])
        array[where(entry)] = mine.reshape([d.extent for d in entry.file_dims])
    return arrays
