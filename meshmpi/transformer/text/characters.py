"""Vocabularies of bytes, characters or letters, and vocabularies with an end token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError
from meshmpi.transformer.text.base import Tokens, Vocabulary, as_text

PADDING, END = 0, 1
SPECIALS = 2
"""Number of tokens that an `EndedVocabulary` puts in front of its inner ones."""


class ByteVocabulary(Vocabulary):
    """The 256 bytes: takes any text, needs no corpus."""

    def __init__(self) -> None:
        self.name, self.size = "bytes", 256
        self.token_bytes = np.ones(256, np.int32)

    def encode(self, text: str | bytes) -> Tokens:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(t) for t in tokens).decode(errors="replace")

    def state(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class CharacterVocabulary(Vocabulary):
    """The given characters in order of their code points."""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.name, self.size = "characters", len(self.characters)
        self.token_bytes = np.array([len(c.encode()) for c in self.characters], np.int32)
        self._points = _code_points(self.characters)

    def encode(self, text: str | bytes) -> Tokens:
        points = _code_points(as_text(text))
        index = np.searchsorted(self._points, points)
        index[index == self.size] = 0
        unknown = np.flatnonzero(self._points[index] != points)
        if unknown.size:
            raise DataError(
                f"character {chr(points[unknown[0]])!r} is not among the {self.size} characters of the vocabulary.",
                "Leave it out, or train with vocabulary 'bytes', which takes any text.",
            )
        return index.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[t] for t in tokens)

    def state(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


class LetterVocabulary(Vocabulary):
    """One token for each letter, as in ESM's ``vocab.txt``; ``<...>`` are special; ``name`` is the file."""

    def __init__(self, tokens: Sequence[str], name: str) -> None:
        self.name, self._tokens, self.size = name, list(tokens), len(tokens)
        self._ids = {t: i for i, t in enumerate(tokens)}
        longer = sorted((t for t in self._ids if len(t) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longer), "."]), re.DOTALL)
        lacking = [t for t in ("<cls>", "<eos>", "<unk>") if t not in self._ids]
        if lacking:
            raise DataError(f"{name} has no {', '.join(lacking)}.", "Download it again.")
        self.before, self.after = [self._ids["<cls>"]], [self._ids["<eos>"]]
        self.special = {"mask": self._ids["<mask>"]} if "<mask>" in self._ids else {}
        self.token_bytes = np.array([int(len(t) == 1) for t in tokens], np.int32)

    def _letters(self, text: str) -> list[str]:
        return [c for c in self._pattern.findall(text) if not c.isspace()]

    def encode(self, text: str | bytes) -> Tokens:
        unknown = self._ids["<unk>"]
        return np.array([self._ids.get(c, unknown) for c in self._letters(as_text(text))], np.int32)

    def unknown(self, text: str) -> list[str]:
        return [c for c in self._letters(text) if c not in self._ids]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(t for t in (self._tokens[int(i)] for i in tokens) if len(t) == 1)

    def state(self) -> dict[str, Any]:
        return {"kind": "letters", "name": self.name, "tokens": self._tokens}


class EndedVocabulary(Vocabulary):
    """Token 0 is padding (and the decoder's start), 1 the end; the others are those of ``inner``."""

    special = MappingProxyType({"pad": PADDING, "decoder_start": PADDING, "eos": END})
    after = (END,)

    def __init__(self, inner: Vocabulary) -> None:
        self.inner = inner
        self.name, self.size = inner.name, inner.size + SPECIALS
        self.token_bytes = np.concatenate([np.zeros(SPECIALS, np.int32), inner.token_bytes])
        # With a BPE, a word at the start gets the same tokens as elsewhere.
        self._lead = " " if inner.name.startswith("bpe:") else ""

    def encode(self, text: str | bytes) -> Tokens:
        return self.inner.encode(self._lead + as_text(text)) + np.int32(SPECIALS)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.inner.decode([int(t) - SPECIALS for t in tokens if t >= SPECIALS]).removeprefix(self._lead)

    def state(self) -> dict[str, Any]:
        return {"kind": "ended", "inner": self.inner.state()}
