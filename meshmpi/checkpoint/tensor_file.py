"""Files of tensors in the safetensors format, written as a stream and read in verified parts.

The format itself has no checksums; they are returned by `write_tensors`, one per chunk, and asked
for again when reading.  Knows nothing of variables, meshes or checkpoints.
Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from meshmpi.checkpoint.tensor_header import HeaderError, make_header, read_header
from meshmpi.errors import CheckpointError
from meshmpi.runtime.arrays import numpy_dtype

CHUNK_BYTES = 1 << 20
"""Bytes under one checksum: what has to be read to trust any part of them.  Assumption."""
FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "bool": "BOOL",
}  # fmt: skip
Ranges = Sequence[tuple[int, int]]


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Writes a file and waits until it is on disk.

    Args:
        path: The file.
        tensors: Name -> array of a type in FORMAT_NAMES.

    Returns:
        Name -> CRC-32 of each chunk of CHUNK_BYTES of the tensor.
    """
    header, places = make_header(
        {name: (FORMAT_NAMES[x.dtype.name], x.shape) for name, x in tensors.items()}
    )
    checksums: dict[str, list[int]] = {}
    with open(path, "wb") as file:
        file.write(header)
        for name in places:
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
            self._header = read_header(self._file.fileno())
        except HeaderError as error:
            self.close()
            raise self._damaged(str(error)) from error

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
        stored = self._header.tensors.get(name)
        if stored is None:
            raise self._damaged(f"tensor '{name}' is not in it")
        if (stored.shape, stored.kind) != (tuple(shape), FORMAT_NAMES[dtype]):
            raise self._damaged(f"tensor '{name}' is not {FORMAT_NAMES[dtype]}{list(shape)} there")
        return stored.start, stored.stop

    def _verified(
        self, name: str, start: int, low: int, high: int, checksums: Sequence[int]
    ) -> bytearray:
        """Bytes ``low`` to ``high`` of a tensor."""
        data = bytearray(max(0, high - low))
        view, done = memoryview(data), 0
        self._file.seek(self._header.data + start + low)
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
