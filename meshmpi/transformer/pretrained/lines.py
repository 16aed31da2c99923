"""Reads files with one text per line as token ids; errors name the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.transformer.text.base import Encoded, Vocabulary


class Line(NamedTuple):
    """A line in tokens."""

    number: int  # from 1
    tokens: list[int]  # token ids of the text, or of the target of a pair
    special: list[bool]  # for each token whether it was put around the text
    source: list[int]  # token ids of the source of a pair; else empty
    cut: int = 0  # number of tokens left out because the model takes no more


@dataclass(frozen=True)
class Reader:
    """Turns lines into tokens."""

    tokenizer: Vocabulary | None  # None: lines are token ids, separated by spaces
    vocab: int  # ids that the model has
    most: int  # tokens that the model takes, on each side of a pair
    pairs: bool = False  # whether a line is source, tab, target
    truncate: bool = False  # whether lines that are too long are cut, rather than refused
    allow_unknown: bool = False  # whether text without tokens is taken as the unknown token
    start: int | None = None  # put first where it is not there; None: nothing
    special_ids: tuple[int, ...] = ()  # ids that stand for no text, where there is no tokenizer

    def read(self, path: Path) -> list[Line]:
        """All lines of a file; a DataError names the line that cannot be used."""
        try:
            data = plain.contents(path, None)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.", "Give the path of a readable file.") from error
        rows = data.split(b"\n")
        if not rows[-1]:
            rows.pop()
        if not rows:
            raise DataError(f"{path} is empty.", "Give a file with one text a line.")
        return [self.line(row, f"{path}:{k + 1}", k + 1) for k, row in enumerate(rows)]

    def line(self, row: bytes, where: str, number: int = 1) -> Line:
        """One line, without its line end; ``where`` is what messages call it."""
        try:
            text = row.decode().rstrip("\r")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where} is not UTF-8: byte {row[error.start]:#04x} at {error.start + 1}.",
                "Convert the file to UTF-8.",
            ) from error
        if not text.strip():
            raise DataError(f"{where} is empty.", "Remove the line, or write a text there.")
        parts = text.split("\t") if self.pairs else [text]
        if len(parts) != (2 if self.pairs else 1) or not all(p.strip() for p in parts):
            raise DataError(
                f"{where} has {len(parts)} columns{'' if all(p.strip() for p in parts) else ', one of them empty'}.",
                "Write a source, one tab, and a target.",
            )
        source, cut = [], 0
        if self.pairs:
            encoded, cut = self._fitted(self._encoded(parts[0], where), where, "source")
            source = encoded.ids
        encoded, more = self._fitted(self._encoded(parts[-1], where), where, "target")
        return Line(number, encoded.ids, encoded.special, source, cut + more)

    def _encoded(self, text: str, where: str) -> Encoded:
        if self.tokenizer is None:
            words = text.split()
            wrong = next((w for w in words if not (w.isascii() and w.isdigit())), None)
            if wrong is not None:
                raise DataError(
                    f"{where} has {wrong!r}, which is not a token id.",
                    "Write numbers from 0 separated by spaces, or leave out --token-ids.",
                )
            ids = [int(w) for w in words]
            found = Encoded(ids, [t in self.special_ids for t in ids], [])
        else:
            try:
                found = self.tokenizer.encoded(text)
            except DataError as error:
                raise DataError(f"{where}: {error.problem}", error.remedy) from error
        if found.unknown and not self.allow_unknown:
            parts = ", ".join(repr(u) for u in dict.fromkeys(found.unknown[:5]))
            raise DataError(
                f"{where} has {parts}, which the tokenizer {self.tokenizer.name if self.tokenizer else ''} has no"
                " token for.",
                "Remove it, or give --allow-unknown.",
            )
        beyond = next((t for t in found.ids if t >= self.vocab), None)
        if beyond is not None:
            raise DataError(
                f"{where} has token {beyond}, but the model has {self.vocab}, from 0.",
                "Give the tokenizer that belongs to the model.",
            )
        if not found.ids:
            raise DataError(f"{where} has no tokens.", "Remove the line.")
        if self.start is not None and found.ids[0] != self.start:
            found = Encoded([self.start, *found.ids], [True, *found.special], found.unknown)
        return found

    def _fitted(self, found: Encoded, where: str, side: str) -> tuple[Encoded, int]:
        """At most as many tokens as the model takes, and how many were cut."""
        over = len(found.ids) - self.most
        if over <= 0:
            return found, 0
        if not self.truncate:
            what = f"the {side} of {where}" if self.pairs else where
            raise DataError(
                f"{what} has {len(found.ids)} tokens, the model takes {self.most}.",
                "Shorten it, or give --truncate to cut it.",
            )
        # Special tokens at the end stay there.
        tail = 0
        while tail < self.most and found.special[-1 - tail]:
            tail += 1
        keep = self.most - tail
        end = len(found.ids) - tail
        ids, special = found.ids[:keep] + found.ids[end:], found.special[:keep] + found.special[end:]
        return Encoded(ids, special, found.unknown), over
