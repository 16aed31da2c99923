"""Files and folders that are durable when the call returns, and complete or absent; errors carry the path."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshmpi.errors import CheckpointError

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


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of an open file or folder; what was written is on disk at the end."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            yield file
            os.fsync(file)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                os.close(file)
            raise
        os.close(file)  # a network file system may report only here that the disk is full
    except OSError as error:  # calls that take a descriptor do not know its path
        error.filename = error.filename or str(path)
        raise


def write_at(file: int, place: int, data: Any) -> int:
    """Writes all of a buffer at a place of an open file; returns the place behind it."""
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(file, view, place)
        view, place = view[done:], place + done
    return place


def write_file(path: Path, pieces: Iterable[Any], flags: int = os.O_CREAT | os.O_TRUNC) -> None:
    """Writes a file and waits until its bytes are on disk."""
    with opened(path, os.O_WRONLY | flags) as file:
        place = 0
        for piece in pieces:
            place = write_at(file, place, piece)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name next to ``path`` for a file or folder that takes its place when it is whole; removed after an error."""
    unfinished = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield unfinished
        rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(unfinished)
        raise


def replace_file(path: Path, pieces: Iterable[Any]) -> None:
    """As `write_file`, but readers find the old file or the whole new one."""
    with beside(path) as unfinished:
        write_file(unfinished, pieces)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    try:
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY):
            pass
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
            os.mkdir(new)
        except FileExistsError:
            if not new.is_dir():  # else another process was faster
                raise
        sync_folder(new.parent)


def rename(old: Path, new: Path) -> None:
    """Gives a file or folder another name, in one step."""
    os.rename(old, new)


def remove(path: Path) -> None:
    """Removes a file, or a folder and all in it; does nothing if it does not exist."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in sorted(os.listdir(path)):
                remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)
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
        os.mkdir(self.partial)

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
