"""Cache folders whose files carry a hash of every MiB, checked as the files are read.

Training data are made once and read by many jobs, perhaps for months; a flipped bit would silently change the
training. A piece is checked when a process first reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.checkpoint.hashing import NAME, PIECE_BYTES, hashes
from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.files.cache import recall, remember
from meshmpi.files.private import Folder

SEAL = "hashes.json"


def seal(folder: Path) -> None:
    """Writes the hashes of all files of a folder into the folder; no file may be added after that."""
    found = {}
    for path in sorted(folder.iterdir()):
        data = np.fromfile(path, np.uint8)
        pieces = "".join(f"{h:016x}" for h in hashes(data).tolist())
        found[path.name] = {"bytes": data.size, NAME: pieces}
    with Folder.at(folder) as place:
        remember(place, SEAL, found)


class Sealed:
    """A folder that `seal` has finished.  Raises DataError where its hashes are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with Folder.at(folder) as place:
                records = recall(place, SEAL)
        except OSError as error:
            raise self.damaged(error.strerror or str(error)) from error
        if records is None:
            raise self.damaged(f"{SEAL} is missing or not what was written")
        self._records = records

    def damaged(self, why: str) -> DataError:
        """The error for a folder that is not what was made."""
        return DataError(f"the files in {self.folder} are damaged: {why}.", "Delete the folder; it is remade.")

    def array(self, name: str, dtype: str | np.dtype[Any]) -> CheckedArray:
        """A file as a mapped array; a piece is read and checked when it is touched."""
        record = self._records.get(name)
        if record is None:
            raise self.damaged(f"{name} is none of them")
        try:
            with open(plain.opened(self.folder / name, links=False), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != record["bytes"]:
                    raise self.damaged(f"{name} has {size} bytes, {record['bytes']} were written")
                data = np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
        except OSError as error:
            raise self.damaged(f"{name}: {error.strerror}") from error
        return CheckedArray(self, name, data, record[NAME], np.dtype(dtype))

    def read(self, name: str) -> bytes:
        """All bytes of a file, checked."""
        return self.array(name, "uint8")[:].tobytes()


class CheckedArray:
    """Numbers of one file, as an array of one dimension; indexing checks the pieces that it touches.

    Args:
        expected: The hashes of its pieces, 16 hexadecimal digits each.
        dtype: Type of the numbers; their size divides that of a piece.
    """

    def __init__(
        self, place: Sealed, name: str, data: npt.NDArray[np.uint8], expected: str, dtype: np.dtype[Any]
    ) -> None:
        self._place, self._name, self._bytes, self._expected = place, name, data, expected
        if data.size % dtype.itemsize:
            raise place.damaged(f"{name} has {data.size} bytes, no whole number of {dtype}")
        self._numbers = data.view(dtype)
        self._checked = np.zeros(-(-data.size // PIECE_BYTES), bool)
        self.dtype, self.size = dtype, self._numbers.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        each = PIECE_BYTES // self.dtype.itemsize
        if isinstance(key, slice):
            places = range(*key.indices(self.size))
            touched = range(min(places) // each, max(places) // each + 1) if places else ()
        else:
            wanted = np.asarray(key)
            wanted = np.where(wanted < 0, wanted + self.size, wanted)
            if wanted.size and (wanted.min() < 0 or wanted.max() >= self.size):
                raise IndexError(f"{self._name} has {self.size} numbers, requested was {key}")
            touched = np.unique(wanted // each).tolist()
        for k in touched:
            self._check(k)
        return self._numbers[key]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        whole = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def _check(self, k: int) -> None:
        if self._checked[k]:
            return
        start = k * PIECE_BYTES
        piece = np.asarray(self._bytes[start : start + PIECE_BYTES])
        found, expected = f"{hashes(piece)[0]:016x}", self._expected[16 * k : 16 * k + 16]
        if found != expected:
            raise self._place.damaged(
                f"bytes {start} to {start + piece.size} of {self._name} have checksum {found}, expected {expected}"
            )
        self._checked[k] = True
