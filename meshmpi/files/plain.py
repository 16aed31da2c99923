"""Reads files that somebody else may have made; one rule decides whether a file is accepted.

A file must be a plain file, not a folder, named pipe, socket or device, so opening it never blocks. Its length is
compared with the reader's limit before memory is allocated. Functions raise `OSError`, whose ``strerror`` says what
is wrong, and `ValueError` for a document that is damaged, nested too deeply or has a duplicate name; the caller adds
the file, the reason and the remedy. Packages are imported where they are needed: `meshmpi doctor` runs without them.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MOST_DOCUMENT_BYTES = 1 << 28
"""Longest document that is read, unless its reader says otherwise.  Those known are below 40 MB."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def is_plain_name(name: object) -> bool:
    """Whether something is a plain file name, which cannot lead to another folder."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(c in "/\\" or not c.isprintable() for c in name)
    )


def opened(path: str | os.PathLike[str], links: bool = True, folder: int | None = None) -> int:
    """Opens a plain file for reading; returns its descriptor."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags if links else flags | os.O_NOFOLLOW, dir_fd=folder)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, f"not a valid file name ({error})", str(path)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise _not_plain(stat.S_IFSOCK, path) from None
        if error.errno == errno.ELOOP and not links:
            raise _not_plain(stat.S_IFLNK, path) from None
        raise
    if (kind := stat.S_IFMT(os.fstat(fd).st_mode)) != stat.S_IFREG:
        os.close(fd)
        raise _not_plain(kind, path)
    return fd


def _not_plain(kind: int, path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}, not a file", str(path))


def contents(path: str | os.PathLike[str], most: int | None = MOST_DOCUMENT_BYTES, links: bool = True) -> bytes:
    """All bytes of a plain file."""
    with open(opened(path, links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            problem = f"it has {size:,} bytes, the most that is read is {most:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read(size)


def text(path: str | os.PathLike[str], most: int | None = MOST_DOCUMENT_BYTES) -> str:
    """As `contents`, decoded; ValueError where it is not UTF-8."""
    return contents(path, most).decode("utf-8")


def parse_json(document: str | bytes) -> Any:
    """What a JSON text says; ValueError where it is none, nests too deep or has a name twice."""
    try:
        return json.loads(document, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice!r} twice")
    return found


def json_table(path: str | os.PathLike[str], most: int = MOST_DOCUMENT_BYTES) -> dict[str, Any]:
    """The table that a JSON file holds; OSError and ValueError as the functions above."""
    found = parse_json(contents(path, most))
    if not isinstance(found, dict):
        raise ValueError(f"it is not a table but {type(found).__name__}")
    return found


def parse_toml(document: str) -> dict[str, Any]:
    """What a TOML text says; ValueError where it is none or nests too deep."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    try:
        return tomllib.loads(document)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def parse_npy(data: bytes) -> np.ndarray:
    """The array that the bytes of a .npy file hold."""
    import numpy as np

    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}
        if version not in readers:
            raise ValueError(f"it is of version {version}")
        shape, fortran, dtype = getattr(np.lib.format, readers[version])(file)
    except (SyntaxError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    start, expected = file.tell(), math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or expected != len(data) - start:
        raise ValueError(f"its header says {dtype}{list(shape)}, {len(data) - start} bytes follow")
    found = np.frombuffer(data, dtype, offset=start)
    return found.reshape(shape, order="F" if fortran else "C")
