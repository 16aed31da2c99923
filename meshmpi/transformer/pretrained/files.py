"""Reads Hugging Face's files: one .safetensors file, or several with an index.

Opening a checkpoint checks everything that its headers and index say; `Checkpoint.read` then reads only the
bytes of one block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from meshmpi.checkpoint.tensor_header import ITEM_BYTES, Header, HeaderError, Stored, read_header
from meshmpi.errors import CheckpointError, suggest
from meshmpi.files import plain
from meshmpi.runtime.arrays import numpy_dtype
from meshmpi.values import unfit

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
READ_AS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}
"""Types of the format that can be read -> NumPy's (or ml_dtypes') name."""
AGAIN = "Download or copy the file again."
_VERSIONS = "Download index and shards of one version again."
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Ranges = Sequence[tuple[int, int]]
Pieces = Sequence[Ranges]


class Place(NamedTuple):
    """Where a tensor is: in which file, and where in it."""

    file: Path
    stored: Stored


def contiguous_runs(shape: Sequence[int], pieces: Pieces) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of the runs that a block consists of, in its order.

    Args:
        shape: Shape of the whole tensor, row-major.
        pieces: Along each dim the (start, stop) of what the block takes of it, ascending, none
            touching the next.
    """
    if not all(pieces) or any(a >= b for p in pieces for a, b in p):
        return
    # Up to dim k the block is cut; behind it the rows are whole.
    k = len(shape)
    while k and tuple(pieces[k - 1][0]) == (0, shape[k - 1]):
        k -= 1
    if not k:
        yield 0, math.prod(shape)
        return
    row = math.prod(shape[k:])
    starts = np.zeros((1,), np.int64)
    for j in range(k - 1):
        indices = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in pieces[j]])
        starts = (starts[:, None] + indices * math.prod(shape[j + 1 :])).reshape(-1)
    for start in starts.tolist():
        for a, b in pieces[k - 1]:
            yield start + a * row, (b - a) * row


class Checkpoint:
    """A checkpoint open for reading.

    Args:
        path: A .safetensors file, an index, or a folder with either.

    Attributes:
        path: The file or index that is read.
        places: Key -> file and place, of every tensor.
        bytes_read: Bytes of tensors that `read` has read so far; headers do not count.

    Raises:
        CheckpointError: A file is missing, cut, of another format, or not what the index says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _find(Path(path))
        self.places: dict[str, Place] = {}
        self.bytes_read = 0
        self._files: dict[Path, int] = {}
        self._headers: dict[Path, Header] = {}
        try:
            if self.path.name.endswith(".json"):
                self._open_shards(_read_index(self.path))
            else:
                self._open(self.path)
        except BaseException:
            self.close()
            raise

    def _open_shards(self, index: dict[str, str]) -> None:
        for file in dict.fromkeys(index.values()):
            self._open(self.path.parent / file)
        for key, file in index.items():
            place = self.places.get(key)
            if place is None or place.file.name != file:
                where = f"; {place.file.name} has it" if place else ""
                raise CheckpointError(
                    f"{self.path.parent / file} has no tensor '{key}', which {self.path.name} says it has{where}.",
                    _VERSIONS,
                )
        for key, place in self.places.items():
            if key not in index:
                raise CheckpointError(
                    f"{place.file} has a tensor '{key}' that {self.path.name} does not name.", _VERSIONS
                )

    def _open(self, file: Path) -> None:
        try:
            descriptor = plain.opened(file)
        except OSError as error:
            shard = f", a shard that {self.path.name} names," if file != self.path else ""
            raise CheckpointError(f"{file}{shard} cannot be read: {error.strerror}.", AGAIN) from error
        self._files[file] = descriptor
        try:
            header = read_header(descriptor)
        except (HeaderError, OSError) as error:
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged: {error}"
            raise CheckpointError(f"{file} {why}.", AGAIN) from error
        self._headers[file] = header
        for key, stored in header.tensors.items():
            other = self.places.setdefault(key, Place(file, stored))
            if other.file != file:
                raise CheckpointError(
                    f"tensor '{key}' is in {other.file} and in {file.name}.",
                    "Remove what does not belong to this checkpoint, or download it again.",
                )

    def close(self) -> None:
        """Closes all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._place(key).stored.shape

    def dtype(self, key: str) -> str:
        """Data type of a tensor; CheckpointError for one that is not read."""
        file, stored = self._place(key)
        if stored.kind not in READ_AS:
            raise CheckpointError(
                f"tensor '{key}' of {file} is of type {stored.kind}, which is not read ({', '.join(READ_AS)} are).",
                "Quantised weights cannot be used: give a checkpoint of floating-point numbers.",
            )
        return READ_AS[stored.kind]

    def _place(self, key: str) -> Place:
        if key not in self.places:
            raise CheckpointError(f"{self.path} has no tensor '{key}'.", suggest(key, self.places))
        return self.places[key]

    def read(self, key: str, ranges: Ranges | None = None, dtype: str = "float32") -> np.ndarray:
        """A block of a tensor as an array of type ``dtype``; only its own bytes are read.

        ``ranges`` has (start, stop) along each dim; None: all of the tensor.
        """
        file, stored = self._place(key)
        ranges = [(0, n) for n in stored.shape] if ranges is None else ranges
        if len(ranges) != len(stored.shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(ranges, stored.shape, strict=True)
        ):
            raise CheckpointError(
                f"tensor '{key}' of {file} is {list(stored.shape)}; the block"
                f" {list(map(tuple, ranges))} is not inside.",
                "Ask for ranges within the shape.",
            )
        return self.read_pieces(key, [[r] for r in ranges], dtype)

    def read_pieces(self, key: str, pieces: Pieces, dtype: str) -> np.ndarray:
        """As `read`, for a block that takes several pieces of a dim, such as a part of each head.

        The pieces are those of `contiguous_runs`, inside the shape.
        """
        file, stored = self._place(key)
        block = np.empty([sum(b - a for a, b in p) for p in pieces], numpy_dtype(self.dtype(key)))
        item, done = ITEM_BYTES[stored.kind], 0
        first = self._headers[file].data + stored.start
        view = block.reshape(-1).view(np.uint8).data
        for start, count in contiguous_runs(stored.shape, pieces):
            self._read_run(file, key, first + start * item, view[done : done + count * item])
            done += count * item
        if why := unfit(block, dtype):
            raise CheckpointError(
                f"tensor '{key}' of {file} has {why}, and {dtype} is needed.",
                "Give a checkpoint of the model that this architecture is for.",
            )
        return block.astype(numpy_dtype(dtype), copy=False)

    def read_bytes(self, key: str) -> bytes:
        """All bytes of a tensor of any type, as they are in the file."""
        file, stored = self._place(key)
        data = bytearray(stored.stop - stored.start)
        self._read_run(file, key, self._headers[file].data + stored.start, memoryview(data))
        return bytes(data)

    def _read_run(self, file: Path, key: str, place: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._files[file], [into[done:]], place + done)
            if not count:
                raise CheckpointError(
                    f"{file} has been cut while it was read: of tensor '{key}' {len(into)} bytes"
                    f" were expected at {place}, {done} found.",
                    AGAIN,
                )
            done += count
        self.bytes_read += done


