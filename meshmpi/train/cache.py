"""Files that are made once and then shared: by runs, by ranks and by jobs started together.

Everything is written beside its final name and renamed, so that a reader sees whole files or none.
Knows nothing of what the files hold, and needs no MPI: ranks meet at the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from meshmpi.errors import DataError


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, made when missing.

    It lies under ``$MESHMPI_CACHE``, or else ``$XDG_CACHE_HOME/meshmpi``, or ``~/.cache/meshmpi``.

    Raises:
        DataError: The folder cannot be made.
    """
    home = os.environ.get("MESHMPI_CACHE")
    if not home:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        parts = ("meshmpi", *parts)
    folder = Path(home, *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made: {error.strerror}.",
            "Set MESHMPI_CACHE to a folder that you may write to.",
        ) from error
    return folder


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lets one process at a time make ``path``; the others wait here.

    On a file system without locks they do not wait: the work is then done several times, which is
    slow but harmless, because results are renamed into place.
    """
    with _open_lock(path.with_name(path.name + ".lock")) as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file frees the lock


def _open_lock(path: Path) -> IO[str]:
    try:
        return open(path, "a", encoding="ascii")
    except OSError as error:
        raise DataError(
            f"the cache folder {path.parent} cannot be written to: {error.strerror}.",
            "Set MESHMPI_CACHE to a folder that you may write to.",
        ) from error


def make_file(path: Path, write: Callable[[Path], None]) -> Path:
    """Makes a file once: ``write`` fills one beside it, which is then renamed.

    Args:
        path: The file wanted; nothing happens when it exists.
        write: Called with the path to write to.
    """
    if not path.exists():
        with exclusive(path):
            if not path.exists():
                _publish(path, write)
    return path


def make_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """Makes a folder once: ``fill`` puts files into one beside it, which is then renamed.

    Args:
        path: The folder wanted; nothing happens when it exists.
        fill: Called with an empty folder.
    """

    def make(beside: Path) -> None:
        beside.mkdir()
        fill(beside)

    return make_file(path, make)


def _publish(path: Path, write: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        beside = Path(work, "new")
        write(beside)
        try:
            os.rename(beside, path)
        except OSError:
            if not path.exists():
                raise
            # Without locks another process was first; its result is the same.
            if beside.is_dir():
                shutil.rmtree(beside)
