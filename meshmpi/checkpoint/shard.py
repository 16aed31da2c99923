"""The file that one rank writes: safetensors with the checkpoint's identity and all hashes in the header.

The header says where the file belongs, and the manifest has the header's hash; so a file of another checkpoint, step
or rank is detected. Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshmpi.checkpoint import hashing
from meshmpi.checkpoint.hashing import PIECE_BYTES
from meshmpi.checkpoint.tensor_header import MOST_HEADER_BYTES, Header, HeaderError, Stored, make_header, parse_header
from meshmpi.errors import CheckpointError
from meshmpi.files import plain
from meshmpi.runtime.arrays import numpy_dtype

FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Type of a variable -> its name in the format; all of `meshmpi.ir.scalar.DTYPES`, as a test says."""
Ranges = Sequence[tuple[int, int]]


class DamagedShardError(CheckpointError):
    """A file of a checkpoint that is missing or not what was written."""

    file: str = ""  # its name


class Identity(NamedTuple):
    """Which checkpoint a file belongs to: a number of its own, and the step."""

    checkpoint: str
    step: int


class Shard(NamedTuple):
    """A file ready to be written."""

    rank: int  # whose blocks it holds
    header: bytes  # its first bytes
    data: list[np.ndarray]  # blocks as uint8[n], in the order of the file

    @property
    def file(self) -> str:
        """Its name."""
        return file_name(self.rank)

    @property
    def pieces(self) -> list[Any]:
        """All its bytes, as buffers."""
        return [self.header, *(x.data for x in self.data)]

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        size = len(self.header) + sum(x.size for x in self.data)
        return {"bytes": size, "header": header_hash(self.header)}


