"""FASTA files of proteins, read strictly: what could be a mistake is an error with its line.

Knows nothing of models.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from apps.esm2.alphabet import RESIDUES
from meshmpi.errors import DataError
from meshmpi.files import plain

_OTHER = re.compile(f"[^{RESIDUES}]")
NUCLEOTIDES = frozenset("ACGTUN")
ENOUGH = 30
"""A sequence of at least so many letters of nucleotides only is no protein.

Of random proteins one in 10**20 is such."""


class Record(NamedTuple):
    """A protein.

    Attributes:
        name: First word of its header; different for all records of a file.
        sequence: Letters of `alphabet.RESIDUES`.
        line: Of its header, counted from 1.
    """

    name: str
    sequence: str
    line: int


def read(path: str | Path, *, unknown_as_x: bool = False) -> list[Record]:
    """All records of a file; with the suffix .gz it is unpacked.

    Args:
        path: Of the file.
        unknown_as_x: Whether letters that are no residue are read as X rather than refused;
            lower-case letters then count as upper-case ones and a ``*`` at the end is dropped.

    Raises:
        DataError: The file is missing, empty, not text, or not FASTA of proteins.
    """
    path = Path(path)
    records = list(_records(path, _lines(path), unknown_as_x))
    if not records:
        raise DataError(f"{path} has no record.", "Give a FASTA file: '>name', then letters.")
    seen: dict[str, int] = {}
    for r in records:
        if r.name in seen:
            raise DataError(
                f"{path}:{r.line}: the name '{r.name}' is that of line {seen[r.name]} too.",
                "Give every record a name of its own, the first word of its header.",
            )
        seen[r.name] = r.line
    return records


def _lines(path: Path) -> list[str]:
    try:
        data = plain.contents(path, None)
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged archive: {error}.", "Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Give the path of a FASTA file.") from error
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte {data[error.start]:#04x} is not text in UTF-8.",
            "Give a FASTA file of letters; unpack it if it is packed.",
        ) from error


def _records(path: Path, lines: Iterable[str], unknown_as_x: bool) -> Iterator[Record]:
    name, first, parts = "", 0, list[str]()
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if line.startswith(">"):
            if first:
                yield _record(path, name, first, parts)
            name, first, parts = _name(path, number, line), number, []
        elif line:
            if not first:
                raise DataError(
                    f"{path}:{number}: letters come before the first header.", "Begin every record with a line '>name'."
                )
            parts.append(_checked(path, number, line, unknown_as_x))
    if first:
        yield _record(path, name, first, parts)


def _name(path: Path, number: int, line: str) -> str:
    words = line[1:].split()
    if not words:
        raise DataError(f"{path}:{number}: the header has no name.", "Write '>name'.")
    return words[0]


def _record(path: Path, name: str, line: int, parts: list[str]) -> Record:
    sequence = "".join(parts)
    if not sequence:
        raise DataError(f"{path}:{line}: record '{name}' has no letters.", "Remove it, or add its sequence.")
    if len(sequence) >= ENOUGH and NUCLEOTIDES.issuperset(sequence):
        raise DataError(
            f"{path}:{line}: record '{name}' has the letters"
            f" {', '.join(sorted(set(sequence)))} only, so it is DNA or RNA and no protein.",
            "Translate it first.",
        )
    return Record(name, sequence, line)


def _checked(path: Path, number: int, line: str, unknown_as_x: bool) -> str:
    """The letters of a line, or an error that says which of them is none, and what it may be."""
    if unknown_as_x:
        return _OTHER.sub("X", line.upper().removesuffix("*"))
    other = _OTHER.search(line)
    if other is None:
        return line
    letter, column = other.group(), other.start() + 1
    if letter.upper() in RESIDUES:
        why = "is lower-case, which marks masked regions in some files"
        fix = "Write upper-case letters if they shall count"
    elif letter == "*":
        why, fix = "marks a stop codon, which is not a residue", "Remove it"
    elif letter in "-.":
        why, fix = "is a gap of an alignment", "Remove the gaps"
    elif letter == ">":
        why, fix = "is inside a line", "Begin headers on a line of their own"
    else:
        why, fix = f"is not an amino acid; known are {RESIDUES}", "Write X for an unknown residue"
    raise DataError(f"{path}:{number}: letter {letter!r} (column {column}) {why}.", f"{fix}, or give --unknown-as-x.")
