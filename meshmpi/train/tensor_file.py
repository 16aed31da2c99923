"""Files of tensors in the safetensors format, written as a stream and read in verified parts.

The format itself has no checksums; they are returned by `write_tensors`, one per chunk, and asked
for again when reading.  Knows nothing of variables, meshes or checkpoints.
Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.errors import CheckpointError
from meshmpi.runtime.arrays import numpy_dtype

CHUNK_BYTES = 1 << 20
"""Bytes under one checksum: what has to be read to trust any part of them.  Assumption."""
FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "bool": "BOOL",
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20  # the limit of the format
Ranges = Sequence[tuple[int, int]]


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Writes a file and waits until it is on disk.

    Args:
        path: The file.
        tensors: Name -> array of a type in FORMAT_NAMES.

    Returns:
        Name -> CRC-32 of each chunk of CHUNK_BYTES of the tensor.
    """
    # Wide types first: then every tensor is aligned to its own type.
    names = sorted(tensors, key=lambda n: -tensors[n].dtype.itemsize)
    header, end = {}, 0
    for name in names:
        x = tensors[name]
        start, end = end, end + x.nbytes
        kind = FORMAT_NAMES[x.dtype.name]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksums: dict[str, list[int]] = {}
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            data = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data
            checksums[name] = [zlib.crc32(data[a:b]) for a, b in _chunks(0, data.nbytes)]
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def _chunks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, min(a + CHUNK_BYTES, stop)) for a in range(start, stop, CHUNK_BYTES)]


class TensorFile:
    """A file open for reading.

    Args:
        path: The file.
        what: How messages call it, such as "shard rank-00003 of step 1200".

    Raises:
        CheckpointError: The file is missing or is no such file.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.what = what
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise CheckpointError(
                f"{what} cannot be read: {error.strerror}.", f"Restore {path}."
            ) from error
        try:
            self._header, self._data = self._read_header()
        except (ValueError, KeyError, struct.error) as error:
            self.close()
            raise self._damaged("its header cannot be read") from error

    def _read_header(self) -> tuple[dict[str, Any], int]:
        (size,) = struct.unpack("<Q", self._file.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError(size)
        return json.loads(self._file.read(size)), 8 + size

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.what} is damaged ({why}).")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self, name: str, shape: Sequence[int], dtype: str, ranges: Ranges, checksums: Sequence[int]
    ) -> np.ndarray:
        """A part of a tensor; every chunk that it touches is verified first.

        Only the rows ``ranges[0]`` are read, and what shares a chunk with them.

        Args:
            name: Name of the tensor.
            shape: Its shape.
            dtype: Its type, a key of FORMAT_NAMES.
            ranges: (start, stop) along each of its dims.
            checksums: As `write_tensors` returned them.

        Raises:
            CheckpointError: The tensor is missing or not what was written.
        """
        start, stop = self._place(name, shape, dtype)
        row = math.prod(shape[1:]) * numpy_dtype(dtype).itemsize
        first, last = (ranges[0][0] * row, ranges[0][1] * row) if shape else (0, row)
        low = first // CHUNK_BYTES * CHUNK_BYTES
        high = min(-(-last // CHUNK_BYTES) * CHUNK_BYTES, stop - start)
        data = self._verified(name, start, low, high, checksums)
        part = np.frombuffer(data, np.uint8)[first - low : last - low].view(numpy_dtype(dtype))
        if not shape:
            return part.reshape(())
        rows = part.reshape(ranges[0][1] - ranges[0][0], *shape[1:])
        return rows[(slice(None), *(slice(a, b) for a, b in ranges[1:]))]

    def _place(self, name: str, shape: Sequence[int], dtype: str) -> tuple[int, int]:
        """Where the bytes of a tensor begin and end, if it is of that shape and type."""
        kind, size = FORMAT_NAMES[dtype], math.prod(shape) * numpy_dtype(dtype).itemsize
        try:
            entry = self._header[name]
            start, stop = entry["data_offsets"]
            if (entry["shape"], entry["dtype"]) == (list(shape), kind) and stop - start == size:
                return start, stop
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"tensor '{name}' is not in it") from error
        raise self._damaged(f"tensor '{name}' is not {kind}{list(shape)} there")

    def _verified(
        self, name: str, start: int, low: int, high: int, checksums: Sequence[int]
    ) -> bytearray:
        """Bytes ``low`` to ``high`` of a tensor."""
        data = bytearray(max(0, high - low))
        view, done = memoryview(data), 0
        self._file.seek(self._data + start + low)
        while done < len(data):
            count = self._file.readinto(view[done:])
            if not count:
                raise self._damaged(f"it ends within tensor '{name}'")
            done += count
        for a, b in _chunks(low, high):
            k = a // CHUNK_BYTES
            found = zlib.crc32(view[a - low : b - low])
            expected = checksums[k] if k < len(checksums) else 0
            if found != expected:
                raise self._damaged(
                    f"tensor '{name}': checksum {found:08x} expected {expected:08x}"
                )  # fmt: skip
        return data
