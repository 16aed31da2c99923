"""The header of a safetensors file, read with every check that it allows, and written.

A header that passes describes the data without gap or overlap to the last byte of the file.
Source of the format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshmpi.files import plain

MOST_HEADER_BYTES = 100 << 20
"""The limit of the format."""
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Types of the format whose items take whole bytes."""
MOST_DIMS, MOST_SIZE = 64, 1 << 63
"""What NumPy takes: dims of an array, and their sizes, which are below this number."""
_OTHER_FILES = {
    b"version ": "it is a pointer of Git LFS, not the file that it stands for; run: git lfs pull",
    b"PK\x03\x04": "it begins as a ZIP or PyTorch file",
    b"\x80\x02": "it begins as a Python pickle",
    b"<!DOC": "it begins as a web page: the download failed",
    b"<html": "it begins as a web page: the download failed",
}


class HeaderError(ValueError):
    """What is wrong with a file; its reader says which file and what to do."""


class Stored(NamedTuple):
    """A tensor in a file: its type, its shape, and where its bytes are, from the first of data."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file says of itself: tensors in the order of their bytes; free text; first of data."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    data: int


def read_header(file: int) -> Header:
    """Reads and checks the header of an open file."""
    size, data = os.fstat(file).st_size, os.pread(file, 9, 0)
    if data[8:] != b"{":  # else it is a header, whose length may have the bytes of any other mark
        for begin, meaning in _OTHER_FILES.items():
            if data.startswith(begin):
                raise HeaderError(meaning)
    if len(data) < 8:
        raise HeaderError(f"it has {size} bytes, and its header cannot be read: the first 8 must hold its length")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MOST_HEADER_BYTES:
        raise HeaderError(f"its header cannot be read: it would have {length} bytes, the most is {MOST_HEADER_BYTES}")
    if 8 + length > size:
        raise HeaderError(f"its header cannot be read: it ends at byte {8 + length}, the file has {size}")
    return parse_header(os.pread(file, length, 8), size - 8 - length)


def parse_header(text: bytes, data_bytes: int) -> Header:
    """Checks the text of a header, which follows its length, against the bytes behind it."""
    tensors, metadata = _parse(text)
    _check_places(tensors, data_bytes)
    return Header(tensors, metadata, 8 + len(text))


def _parse(text: bytes) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors in the order of their bytes, and the metadata."""
    try:
        content = plain.parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise HeaderError(f"its header cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise HeaderError("its header cannot be read: it is not a table of tensors")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("its header cannot be read: __metadata__ is not a table of texts")
    stored = {name: _stored(name, entry) for name, entry in content.items()}
    return dict(sorted(stored.items(), key=lambda item: item[1][2:])), metadata


def _stored(name: str, entry: Any) -> Stored:
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(f"tensor '{name}' has no dtype, shape or data_offsets in the header") from error
    fit = all(type(n) is int and 0 <= n < MOST_SIZE for n in numbers)
    fit = fit and isinstance(kind, str) and len(shape) <= MOST_DIMS
    # NumPy counts so too: an array without elements must not be one that is too large with some.
    if not fit or math.prod(n or 1 for n in shape) * ITEM_BYTES.get(kind, 1) >= MOST_SIZE:
        raise HeaderError(f"tensor '{name}' is described as {json.dumps(entry)[:200]}")
    stored = Stored(kind, tuple(shape), start, stop)
    if kind in ITEM_BYTES:
        expected = math.prod(shape) * ITEM_BYTES[kind]
        if stop - start != expected:
            raise HeaderError(
                f"tensor '{name}' {kind}{shape} should take {expected} bytes, its offsets"
                f" {start}..{stop} give it {stop - start}"
            )
    elif stop < start:
        raise HeaderError(f"tensor '{name}' has offsets {start}..{stop}")
    return stored


def _check_places(tensors: Mapping[str, Stored], there_are: int) -> None:
    """HeaderError unless the tensors fill the data, one after the other."""
    end, last = 0, ""
    for name, stored in tensors.items():
        if stored.start < end:
            raise HeaderError(
                f"tensor '{name}' begins at byte {stored.start} of the data, within tensor"
                f" '{last}', which ends at {end}"
            )
        if stored.start > end:
            raise HeaderError(f"bytes {end}..{stored.start} of the data, before tensor '{name}', belong to none")
        if stored.stop > there_are:
            raise HeaderError(
                f"it ends within tensor '{name}': expected {stored.stop} bytes of data up to its end, found {there_are}"
            )
        end, last = stored.stop, name
    if end != there_are:
        raise HeaderError(f"expected {end} bytes of data, found {there_are}")


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    """The first bytes of a file, and where its tensors belong.

    Returns:
        The header with its length; name -> place.  Wide types come first: then every tensor is
        aligned to its own type.
    """
    placed: dict[str, Stored] = {}
    end = 0
    for name in sorted(tensors, key=lambda n: -ITEM_BYTES[tensors[n][0]]):
        kind, shape = tensors[name]
        start, end = end, end + math.prod(shape) * ITEM_BYTES[kind]
        placed[name] = Stored(kind, tuple(shape), start, end)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, stored in placed.items():
        header[name] = {"dtype": stored.kind, "shape": list(stored.shape), "data_offsets": [stored.start, stored.stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, placed
