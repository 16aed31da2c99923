"""Copies of columns in the cache, as .npy files, which are read row by row without decompression."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from meshmpi.data.columns import Column, chosen, npy
from meshmpi.files import plain
from meshmpi.files.cache import cache_folder, make_folder
from meshmpi.hashes import sha256

_NAMES = "names.json"
_ROWS_BYTES = 1 << 26
"""Copied at a time."""


def copied(path: Path, wanted: Mapping[str, str] | Sequence[str] | None) -> dict[str, Column]:
    """The columns of `chosen`, from copies that are made once for each state of the file."""
    names = sorted(wanted.items()) if isinstance(wanted, Mapping) else wanted
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    states = [(str(f.absolute()), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    key = sha256(repr((names, states)).encode()).hexdigest()[:32]
    folder = cache_folder("data") / f"{path.stem[:60]}-{key}"

    def write(place: Path) -> None:
        columns = chosen(path, wanted)
        (place / _NAMES).write_text(json.dumps(list(columns)), encoding="utf-8")
        for k, column in enumerate(columns.values()):
            out = np.lib.format.open_memmap(place / f"{k}.npy", "w+", column.dtype, column.shape)
            each = max(1, _ROWS_BYTES // max(1, column.dtype.itemsize * int(np.prod(column.shape[1:]))))
            for begin in range(0, column.shape[0], each):
                rows = np.arange(begin, min(begin + each, column.shape[0]))
                out[rows[0] : rows[-1] + 1] = column.read(rows)
            out.flush()

    make_folder(folder, write)
    return {name: npy(folder / f"{k}.npy") for k, name in enumerate(json.loads(plain.text(folder / _NAMES)))}
