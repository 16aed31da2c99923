"""Vocabularies of sequences that end: any vocabulary with a padding and an end token in front of its own."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np

from meshmpi.transformer.text.base import Tokens, Vocabulary, as_text

PADDING, END = 0, 1
SPECIALS = 2
"""Number of tokens in front of those of the inner vocabulary."""


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
