"""Tokenizers of Hugging Face's package `tokenizers`, with the special tokens of their models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.transformer.text.base import Encoded, Tokens, Vocabulary, as_text, optional_package


class HuggingFaceVocabulary(Vocabulary):
    """A ``tokenizer.json``: its content, and the file that it came from."""

    def __init__(self, text: str, name: str) -> None:
        self.name, self._text = name, text
        package = _package()
        try:
            self._tokenizer: Any = package.Tokenizer.from_str(text)
            model: Mapping[str, Any] = json.loads(text).get("model") or {}
        except BaseException as error:  # the package raises plain Exception, and panics of Rust
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{name} is not a tokenizer: {error}.", "Download it again.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._unknown = self._unknown_id(model)
        self._added = self._tokenizer.get_added_tokens_decoder()
        special = {str(t.content): int(i) for i, t in self._added.items() if t.special}
        self.special = next(({"mask": special[m]} for m in ("[MASK]", "<mask>") if m in special), {})

    def _unknown_id(self, model: Mapping[str, Any]) -> int | None:
        if model.get("type") == "Unigram" or "unk_id" in model:
            return model.get("unk_id")
        # Tokenizers of bytes name an unknown token that can never occur.
        token = model.get("unk_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str | bytes) -> Tokens:
        return np.array(self._tokenizer.encode(as_text(text), add_special_tokens=False).ids, np.int32)

    def encoded(self, text: str) -> Encoded:
        found = self._tokenizer.encode(text)
        special = [bool(s) for s in found.special_tokens_mask]
        rows = zip(found.ids, found.offsets, special, strict=True)
        return Encoded(list(found.ids), special, [text[a:b] for t, (a, b), s in rows if t == self._unknown and not s])

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens])

    def state(self) -> dict[str, Any]:
        return {"kind": "tokenizer.json", "name": self.name, "text": self._text}

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        by_bytes = '"ByteLevel"' in self._text
        sizes = np.zeros(self.size, np.int32)
        for token in range(self.size):
            piece = self._tokenizer.id_to_token(token)
            if piece is not None and token not in self._added:
                sizes[token] = len(piece) if by_bytes else _piece_bytes(piece)
        return sizes


def _piece_bytes(piece: str) -> int:
    """Bytes of text of a piece; pieces mark spaces, continued words and single bytes."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").removeprefix("##").encode())


def word_pieces(path: Path) -> HuggingFaceVocabulary:
    """BERT's tokenizer, from its list of pieces."""
    _package()
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

    file = path.with_name("tokenizer_config.json")
    options = plain.json_table(file) if file.is_file() else {}
    lower = bool(options.get("do_lower_case", True))
    return HuggingFaceVocabulary(BertWordPieceTokenizer(str(path), lowercase=lower).to_str(), str(path))


def byte_pairs(path: Path) -> HuggingFaceVocabulary:
    """GPT-2's tokenizer, from its pieces and the merges next to them."""
    _package()
    from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

    merges = path.with_name("merges.txt")
    if not merges.is_file():
        raise DataError(f"{path} has no merges.txt next to it.", "Download it too.")
    made = ByteLevelBPETokenizer(str(path), str(merges))
    # Texts that contain a special token would otherwise have it cut into pieces.
    named = ["<|endoftext|>"]
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = path.with_name(name)
        values = plain.json_table(file) if file.is_file() else {}
        found = (v.get("content") if isinstance(v, dict) else v for v in values.values())
        named += [v for v in found if isinstance(v, str)]
    made.add_special_tokens([t for t in dict.fromkeys(named) if made.token_to_id(t) is not None])
    return HuggingFaceVocabulary(made.to_str(), str(path))


def _package() -> ModuleType:
    return optional_package("tokenizers", "pretrained", "a tokenizer.json")
