"""SentencePiece: byte-pair encodings learned from a corpus, and models that come with checkpoints."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from meshmpi.errors import DataError
from meshmpi.transformer.text.base import Tokens, Vocabulary, as_text, optional_package

_SPACE = "\u2581"  # SentencePiece writes it for a space
_WORDS = re.compile(r"\n| *[^ \n]+| +")
"""Parts of a text across which no token goes of a vocabulary that was learnt here."""
MOST_WORDS = 1 << 19
"""Parts whose tokens are kept: a text has few different ones, most of them often."""


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model.

    Args:
        model: Content of the file.
        name: The file it came from; empty: one of `train`, which loses no byte of a text.
        before: Ids in front of a text, as `Vocabulary`.
        after: Ids behind a text.
    """

    def __init__(self, model: bytes, name: str = "", before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self._model, self._from_file = model, bool(name)
        self.before, self.after = list(before), list(after)
        try:
            p = self._processor = _package().SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{name} is not a SentencePiece model: {error}.", "Download it again.") from error
        self.size = int(p.get_piece_size())
        self.name = name or f"bpe:{self.size}"
        self.token_bytes = np.array([self._bytes_of(t) for t in range(self.size)], np.int32)
        self._known: dict[str, list[int]] = {}
        # T5's extra ids stand behind the pieces of the file.
        self._refused = [*(p.id_to_piece(t) for t in range(self.size) if p.is_control(t)), "<extra_id_"] if name else []

    def _bytes_of(self, token: int) -> int:
        p = self._processor
        if p.is_control(token) or p.is_unknown(token):
            return 0
        return 1 if p.is_byte(token) else len(p.id_to_piece(token).replace(_SPACE, " ").encode())

    def encode(self, text: str | bytes) -> Tokens:
        text = as_text(text)
        if found := next((piece for piece in self._refused if piece in text), None):
            raise DataError(
                f"the text has {found!r}, a special token, which {self.name} would cut into pieces.",
                "Put tokenizer.json, which knows it, next to it, or give --token-ids.",
            )
        if self._from_file:
            return np.array(self._processor.encode(text), np.int32)
        words, known = _WORDS.findall(text), self._known
        missing = [word for word in dict.fromkeys(words) if word not in known]
        if len(known) + len(missing) > MOST_WORDS:
            known.clear()
            missing = list(dict.fromkeys(words))
        known.update(zip(missing, self._processor.encode(missing), strict=True))
        return np.fromiter(itertools.chain.from_iterable(map(known.__getitem__, words)), np.int32)

    def unknown(self, text: str) -> list[str]:
        p = self._processor
        # The piece of an unknown token is the text itself.
        return [str(s) for s, t in zip(p.EncodeAsPieces(text), p.encode(text), strict=False) if t == p.unk_id()]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode(
            [int(t) for t in tokens if t < self.size and not self._processor.is_control(int(t))]
        )

    def state(self) -> dict[str, Any]:
        model = base64.b64encode(self._model).decode()
        if not self._from_file:
            return {"kind": "bpe", "model": model}
        return {"kind": "spiece.model", "name": self.name, "model": model, "before": self.before, "after": self.after}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> SentencePieceVocabulary:
        """The vocabulary of a `state`."""
        around = (state.get(key, ()) for key in ("before", "after"))
        return cls(base64.b64decode(state["model"]), state.get("name", ""), *around)

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> SentencePieceVocabulary:
        """Learns ``size`` tokens from lines of text without their line ends; DataError for too short a text."""
        sentencepiece, model = _package(), io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                character_coverage=1.0,
                byte_fallback=True,
                # the text as it is, so that nothing is lost
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                max_sentence_length=1 << 30,
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                minloglevel=2,
                num_threads=1,  # the number is part of the model and of its checksum
            )
        except RuntimeError as error:
            raise DataError(
                f"SentencePiece could not learn a vocabulary of {size}: {str(error).strip()}",
                "Ask for another size, or use vocabulary 'bytes'.",
            ) from error
        return cls(model.getvalue())


def _package() -> ModuleType:
    return optional_package("sentencepiece", "text", "a SentencePiece model or a vocabulary 'bpe:<size>'")