def file_name(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def header_hash(header: bytes) -> str:
    """Checksum of the first bytes of a file, including their length and the blanks at their end."""
    return f"{hashing.hash_of(header):016x}"


def make_shard(identity: Identity, rank: int, blocks: Mapping[str, np.ndarray]) -> Shard:
    """Hashes blocks and makes the header of their file; the blocks themselves are not copied."""
    kinds = {name: (FORMAT_NAMES[x.dtype.name], x.shape) for name, x in blocks.items()}
    _, places = make_header(kinds)
    data = [np.ascontiguousarray(blocks[n]).reshape(-1).view(np.uint8) for n in places]
    found = {n: _text(hashing.hashes(x)) for n, x in zip(places, data, strict=True)}
    about = {"checkpoint": identity.checkpoint, "step": str(identity.step)}
    about |= {"file": file_name(rank), hashing.NAME: json.dumps(found)}
    return Shard(rank, make_header(kinds, about)[0], data)


def _text(hashes: np.ndarray) -> str:
    return "".join(f"{h:016x}" for h in hashes.tolist())


def is_whole(data: np.ndarray | None, record: Mapping[str, Any]) -> bool:
    """Whether the bytes of a file, uint8[n], are there and all as they were written."""
    if data is None:
        return False
    try:
        header = _verified(data[: _header_bytes(data[:8].tobytes())].tobytes(), data.size, record)
    except HeaderError:
        return False
    block, expected = data[header.data :], _hashes_in(header)
    return all(_text(hashing.hashes(block[s.start : s.stop])) == expected.get(n) for n, s in header.tensors.items())


def _header_bytes(first: bytes) -> int:
    """Length of the header of a file that begins with these 8 bytes; it includes them."""
    return 8 + int.from_bytes(first, "little")


def _verified(header: bytes, size: int, record: Mapping[str, Any]) -> Header:
    """The header of a file of ``size`` bytes; HeaderError where it is not the one that was written."""
    if size != record["bytes"]:
        raise HeaderError(f"it has {size} bytes, {record['bytes']} were written")
    if (found := header_hash(header)) != record["header"]:
        raise HeaderError(f"its header has checksum {found}, expected {record['header']}")
    return parse_header(header[8:], size - _header_bytes(header[:8]))


def _hashes_in(header: Header) -> dict[str, str]:
    """Name -> hashes of the pieces of its block, 16 hexadecimal digits each; empty if damaged."""
    try:
        found = plain.parse_json(header.metadata[hashing.NAME])
    except (KeyError, ValueError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(h, str) for h in found.values())
    return found if whole else {}


class ShardReader:
    """A file of a checkpoint, open for reading; its header is verified.  ``tensors`` says what is in it, by name."""

    def __init__(self, path: Path, record: Mapping[str, Any], what: str) -> None:
        self.path, self.what = path, what
        try:
            self._file = plain.opened(path, links=False)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        try:
            header = self._header(record)
        except BaseException:
            os.close(self._file)
            raise
        self.tensors, self._data = header.tensors, header.data
        self._checker = ThreadPoolExecutor(1, "meshmpi checksums")  # starts when it is needed
        self._hashes = _hashes_in(header)

    def _header(self, record: Mapping[str, Any]) -> Header:
        try:
            size = os.fstat(self._file).st_size
            length = min(_header_bytes(os.pread(self._file, 8, 0)), size, 8 + MOST_HEADER_BYTES)
            return _verified(os.pread(self._file, length, 0), size, record)
        except OSError as error:
            raise self.damaged(f"reading it failed: {error.strerror}") from error
        except HeaderError as error:
            raise self.damaged(str(error)) from error

    def _error(self, problem: str) -> DamagedShardError:
        error = DamagedShardError(
            f"{self.what} {problem}.", f"Take an older checkpoint, or put a good copy of {self.path} in its place."
        )
        error.file = self.path.name
        return error

    def damaged(self, why: str) -> DamagedShardError:
        """The error for a file that is not what was written."""
        return self._error(f"is damaged ({why})")

    def close(self) -> None:
        """Closes the file."""
        self._checker.shutdown()
        os.close(self._file)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str, shape: Sequence[int], dtype: str, ranges: Ranges) -> np.ndarray:
        """A part of a block; every piece of the file that it touches is verified as it is read.

        Only the rows ``ranges[0]`` are read, and what shares a piece with them.
        """
        stored = self._stored(name, shape, dtype)
        row = math.prod(shape[1:]) * numpy_dtype(dtype).itemsize
        first, last = (ranges[0][0] * row, ranges[0][1] * row) if shape else (0, row)
        low = first // PIECE_BYTES * PIECE_BYTES
        high = min(-(-last // PIECE_BYTES) * PIECE_BYTES, stored.stop - stored.start)
        data = np.empty(high - low, np.uint8)
        self._read_pieces(name, stored, low, data)
        part = data[first - low : last - low].view(numpy_dtype(dtype))
        if not shape:
            return part.reshape(())
        rows = part.reshape(ranges[0][1] - ranges[0][0], *shape[1:])
        return rows[(slice(None), *(slice(a, b) for a, b in ranges[1:]))]

    def verify(self, name: str) -> None:
        """Reads a whole block, keeping nothing."""
        stored = self.tensors[name]
        size = stored.stop - stored.start
        buffer = np.empty(min(size, PIECE_BYTES), np.uint8)
        for a in range(0, size, PIECE_BYTES):
            self._read_pieces(name, stored, a, buffer[: size - a])

    def _stored(self, name: str, shape: Sequence[int], dtype: str) -> Stored:
        stored = self.tensors.get(name)
        if stored is None:
            raise self.damaged(f"tensor '{name}' is not in it")
        if (stored.shape, stored.kind) != (tuple(shape), FORMAT_NAMES[dtype]):
            raise self.damaged(f"tensor '{name}' is not {FORMAT_NAMES[dtype]}{list(shape)} there")
        return stored

    def _read_pieces(self, name: str, stored: Stored, start: int, out: np.ndarray) -> None:
        """Reads pieces, ``start`` bytes behind the first of their block, and verifies them.

        Another thread verifies a piece while the next one is read: neither needs the interpreter.
        """
        checked: Future[None] | None = None
        for a in range(0, out.size, PIECE_BYTES):
            piece = out[a : a + PIECE_BYTES]
            self._read_piece(name, stored, start + a, piece)
            if checked is not None:
                checked.result()
            if a + PIECE_BYTES >= out.size:  # nothing is read meanwhile
                self._check(name, start + a, piece)
            else:
                checked = self._checker.submit(self._check, name, start + a, piece)

    def _read_piece(self, name: str, stored: Stored, start: int, out: np.ndarray) -> None:
        done = 0
        try:
            while done < out.size:
                at = self._data + stored.start + start + done
                count = os.preadv(self._file, [out[done:].data], at)
                if not count:
                    raise self.damaged(f"it ends within tensor '{name}'")
                done += count
        except OSError as error:
            raise self.damaged(f"reading tensor '{name}' failed: {error.strerror}") from error

    def _check(self, name: str, start: int, data: np.ndarray) -> None:
        k = 16 * (start // PIECE_BYTES)
        found, expected = f"{hashing.hashes(data)[0]:016x}", self._hashes.get(name, "")[k : k + 16]
        if found != expected:
            raise self.damaged(
                f"tensor '{name}', bytes {start} to {start + data.size} of its block: checksum"
                f" {found}, expected {expected}"
            )
