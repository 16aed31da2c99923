"""Vocabularies of sequences that end: any vocabulary with a padding and an end token before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from meshmpi.train.vocabulary import (
    Tokens,
    Vocabulary,
    build_vocabulary,
    restore_vocabulary,
)

PADDING, END = 0, 1
_SPECIALS = 2


class EndedVocabulary:
    """Token 0 is padding (and the decoder's start), 1 the end; the others are those of ``inner``.

    Args:
        inner: The vocabulary of the text.
    """

    def __init__(self, inner: Vocabulary) -> None:
        self.inner = inner
        self.name, self.size = inner.name, inner.size + _SPECIALS
        self.token_bytes = np.concatenate([np.zeros(_SPECIALS, np.int32), inner.token_bytes])
        # Of a BPE a word at the start shall have the tokens that it has elsewhere.
        self._lead = " " if inner.name.startswith("bpe:") else ""

    def encode(self, text: str | bytes) -> Tokens:
        text = text if isinstance(text, str) else text.decode()
        return self.inner.encode(self._lead + text) + np.int32(_SPECIALS)

    def decode(self, tokens: Iterable[int]) -> str:
        text = self.inner.decode([int(t) - _SPECIALS for t in tokens if t >= _SPECIALS])
        return text.removeprefix(self._lead)

    def state(self) -> dict[str, Any]:
        return {"kind": "ended", "inner": self.inner.state()}

    @classmethod
    def build(cls, name: str, lines: Iterable[str]) -> EndedVocabulary:
        """One vocabulary for all lines, sources and targets alike.

        Args:
            name: As `build_vocabulary`; the size of "bpe:<size>" counts the two tokens more.
            lines: Sentences.
        """
        if name.startswith("bpe:") and name[4:].isdigit() and int(name[4:]) > _SPECIALS:
            name = f"bpe:{int(name[4:]) - _SPECIALS}"
            lines = (f" {line}" for line in lines)
        pieces = [f"{line}\n".encode() for line in lines]
        return cls(build_vocabulary(name, pieces, []))

    @classmethod
    def restore(cls, state: dict[str, Any]) -> EndedVocabulary:
        """The vocabulary whose `state` this is."""
        return cls(restore_vocabulary(state["inner"]))
