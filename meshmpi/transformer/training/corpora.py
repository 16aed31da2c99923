"""Corpora by name or path, each divided into a training and a held-out part.

A corpus is one file in which the held-out text follows the training text. A named corpus is read from the cache and
compared with its checksum; this package does not download any. A program that can fetch corpora adds itself to
`FETCHERS`, as `apps.transformer.corpora` does.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.errors import DataError, suggest
from meshmpi.files import plain
from meshmpi.files.cache import cache_folder, make_file

_PIECE_BYTES = 16 << 20  # what is read and encoded at a time; assumption: small next to a model


@dataclass(frozen=True)
class Corpus:
    """A text file of which the first bytes are for training and the rest is held out."""

    name: str  # the name or path that was asked for
    path: Path  # UTF-8 unless it is only read as bytes
    train_bytes: int
    total_bytes: int
    key: str  # changes whenever the text does

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
    return position  # not UTF-8: any byte will do


def open_corpus(name: str, held_out_fraction: float = 0.1) -> Corpus:
    """Finds a corpus; one that is not in the cache is fetched.

    Args:
        name: One of NAMED, or the path of a text file.
        held_out_fraction: The part at the end that is held out.  `sotu` does not use it: every
            20th of its documents is held out.

    Raises:
        DataError: There is no such corpus, it is empty, it cannot be fetched, or it is not what
            was expected; or the fraction leaves one part without text.
    """
    if not 0 < held_out_fraction < 1:
        raise DataError(f"held_out_fraction is {held_out_fraction}.", "Choose one between 0 and 1, such as 0.1.")
    source = NAMED.get(name)
    if source is None:
        return _text_file(name, held_out_fraction)
    path = cache_folder("corpora") / f"{name}-{source.sha256[:12]}.txt"
    make_file(path, lambda beside: _write_checked(name, source.sha256, beside))
    checked_file(path, source.sha256)
    size = path.stat().st_size
    train = source.train_bytes or _boundary(path, size, held_out_fraction)
    return Corpus(name, path, train, size, source.sha256)


def checked_file(path: Path, sha256: str) -> Path:
    """``path``; raises DataError if that file of the cache is no longer what was fetched."""
    try:
        found = f"{hashlib.sha256(plain.contents(path, None, links=False)).hexdigest()[:12]}.."
    except OSError as error:
        found = error.strerror or str(error)
    if found != f"{sha256[:12]}..":
        raise DataError(
            f"{path} is damaged: checksum {found}, expected {sha256[:12]}..", "Delete it; it is fetched again."
        )
    return path


def _text_file(name: str, held_out_fraction: float) -> Corpus:
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = suggest(name, NAMED) if "/" not in name else ""
        known = "" if near.startswith("Known") else f" Known names: {', '.join(NAMED)}."
        raise DataError(
            f"corpus '{name}': the file {what}, and no named corpus has this name.",
            f"{near}{known} Or give the path of a text file.".strip(),
        )
    stat = path.stat()
    if stat.st_size == 0:
        raise DataError(f"corpus '{name}' is an empty file: 0 bytes.", "Give a file with text in it.")
    boundary = _boundary(path, stat.st_size, held_out_fraction)
    # Reading a large file only to see whether it has changed would take too long.
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


# ---- named corpora ---------------------------------------------------------------------------


class _Named(NamedTuple):
    """Checksum of a named text, and length of its training part; 0: the fraction decides."""

    sha256: str
    train_bytes: int = 0


NAMED = {
    # 1,115,394 bytes of Shakespeare with 65 different characters
    "tinyshakespeare": _Named("86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    # 42 works of Shakespeare, 5,057,198 bytes
    "shakespeare": _Named("da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"),
    # 233 State of the Union speeches 1790-2021, public domain, 10,761,646 bytes
    "sotu": _Named("0980a93f5b564d7ce7e45dc1e996609d19d2202e96faa1d13eb2130dba47eb45", 10_244_165),
}
"""What each named corpus must be; measured when it was added."""


def _tinyshakespeare() -> bytes:
    path = Path(__file__).with_name("texts") / "tinyshakespeare.txt.xz"
    try:
        return lzma.decompress(plain.contents(path))
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged: {error}.", "Install meshmpi again.") from error


FETCHERS: dict[str, Callable[[], Any]] = {"tinyshakespeare": _tinyshakespeare}
"""Name of a corpus -> returns its text (bytes); name of a collection of translations -> returns its pairs."""


def fetched(name: str, otherwise: str) -> Any:
    """What the fetcher of a corpus or collection returns; ``otherwise`` is what else to do, for the message."""
    if name not in FETCHERS:
        raise DataError(
            f"'{name}' is not in the cache, and this program does not fetch it.",
            f"In a checkout of meshmpi: python -m apps.transformer fetch {name}; or {otherwise}.",
        )
    return FETCHERS[name]()


def _write_checked(name: str, sha256: str, path: Path) -> None:
    text = fetched(name, "give the path of a text file as data.corpus")
    digest = hashlib.sha256(text).hexdigest()
    if digest != sha256:
        raise DataError(
            f"corpus '{name}' is damaged or has changed: checksum {digest[:12]}.. of"
            f" {len(text):,} bytes, expected {sha256[:12]}..",
            "Fetch it again, or give the path of a text file.",
        )
    path.write_bytes(text)
