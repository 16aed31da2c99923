"""Files that are made once and shared by runs, by ranks and by jobs started together.

Everything kept between runs lies below one folder, and all folders in it are private (`private`). If one is not, a
private temporary folder is used, and a line says so. Small documents carry their own hash. Every file is written
under another name and renamed, so that readers see complete files or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshmpi.errors import DataError
from meshmpi.files import disk
from meshmpi.files.private import Folder
from meshmpi.hashes import sha256
from meshmpi.job import first_of_host

MOST_DOCUMENT_BYTES = 1 << 24
_SEAL = b"\n# sealed "
_SEAL_BYTES = len(_SEAL) + 64 + 1


def wanted_folder() -> Path:
    """Where the cache belongs: $MESHMPI_CACHE, $XDG_CACHE_HOME/meshmpi or ~/.cache/meshmpi."""
    named = os.environ.get("MESHMPI_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the XDG rules want it
        home = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):
        raise FileNotFoundError(2, "this user has no home folder", home)
    return Path(home, "meshmpi")


def opened(*parts: str, programs: bool = False) -> Folder:
    """A folder of the cache, made where it is missing, held open."""
    try:
        return _usable(Folder.at(wanted_folder()), parts, programs)
    except OSError as error:
        refused = error
    try:
        found = _usable(_temporary(), parts, programs)
    except OSError as error:
        raise DataError(
            f"the cache has no folder: {_said(refused)}, and in the folder for temporary files"
            f" none can be made ({error.filename}: {error.strerror}).",
            "Set MESHMPI_CACHE to a folder that you own and nobody else may write to.",
        ) from error
    tell(f"{_said(refused)}; {found.path} is used instead.  MESHMPI_CACHE can name another folder")
    return found


def first_here() -> bool:
    """Whether this is the first rank of its host, by the launcher's word, or no rank."""
    return first_of_host()


def refusal(*parts: str, programs: bool = False) -> str:
    """Why `opened` takes a folder among the temporary files; empty where it does not."""
    try:
        _usable(Folder.at(wanted_folder()), parts, programs).close()
    except OSError as error:
        return _said(error)
    return ""


def cache_folder(*parts: str) -> Path:
    """The path of `opened`, for programs that need one."""
    with opened(*parts) as folder:
        return folder.path


def _usable(folder: Folder, parts: tuple[str, ...], programs: bool) -> Folder:
    """The folder below; it may be read-only (fetched on a login node), unless programs are to be loaded from there."""
    for name in parts:
        with folder:
            folder = folder.child(name)
    if programs and not folder.runs_programs():
        raise PermissionError(1, "its file system is mounted noexec", str(folder.path))
    if programs and not folder.takes_files():
        raise PermissionError(1, "it is not writable, or mounted read-only", str(folder.path))
    return folder


def _temporary() -> Folder:
    """The user's folder among the temporary files: the one with the plain name if it is private."""
    import tempfile  # late, as it is seldom needed

    place = Path(tempfile.gettempdir())
    name = f"meshmpi-{os.geteuid()}"
    earlier = [place / name, *sorted(place.glob(f"{name}-cache-*"))]
    for path in earlier:
        with contextlib.suppress(OSError):
            return Folder.at(path)
    return Folder.new(place, f"{name}-cache-")


def _said(error: OSError) -> str:
    try:
        wanted = f"{wanted_folder()} is not used"
    except OSError:
        wanted = "there is no place for it"
    return f"{wanted} ({error.filename}: {error.strerror})"


def tell(what: str) -> None:
    """Warns, once in each process and by one rank of each host."""
    if first_here() and what not in _told:
        _told[what] = None
        sys.stderr.write(f"meshmpi: cache: {what}.\n")


_told: dict[str, None] = {}


def remember(folder: Folder, name: str, document: Any) -> None:
    """Keeps a document, anything that JSON can hold, with a hash of it and its name."""
    write_sealed(folder, name, json.dumps(document).encode())


def recall(folder: Folder, name: str) -> Any:
    """What `remember` was given; None where that is missing, damaged or another user's."""
    data = read_sealed(folder, name)
    return None if data is None else json.loads(data)


def write_sealed(folder: Folder, name: str, data: bytes) -> None:
    """Keeps a small file; a last line, a comment in TOML, has a hash of it and its name."""
    folder.write(name, data + _SEAL + _hash(name, data) + b"\n")


def read_sealed(folder: Folder, name: str) -> bytes | None:
    """What `write_sealed` was given; None where that is missing, damaged or another user's."""
    found = folder.read(name, MOST_DOCUMENT_BYTES)
    if found is None:
        return None
    data, seal = found[:-_SEAL_BYTES], found[-_SEAL_BYTES:]
    return data if seal == _SEAL + _hash(name, data) + b"\n" else None


def _hash(name: str, data: bytes) -> bytes:
    return sha256(name.encode() + b"\0" + data).hexdigest().encode()


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Lets one process at a time make ``path``, while others wait; says whether the lock is held.

    Without locks they do not wait: the work is then done several times, and the results renamed into place.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(Folder.at(path.parent))
            held = stack.enter_context(folder.locked(path.name + ".lock"))
        except OSError as error:
            raise DataError(
                f"the cache folder {path.parent} cannot be written to: {error.strerror}.",
                "Set MESHMPI_CACHE to a folder that you may write to.",
            ) from error
        yield held


def make_file(path: Path, write: Callable[[Path], None]) -> Path:
    """Makes a file once: ``write`` fills another one next to it, which is then renamed."""
    if not path.exists():
        with exclusive(path) as held:
            if not path.exists():
                if held:
                    _sweep(path)
                try:
                    with disk.beside(path) as beside:
                        write(beside)
                except OSError:
                    if not path.exists():  # else, without locks, another process was first with the same
                        raise
    return path


def make_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """Makes a folder once: ``fill`` puts files into another one next to it, which is then renamed."""

    def make(beside: Path) -> None:
        beside.mkdir()
        fill(beside)

    return make_file(path, make)


def _sweep(path: Path) -> None:
    """Removes what killed processes have left next to a file."""
    begins = f".{path.name}."
    for entry in list(path.parent.iterdir()):
        if entry.name.startswith(begins) and "." not in entry.name[len(begins) :]:
            with contextlib.suppress(OSError):
                disk.remove(entry)
