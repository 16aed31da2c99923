"""Folders and files of this user alone, into which nobody else can have put anything.

A folder is private if this user owns it and nobody else may write to it. It is held open by its descriptor, and
everything in it is opened relative to that, so renaming a folder above cannot redirect a reader. Links are not
followed. Functions raise `OSError` for what is not private, is a link, or does not fit.
Root is treated like other users. A folder that the user's group may write to is refused even if the group has one
member, because group membership cannot be known. A folder whose owner shows as another user, as on file servers that
map users, is refused too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from meshmpi.files import disk, plain

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MOST_BYTES = 1 << 28
"""Longest file that is read whole.  Larger ones are never ours."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def why_not_private(status: os.stat_result) -> str:
    """What keeps a folder or file from being this user's alone; empty where it is."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & WRITABLE_BY_OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _refuse(path: str | Path, why: str) -> NoReturn:
    raise PermissionError(errno.EPERM, why, str(path))


class Folder:
    """A private folder, held open; ``path`` is as given."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._fd = path, descriptor
        if why := why_not_private(os.fstat(descriptor)):
            self.close()
            _refuse(path, why)

    @classmethod
    def at(cls, path: Path) -> Folder:
        """Opens a folder, which is made where it is missing, with those above it."""
        path = Path(os.path.abspath(path))
        missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
        for folder in reversed(missing):
            _make(folder)
        return cls(path, _opened(path, None))

    @classmethod
    def new(cls, place: Path, prefix: str) -> Folder:
        """Makes a folder that nobody can guess the name of."""
        status = os.stat(place)
        sticky = status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()):
            _refuse(place, f"it belongs to user {status.st_uid}")
        if status.st_mode & WRITABLE_BY_OTHERS and not sticky:
            _refuse(place, "others may rename what is in it")
        path = place / f"{prefix}{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        return cls(path, _opened(path, None))

    def child(self, name: str) -> Folder:
        """Opens a folder in this one, made where it is missing."""
        path = self.path / name
        try:
            if not self.has(name):  # asked first: a read-only file system refuses before it looks
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._fd)
            return Folder(path, _opened(name, self._fd))
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(path)) from None

    @contextlib.contextmanager
    def temporary(self, prefix: str) -> Iterator[Folder]:
        """A folder in this one that goes with the context."""
        with self.child(f"{prefix}{os.urandom(8).hex()}") as made:
            try:
                yield made
            finally:
                self.remove(made.path.name)

    def reached(self) -> str:
        """A name of the folder that leads there whatever becomes of its path, in this process."""
        by_descriptor = f"/proc/self/fd/{self._fd}"
        return by_descriptor if os.path.isdir(by_descriptor) else str(self.path)

    def takes_files(self) -> bool:
        """Whether files can be made in it, as far as permissions and mounts say."""
        return os.access(self.reached(), os.W_OK | os.X_OK)

    def runs_programs(self) -> bool:
        """Whether its file system lets programs run and libraries be loaded."""
        return not os.fstatvfs(self._fd).f_flag & os.ST_NOEXEC

    def names(self) -> list[str]:
        """What is in it, sorted."""
        return sorted(os.listdir(self._fd))

    def has(self, name: str) -> bool:
        """Whether there is anything under a name."""
        with contextlib.suppress(FileNotFoundError):
            os.lstat(name, dir_fd=self._fd)
            return True
        return False

    def create(self, name: str) -> int:
        """A new file, open for reading and writing, of mode 0600."""
        return os.open(name, _NEW, 0o600, dir_fd=self._fd)

    def read(self, name: str, most: int = MOST_BYTES) -> bytes | None:
        """The content of a file; None where there is none, or it is not this user's alone."""
        return read_plain(name, most, self._fd)

    def write(self, name: str, data: bytes) -> None:
        """Puts a whole file under a name at once, in place of what is there."""
        beside = f".{name}.{os.urandom(8).hex()}"
        try:
            with open(self.create(beside), "wb") as file:
                file.write(data)
            self.rename(beside, name)
        except BaseException:
            self.remove(beside)
            raise

    def rename(self, old: str, new: str) -> None:
        """Puts ``old`` in place of whatever is under the name ``new``."""
        try:
            os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            self.remove(new)
            os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Removes a file or folder of this one, links themselves and nothing behind them."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # EPERM: what POSIX has for a folder
            import shutil  # late, as folders are seldom

            shutil.rmtree(f"{self.reached()}/{name}", ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[bool]:
        """Holds a lock until the context ends, or the process; says whether: there are file systems without locks."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            held = False
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
                held = True
            yield held
        finally:
            os.close(fd)

    def close(self) -> None:
        """Lets go of the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def new_file(path: Path) -> int:
    """A new file of mode 0600, open for reading and writing, in a private folder."""
    return os.open(path, _NEW, 0o600)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file of mode ``mode`` that takes its name when it is whole; removed after an error."""
    with disk.beside(path) as unfinished, open(new_file(unfinished), "wb") as file:
        yield file
        os.fchmod(file.fileno(), mode)


def open_plain(path: str | Path, folder: int | None = None) -> int | None:
    """A plain file of this user alone, open for reading; None for anything else, links included."""
    with contextlib.suppress(OSError):
        fd = plain.opened(path, links=False, folder=folder)
        if not why_not_private(os.fstat(fd)):
            return fd
        os.close(fd)
    return None


def read_plain(path: str | Path, most: int = MOST_BYTES, folder: int | None = None) -> bytes | None:
    """The content of a plain file of this user alone; None for anything else, links included."""
    fd = open_plain(path, folder)
    if fd is None:
        return None
    with open(fd, "rb") as file, contextlib.suppress(OSError):  # a damaged disk
        return file.read(most) if os.fstat(fd).st_size <= most else None


def _make(folder: Path) -> None:
    parent = os.stat(folder.parent)
    if os.geteuid() == 0 and parent.st_uid != 0:
        # What root made there, as under sudo, its owner could not use.
        _refuse(folder.parent, f"it belongs to user {parent.st_uid}, not to user 0")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def _opened(name: str | Path, folder: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        refused = error.errno in (errno.ELOOP, errno.ENOTDIR)
        if refused and stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            _refuse(name, "it is a link")
        raise
