"""Tokenizers that come with checkpoints: text to the ids that the model was trained on.

Each is a vocabulary too (`meshmpi.train.vocabulary.Vocabulary`), for fine-tuning.  Knows files of
tokenizers; no models and no meshes.
"""

from __future__ import annotations

import base64
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError

Tokens = npt.NDArray[np.int32]
FILES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
"""What a folder may hold, the best first."""
_SPACE = "\u2581"  # SentencePiece writes it for a space


class Encoded(NamedTuple):
    """A text in tokens.

    Attributes:
        ids: With the special tokens that the model expects around a text.
        special: For each whether it is one of these, and stands for no text.
        unknown: Parts of the text that the tokenizer has no token for.
    """

    ids: list[int]
    special: list[bool]
    unknown: list[str]


class Tokenizer(ABC):
    """What every tokenizer offers; as a vocabulary it adds no special tokens.

    Attributes:
        name: Says where it came from.
        size: Number of ids.
    """

    name: str
    size: int
    _measured: npt.NDArray[np.int32] | None = None

    @abstractmethod
    def encoded(self, text: str, special: bool = True) -> Encoded:
        """A text in tokens, with special tokens or without."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; special ones are left out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `restore_tokenizer` needs; strings and numbers only."""

    @abstractmethod
    def measured(self) -> npt.NDArray[np.int32]:
        """Bytes of text each token stands for, int32 [size]; special ones stand for none.

        Of tokenizers that change the text first (lower case, Unicode forms) those of the changed
        text.
        """

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """What `measured` returns, measured once."""
        if self._measured is None:
            self._measured = self.measured()
        return self._measured

    def encode(self, text: str | bytes) -> Tokens:
        """Token ids of a text, without special ones.

        Raises:
            DataError: The text is not UTF-8.
        """
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"the text is not UTF-8: byte {text[error.start]:#04x} at {error.start}.",
                    "Convert the file.",
                ) from error
        return np.array(self.encoded(text, special=False).ids, np.int32)


class JsonTokenizer(Tokenizer):
    """A ``tokenizer.json``, by the package tokenizers.

    Args:
        text: Content of the file.
        name: Says where it came from.

    Raises:
        DataError: The extra `pretrained` is not installed, or the file is none.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name, self._text = name, text
        try:
            self._tokenizer: Any = _tokenizers().Tokenizer.from_str(text)
            model: Mapping[str, Any] = json.loads(text).get("model") or {}
        except DataError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{name} is no tokenizer: {error}.", "Download it again.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._unknown = self._unknown_id(model)

    def _unknown_id(self, model: Mapping[str, Any]) -> int | None:
        if model.get("type") == "Unigram" or "unk_id" in model:
            return model.get("unk_id")
        # Tokenizers of bytes name an unknown token that can never occur.
        token = model.get("unk_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encoded(self, text: str, special: bool = True) -> Encoded:
        found = self._tokenizer.encode(text, add_special_tokens=special)
        around = [bool(s) for s in found.special_tokens_mask]
        unknown = [
            text[a:b] for t, (a, b), s in zip(found.ids, found.offsets, around, strict=True)
            if t == self._unknown and not s
        ]  # fmt: skip
        return Encoded(list(found.ids), around, unknown)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens])

    def state(self) -> dict[str, Any]:
        return {"kind": "tokenizer.json", "name": self.name, "text": self._text}

    def measured(self) -> npt.NDArray[np.int32]:
        added = self._tokenizer.get_added_tokens_decoder()
        by_bytes = '"ByteLevel"' in self._text
        sizes = np.zeros(self.size, np.int32)
        for token in range(self.size):
            piece = self._tokenizer.id_to_token(token)
            if piece is None or token in added:
                continue
            sizes[token] = len(piece) if by_bytes else _piece_bytes(piece)
        return sizes


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with the special tokens of the model it belongs to.

    Args:
        model: Content of the file.
        name: Says where it came from.
        before: Ids put before a text.
        after: Ids put behind a text.

    Raises:
        DataError: The extra `text` is not installed, or the file is none.
    """

    def __init__(
        self, model: bytes, name: str, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> None:
        self.name, self._model = name, model
        self._before, self._after = list(before), list(after)
        try:
            self._processor: Any = _sentencepiece().SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"{name} is no SentencePiece model: {error}.", "Download it again."
            ) from error
        self.size = int(self._processor.get_piece_size())

    def encoded(self, text: str, special: bool = True) -> Encoded:
        ids, unknown_id = [int(t) for t in self._processor.encode(text)], self._processor.unk_id()
        # Of an unknown piece this is the text itself.
        pieces = self._processor.EncodeAsPieces(text) if unknown_id in ids else list[str]()
        unknown = [str(p) for p, t in zip(pieces, ids, strict=False) if t == unknown_id]
        before, after = (self._before, self._after) if special else ([], [])
        around = [True] * len(before) + [False] * len(ids) + [True] * len(after)
        return Encoded([*before, *ids, *after], around, unknown)

    def decode(self, tokens: Iterable[int]) -> str:
        kept = [int(t) for t in tokens if t < self.size and not self._processor.is_control(int(t))]
        return self._processor.decode(kept)

    def state(self) -> dict[str, Any]:
        model = base64.b64encode(self._model).decode()
        return {
            "kind": "spiece.model", "name": self.name, "model": model, "before": self._before,
            "after": self._after,
        }  # fmt: skip

    def measured(self) -> npt.NDArray[np.int32]:
        p = self._processor
        return np.array(
            [
                0 if p.is_control(t) or p.is_unknown(t)
                else 1 if p.is_byte(t)
                else _piece_bytes(p.id_to_piece(t))
                for t in range(self.size)
            ],
            np.int32,
        )  # fmt: skip


