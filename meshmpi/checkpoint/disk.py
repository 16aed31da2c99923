"""Writing so that it is on disk: files and folders are waited for, and every failure has a path.

All system calls of a save are made here, through `system`, which trials replace by one that fails.
Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from meshmpi.errors import CheckpointError

T = TypeVar("T")
system: Any = os
"""Where open, write, fsync, close, rename, mkdir, rmdir, unlink, lstat and listdir come from."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems that keep names safe themselves


def unwritable(error: OSError, rank: int) -> CheckpointError:
    """The error for a save that failed: rank, path, what the system said, and its number."""
    code = errno.errorcode.get(error.errno or 0, "?")
    return CheckpointError(
        f"rank {rank} cannot write {error.filename}: {error.strerror} ({code}, errno"
        f" {error.errno}).",
        "Make room or choose another folder; earlier checkpoints are untouched.",
    )


def _call(path: Path, function: Callable[..., T], *arguments: Any) -> T:
    """Calls; an error carries the path, also where only a number of a file was given."""
    try:
        return function(*arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    file = _call(path, system.open, path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            system.close(file)
        raise
    _call(path, system.close, file)  # network file systems may only now say that the disk is full


def write_file(path: Path, pieces: Iterable[Any]) -> None:
    """Writes a file and waits until its bytes are on disk.

    Args:
        path: The file; one that is there is replaced.
        pieces: Buffers of bytes, one after the other.

    Raises:
        OSError: With the path, the system's number and text.
    """
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[_call(path, system.write, file, view) :]
        _call(path, system.fsync, file)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    with _open(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        try:
            _call(folder, system.fsync, file)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise


def make_folder(folder: Path, sync: bool = True) -> None:
    """Makes a folder and those above it, as far as they are missing.

    Args:
        folder: The folder.
        sync: Whether to wait until their names are on disk.

    Raises:
        OSError: One cannot be made.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        try:
            _call(new, system.mkdir, new)
        except FileExistsError:
            if not new.is_dir():  # else another process was faster
                raise
        if sync:
            sync_folder(new.parent)


def rename(old: Path, new: Path) -> None:
    """Gives a file or folder another name; one step."""
    _call(new, system.rename, old, new)


def remove(path: Path) -> None:
    """Removes a file, or a folder and all in it; what is not there is no error."""
    try:
        if stat.S_ISDIR(_call(path, system.lstat, path).st_mode):
            for name in sorted(_call(path, system.listdir, path)):
                remove(path / name)
            _call(path, system.rmdir, path)
        else:
            _call(path, system.unlink, path)
    except FileNotFoundError:
        return
