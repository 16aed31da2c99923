"""The interface of every vocabulary, whether it was made here or came with a checkpoint."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError

Tokens = npt.NDArray[np.int32]


class Encoded(NamedTuple):
    """A text as a model expects it."""

    ids: list[int]  # token ids, the special ones around the text included
    special: list[bool]  # for each id whether it was put around the text and stands for none of it
    unknown: list[str]  # parts of the text that have no token


class Vocabulary(Protocol):
    """Tokens and what they mean.  Classes inherit from it to get `encoded`.

    Attributes:
        token_bytes: For each token the number of bytes of text it stands for, int32 [size]; 0 for special
            tokens.  Where a tokenizer changes the text first (lower case, Unicode forms), bytes of the changed text.
        special: Special ids by purpose ("pad", "eos", "mask", ...), as far as they are known.
    """

    name: str  # what it was asked for by, such as ``"bpe:8192"``, or the file it came from
    size: int  # number of different tokens
    token_bytes: npt.NDArray[np.int32]
    special: Mapping[str, int] = MappingProxyType({})
    before: Sequence[int] = ()  # ids that a model expects in front of a text
    after: Sequence[int] = ()  # ids that a model expects behind a text

    @abstractmethod
    def encode(self, text: str | bytes) -> Tokens:
        """Token ids of a text alone, int32 [n].  Texts that end with a line may be encoded one by one.

        Raises:
            DataError: The text is not UTF-8, or the vocabulary cannot express it.
        """
        ...

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, without special ones; bytes that are not UTF-8 appear as U+FFFD."""
        ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `vocabulary.restore_vocabulary` needs: strings and numbers, and the ``kind``."""
        ...

    def encoded(self, text: str) -> Encoded:
        """A text with the special tokens around it, and what of it is unknown."""
        ids = self.encode(text).tolist()
        special = [True] * len(self.before) + [False] * len(ids) + [True] * len(self.after)
        return Encoded([*self.before, *ids, *self.after], special, self.unknown(text))

    def unknown(self, text: str) -> list[str]:
        """Parts of a text that `encode` replaces by an unknown token."""
        return []


def as_text(text: str | bytes) -> str:
    """Text from text or UTF-8; raises DataError for other bytes."""
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8: byte {text[error.start]:#04x} at {error.start}.",
            "Convert the file, or use vocabulary 'bytes', which takes any text.",
        ) from error


def optional_package(name: str, extra: str, what: str) -> ModuleType:
    """An optional package; raises DataError, which says how to install it, where it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{what} needs the package {name}, which is not installed.",
            f"Install it with: pip install 'meshmpi[{extra}]'. Some commands also take --token-ids.",
        ) from error


def bits_per_byte(nats_per_token: float, tokens: int, text_bytes: int) -> float:
    """A mean loss over ``tokens`` tokens (nats) as bits per byte of the ``text_bytes`` bytes they stand for."""
    return nats_per_token * tokens / (text_bytes * math.log(2))


def count_bytes(vocabulary: Vocabulary, tokens: npt.ArrayLike) -> int:
    """Bytes of text that some tokens stand for."""
    return int(vocabulary.token_bytes[np.asarray(tokens)].sum(dtype=np.int64))