class LetterTokenizer(Tokenizer):
    """One token a letter, as in ESM's ``vocab.txt``; ``<...>`` are special.

    Args:
        tokens: All tokens in the order of their ids.
        name: Says where it came from.
    """

    def __init__(self, tokens: Sequence[str], name: str) -> None:
        self.name, self._tokens, self.size = name, list(tokens), len(tokens)
        self._ids = {t: i for i, t in enumerate(tokens)}
        lacking = [t for t in ("<cls>", "<eos>", "<unk>") if t not in self._ids]
        if lacking:
            raise DataError(f"{name} has no {', '.join(lacking)}.", "Download it again.")

    def encoded(self, text: str, special: bool = True) -> Encoded:
        letters = [c for c in text if not c.isspace()]
        ids = [self._ids.get(c, self._ids["<unk>"]) for c in letters]
        unknown = [c for c in letters if c not in self._ids]
        if not special:
            return Encoded(ids, [False] * len(ids), unknown)
        around = [True, *[False] * len(ids), True]
        return Encoded([self._ids["<cls>"], *ids, self._ids["<eos>"]], around, unknown)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(t for t in (self._tokens[int(i)] for i in tokens) if len(t) == 1)

    def state(self) -> dict[str, Any]:
        return {"kind": "letters", "name": self.name, "tokens": self._tokens}

    def measured(self) -> npt.NDArray[np.int32]:
        return np.array([int(len(t) == 1) for t in self._tokens], np.int32)


def _piece_bytes(piece: str) -> int:
    """Bytes of text of a piece that marks spaces, continued words or bytes."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace(_SPACE, " ").removeprefix("##").encode())


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "a tokenizer.json needs the package tokenizers, which is not installed.",
            "Install it with: pip install 'meshmpi[pretrained]'; or give --token-ids.",
        ) from error
    return tokenizers


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            "a SentencePiece model needs the package sentencepiece, which is not installed.",
            "Install it with: pip install 'meshmpi[text]'; or give --token-ids.",
        ) from error
    return sentencepiece


# ---- finding and restoring -------------------------------------------------------------------


def open_tokenizer(
    path: str | os.PathLike[str], model: str = "", special: Mapping[str, int] | None = None
) -> Tokenizer:
    """The tokenizer in a folder, or in a file.

    Args:
        path: A folder of a checkpoint, or one of its files.
        model: The architecture's name, which says what a ``vocab.txt`` holds.
        special: Token ids by purpose, which SentencePiece models do not tell.

    Raises:
        DataError: There is none, or a package that reads it is not installed.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).is_file()]
        if not found:
            raise DataError(
                f"{path} has no tokenizer ({', '.join(FILES)}).",
                "Give one with --tokenizer, or numbers with --token-ids.",
            )
        path = found[0]
    try:
        return _opened(path, model, special or {})
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the tokenizer {path} cannot be read: {error}.", "Download it again."
        ) from error


def _opened(path: Path, model: str, special: Mapping[str, int]) -> Tokenizer:
    name = str(path)
    if path.suffix == ".model":
        before = [special["bos"]] if model == "llama" and "bos" in special else []
        t5 = model in ("t5", "switch_transformers")
        after = [special["eos"]] if t5 and "eos" in special else []
        return SentencePieceTokenizer(path.read_bytes(), name, before, after)
    if path.name == "vocab.txt" and model == "esm":
        return LetterTokenizer(path.read_text(encoding="utf-8").split(), name)
    if path.name == "vocab.txt":
        return JsonTokenizer(_word_pieces(path), name)
    if path.name == "vocab.json":
        return JsonTokenizer(_byte_pairs(path), name)
    return JsonTokenizer(path.read_text(encoding="utf-8"), name)


def _word_pieces(path: Path) -> str:
    """BERT's tokenizer, from its list of pieces."""
    _tokenizers()
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

    beside = path.with_name("tokenizer_config.json")
    options = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    lower = bool(options.get("do_lower_case", True))
    return BertWordPieceTokenizer(str(path), lowercase=lower).to_str()


def _byte_pairs(path: Path) -> str:
    """GPT-2's tokenizer, from its pieces and merges."""
    _tokenizers()
    from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

    merges = path.with_name("merges.txt")
    if not merges.is_file():
        raise DataError(f"{path} has no merges.txt beside it.", "Download it as well.")
    return ByteLevelBPETokenizer(str(path), str(merges)).to_str()


def restore_tokenizer(state: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer whose `state` this is.

    Raises:
        DataError: It is of an unknown kind.
    """
    kind = state.get("kind")
    if kind == "tokenizer.json":
        return JsonTokenizer(state["text"], state["name"])
    if kind == "spiece.model":
        model = base64.b64decode(state["model"])
        return SentencePieceTokenizer(model, state["name"], state["before"], state["after"])
    if kind == "letters":
        return LetterTokenizer(state["tokens"], state["name"])
    raise DataError(
        f"a saved tokenizer is of unknown kind '{kind}'.",
        "Use the version of meshmpi that saved it.",
    )
