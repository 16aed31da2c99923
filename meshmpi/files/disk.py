"""Files and folders that are on disk when the call returns, and appear whole or not at all; errors carry the path."""

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
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # from file systems that need no fsync of folders


@contextlib.contextmanager
def errors_of(rank: int) -> Iterator[None]:
    """Turns an OSError into a CheckpointError with rank, path, and the system's text and number."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        raise CheckpointError(
            f"rank {rank} cannot write {error.filename}: {error.strerror} ({code}, errno {error.errno}).",
            "Make room or choose another folder; earlier checkpoints are untouched.",
        ) from error


def _call(path: Path, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    file = _call(path, os.open, path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            os.close(file)
        raise
    _call(path, os.close, file)  # a network file system may report only here that the disk is full


def write_file(path: Path, pieces: Iterable[Any]) -> None:
    """Writes a file and waits until its bytes are on disk."""
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[_call(path, os.write, file, view) :]
        _call(path, os.fsync, file)


def replace_file(path: Path, pieces: Iterable[Any]) -> None:
    """Writes a file under another name and renames it: readers find the old file or the whole new one."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        write_file(beside, pieces)
        rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(beside)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    with _open(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        try:
            _call(folder, os.fsync, file)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise


def make_folder(folder: Path) -> None:
    """Makes a folder and all missing ones above it, and waits until their names are on disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        try:
            _call(new, os.mkdir, new)
        except FileExistsError:
            if not new.is_dir():  # else another process was faster
                raise
        sync_folder(new.parent)


def rename(old: Path, new: Path) -> None:
    """Gives a file or folder another name, in one step."""
    _call(new, os.rename, old, new)


def remove(path: Path) -> None:
    """Removes a file, or a folder and all in it; does nothing if it does not exist."""
    try:
        if stat.S_ISDIR(_call(path, os.lstat, path).st_mode):
            for name in sorted(_call(path, os.listdir, path)):
                remove(path / name)
            _call(path, os.rmdir, path)
        else:
            _call(path, os.unlink, path)
    except FileNotFoundError:
        return


class DurableFolder:
    """A folder that appears under its name with everything that was written into it, or not at all.

    As a context manager it is published at the end of the block and discarded after an error.
    Several processes may write into one: one of them makes and publishes it.
    """

    def __init__(self, path: Path, partial: Path, replaced: Path) -> None:
        self.path, self.partial, self.replaced = path, partial, replaced

    def __enter__(self) -> DurableFolder:
        if not self.partial.is_dir():
            self.make()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self._publish()
        except BaseException:
            self.discard()
            raise

    def make(self) -> None:
        """Makes the partial folder.  Its name need not be on disk: publishing changes it."""
        _call(self.partial, os.mkdir, self.partial)

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Writes a file; arguments and errors as in `write_file`."""
        write_file(self.partial / name, pieces)

    def discard(self) -> None:
        """Removes what was written, as far as possible: the disk may be full or gone."""
        with contextlib.suppress(OSError):
            remove(self.partial)

    def _publish(self) -> None:
        sync_folder(self.partial)
        if self.path.exists():
            # A job killed between the two renames leaves the old folder under the name `replaced`.
            rename(self.path, self.replaced)
            try:
                rename(self.partial, self.path)
            except OSError:
                rename(self.replaced, self.path)
                raise
        else:
            rename(self.partial, self.path)
        sync_folder(self.path.parent)