# ---- finding ---------------------------------------------------------------------------------


def _find(path: Path) -> Path:
    """The file or index to read."""
    if path.suffix in _PICKLES:
        raise _pickle_error(path)
    if not path.is_dir():
        if path.suffix not in (".safetensors", ".json"):
            raise CheckpointError(
                f"{path} is {'not a checkpoint' if path.exists() else 'missing'}.",
                "Give a .safetensors file, a model.safetensors.index.json, or a folder with one;"
                " a name on the Hugging Face hub has to be downloaded first.",
            )
        return path
    for name in (INDEX, WEIGHTS):
        if (path / name).exists():
            return path / name
    found = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found[:4]) + (", ..." if len(found) > 4 else "")
        raise CheckpointError(
            f"{path} has {len(found)} .safetensors files and no {INDEX}: {names}.",
            f"Give one of the files, or download {INDEX} as well.",
        )
    pickles = sorted(p for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise _pickle_error(pickles[0])
    raise CheckpointError(f"{path} has neither {WEIGHTS} nor {INDEX}.", "Give the folder of a checkpoint.")


def _pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a PyTorch pickle: reading it would run code that it contains, and all of it"
        " would have to be read on every rank.",
        'Convert it once, where PyTorch and transformers are installed: python -c "import'
        " transformers as t; t.AutoModel.from_pretrained('FOLDER')"
        ".save_pretrained('NEW_FOLDER')\" (with the model's own class, as"
        " AutoModelForCausalLM, to keep its head).",
    )


def _read_index(path: Path) -> dict[str, str]:
    """Key -> name of its file."""
    try:
        index = plain.json_table(path)["weight_map"]
        if not isinstance(index, dict) or not index:
            raise ValueError("weight_map is not a table")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.", AGAIN) from error
    except (OSError, ValueError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"the index {path} cannot be read: {why}.", AGAIN) from error
    for key, file in index.items():
        # An index comes from elsewhere: it must not lead out of its folder.
        if not plain.is_plain_name(file):
            raise CheckpointError(
                f"the index {path} places tensor '{key}' in {file!r}, which is not the name of a file next to it.",
                AGAIN,
            )
    return index
