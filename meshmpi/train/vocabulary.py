"""Vocabularies: text to token numbers and back, without losing a byte.

Each also knows how many bytes of text a token stands for, so that a loss in nats per token can be
told exactly in bits per byte.  Knows nothing of corpora on disk, batches or models.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError, suggest

Tokens = npt.NDArray[np.int32]

TOKENIZER = "tokenizer:"
"""Begins the name of a vocabulary that is a tokenizer on disk, or that of a run."""
KINDS = ("bytes", "characters", "bpe:<size>", f"{TOKENIZER}<path>")
_SPECIAL = "\u2581"  # SentencePiece writes it for a space


class Vocabulary(Protocol):
    """What every vocabulary offers.

    Attributes:
        name: What `build_vocabulary` was asked for, such as ``"bpe:8192"``.
        size: Number of different tokens.
    """

    name: str
    size: int

    @property
    def token_bytes(self) -> npt.NDArray[np.int32]:
        """For each token the number of bytes of text it stands for, int32 [size]."""
        ...

    def encode(self, text: str | bytes) -> Tokens:
        """Token numbers of a text, int32 [n].  Texts that end with a line may be encoded apart."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 appear as U+FFFD."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore_vocabulary` needs; strings and numbers only."""
        ...


class ByteVocabulary:
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


class CharacterVocabulary:
    """The characters of a corpus in order of their code points.

    Args:
        characters: Each character once; sorted here.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.name, self.size = "characters", len(self.characters)
        self.token_bytes = np.array([len(c.encode()) for c in self.characters], np.int32)
        self._points = _code_points(self.characters)

    def encode(self, text: str | bytes) -> Tokens:
        points = _code_points(_text(text))
        index = np.searchsorted(self._points, points)
        index[index == self.size] = 0
        unknown = np.flatnonzero(self._points[index] != points)
        if unknown.size:
            raise DataError(
                f"character {chr(points[unknown[0]])!r} is not among the {self.size} characters "
                "of the vocabulary.",
                "Leave it out, or train with vocabulary 'bytes', which takes any text.",
            )
        return index.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.characters[t] for t in tokens)

    def state(self) -> dict[str, Any]:
        return {"kind": "characters", "characters": self.characters}


class SentencePieceVocabulary:
    """Byte-pair encoding by SentencePiece, set up so that decoding returns every byte.

    Args:
        model: A trained model, in SentencePiece's own format.

    Raises:
        DataError: The extra `text` is not installed.
    """

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor: Any = _sentencepiece().SentencePieceProcessor(model_proto=model)
        self.size = int(self._processor.get_piece_size())
        self.name = f"bpe:{self.size}"
        self.token_bytes = np.array([self._bytes_of(t) for t in range(self.size)], np.int32)

    def _bytes_of(self, token: int) -> int:
        if self._processor.is_byte(token):
            return 1
        return len(self._processor.id_to_piece(token).replace(_SPECIAL, " ").encode())

    def encode(self, text: str | bytes) -> Tokens:
        return np.array(self._processor.encode(_text(text)), np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode([int(t) for t in tokens])

    def state(self) -> dict[str, Any]:
        return {"kind": "bpe", "model": base64.b64encode(self._model).decode()}

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> SentencePieceVocabulary:
        """Learns ``size`` tokens from lines of text without their line ends.

        Raises:
            DataError: The extra `text` is missing, or the text is too short for so many tokens.
        """
        sentencepiece, model = _sentencepiece(), io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=model, model_type="bpe",
                vocab_size=size, character_coverage=1.0, byte_fallback=True,
                # the text as it is, so that nothing is lost
                normalization_rule_name="identity", add_dummy_prefix=False,
                remove_extra_whitespaces=False, max_sentence_length=1 << 30,
                unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, minloglevel=2,
                num_threads=1,  # the number is part of the model and of its checksum
            )  # fmt: skip
        except RuntimeError as error:
            raise DataError(
                f"SentencePiece could not learn a vocabulary of {size}: {str(error).strip()}",
                "Ask for another size, or use vocabulary 'bytes'.",
            ) from error
        return cls(model.getvalue())


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            "a vocabulary 'bpe:<size>' needs the package sentencepiece, which is not installed.",
            "Install it with: pip install 'meshmpi[text]'",
        ) from error
    return sentencepiece


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


def _text(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8: byte {text[error.start]:#04x} at {error.start}.",
            "Convert the file, or use vocabulary 'bytes', which takes any text.",
        ) from error


# Making, keeping and using them


def check_vocabulary_name(name: str) -> None:
    """Raises DataError when there is no vocabulary of that name; reads no text."""
    if name.startswith("bpe:"):
        size = name[4:]
        if size.isdigit() and int(size) > 0:
            return
        raise DataError(f"vocabulary '{name}' has no size.", "Write a number: 'bpe:8192'.")
    if name.startswith(TOKENIZER) and len(name) > len(TOKENIZER):
        return
    if name not in KINDS[:2]:
        near = suggest(name, KINDS)
        known = "" if near.startswith("Known") else f" Known names: {', '.join(KINDS)}."
        raise DataError(f"there is no vocabulary '{name}'.", near + known)


def build_vocabulary(name: str, train: Iterable[bytes], held_out: Iterable[bytes]) -> Vocabulary:
    """Makes a vocabulary for a text.

    Args:
        name: "bytes"; "characters" (those of both parts of the text); "bpe:<size>", learnt from
            the training part; or "tokenizer:<path>", a tokenizer.json, a SentencePiece model, the
            folder of a checkpoint or that of a run.
        train: The training text, in pieces that end with a line.
        held_out: The held-out text, likewise.

    Raises:
        DataError: The name is unknown, the text is not UTF-8 or too short, or the extra `text`
            is not installed.
    """
    check_vocabulary_name(name)
    if name == "bytes":
        return ByteVocabulary()
    if name == "characters":
        seen: dict[str, None] = {}
        for part in (train, held_out):
            for piece in part:
                seen.update(dict.fromkeys(_text(piece)))
        return CharacterVocabulary(seen)
    if name.startswith(TOKENIZER):
        return _found(name)
    lines = (line for piece in train for line in _text(piece).split("\n"))
    return SentencePieceVocabulary.train(lines, int(name[4:]))


def vocabulary_key(name: str) -> str:
    """What tells vocabularies apart: the name, and of a tokenizer on disk its content."""
    if not name.startswith(TOKENIZER):
        return name
    content = json.dumps(_found(name).state(), sort_keys=True)
    return f"{name}\n{hashlib.sha256(content.encode()).hexdigest()}"


def _found(name: str) -> Vocabulary:
    from meshmpi.pretrained.model import vocabulary_at  # made of the vocabularies here

    return vocabulary_at(name.removeprefix(TOKENIZER))


def restore_vocabulary(state: dict[str, Any]) -> Vocabulary:
    """The vocabulary whose `state` this is."""
    if state.get("kind") == "bytes":
        return ByteVocabulary()
    if state.get("kind") == "characters":
        return CharacterVocabulary(state["characters"])
    if state.get("kind") == "bpe":
        return SentencePieceVocabulary(base64.b64decode(state["model"]))
    if state.get("kind") == "ended":
        from meshmpi.train.translation.vocabulary import EndedVocabulary  # made of the ones here

        return EndedVocabulary.restore(state)
    if state.get("kind") in ("tokenizer.json", "spiece.model", "letters"):
        from meshmpi.pretrained.tokenizer import restore_tokenizer

        return restore_tokenizer(state)
    raise DataError(
        f"a saved vocabulary is of unknown kind '{state.get('kind')}'.",
        f"Known kinds: {', '.join(KINDS)}.",
    )


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Writes a vocabulary to a JSON file."""
    path.write_text(json.dumps(vocabulary.state(), ensure_ascii=True) + "\n", encoding="utf-8")


def load_vocabulary(path: Path) -> Vocabulary:
    """Reads a vocabulary from a JSON file.

    Raises:
        DataError: The file is missing or is not a vocabulary.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a vocabulary: {error}.", "Delete it; it is remade."
        ) from error
    return restore_vocabulary(state)


def bits_per_byte(nats_per_token: float, tokens: int, text_bytes: int) -> float:
    """A mean loss over some tokens, told per byte of the text that they stand for.

    Args:
        nats_per_token: Mean loss, nats.
        tokens: Number of tokens that the mean is over.
        text_bytes: Bytes of text that these tokens stand for.
    """
    return nats_per_token * tokens / (text_bytes * math.log(2))


def count_bytes(vocabulary: Vocabulary, tokens: Sequence[int] | npt.NDArray[Any]) -> int:
    """Bytes of text that some tokens stand for."""
    return int(vocabulary.token_bytes[np.asarray(tokens)].sum(dtype=np.int64))
