"""Token files and the batches from them; a rank reads only the block that it holds.

A batch depends only on (seed, step, row): the step number is enough to resume, and every layout sees the same data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.dims import Range
from meshmpi.errors import DataError
from meshmpi.files.cache import cache_folder, make_folder
from meshmpi.runtime.feeding import Held
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.text.vocabulary import (
    build_vocabulary,
    check_vocabulary_name,
    learnt_size,
    restore_vocabulary,
    save_vocabulary,
    vocabulary_key,
)
from meshmpi.transformer.training.corpora import Corpus, open_corpus
from meshmpi.transformer.training.sealed import CheckedArray, Sealed, seal

LEARNT_BYTES = 128 << 20
"""Text of which a vocabulary ``bpe:<size>`` is learnt; SentencePiece takes about 8 times as much memory."""
_FORMAT = "2"  # part of every name in the cache: raise it when the files change
_MASK64 = (1 << 64) - 1
Block = npt.NDArray[np.int32]
Tokens = npt.NDArray[Any] | CheckedArray


@dataclass(frozen=True)
class Dataset:
    """A corpus in tokens, mapped from files that are checked as they are touched."""

    vocabulary: Vocabulary
    train: CheckedArray
    held_out: CheckedArray
    digest: str  # of all tokens and the vocabulary: equal digests, equal training data


def prepare(
    corpus: str = "tinyshakespeare", vocabulary: str = "characters", *, held_out_fraction: float = 0.1
) -> Dataset:
    """Builds the vocabulary of a corpus and writes its tokens, unless that has been done.

    All ranks may call this at once: one on each file system does the work, the others wait for it.  The arguments are
    those of `corpora.open_corpus` and `vocabulary.build_vocabulary`.

    Raises:
        DataError: The corpus or the vocabulary is not available.
    """
    check_vocabulary_name(vocabulary)
    text = open_corpus(corpus, held_out_fraction)
    key = "\n".join((_FORMAT, text.key, str(text.train_bytes), vocabulary_key(vocabulary)))
    stem = "".join(c if c.isalnum() else "-" for c in f"{Path(corpus).stem}-{vocabulary}")
    name = f"{stem[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = cache_folder("tokens") / name
    make_folder(folder, lambda beside: _write_tokens(text, vocabulary, beside))
    return load_dataset(folder)


def _write_tokens(text: Corpus, name: str, folder: Path) -> None:
    train = text.train_pieces()
    if learnt_size(name):  # takes memory in proportion to the text: of a long one every n-th piece tells the tokens
        train = itertools.islice(text.train_pieces(1 << 20), 0, None, -(-text.train_bytes // LEARNT_BYTES))
    vocabulary = build_vocabulary(name, train, text.held_out_pieces())
    save_vocabulary(vocabulary, folder / "vocabulary.json")
    dtype = token_dtype(vocabulary.size)
    digest = hashlib.sha256((folder / "vocabulary.json").read_bytes())
    counts: dict[str, int] = {}
    for part, pieces in (("train", text.train_pieces()), ("held_out", text.held_out_pieces())):
        counts[part] = 0
        with open(folder / f"{part}.bin", "wb") as file:
            for piece in pieces:
                tokens = vocabulary.encode(piece)
                data = tokens.astype(dtype).tobytes()
                digest.update(data)
                file.write(data)
                counts[part] += tokens.size
    about = {"dtype": dtype.name, "tokens": counts, "digest": digest.hexdigest()}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    seal(folder)


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and int32 that holds every token."""
    return np.dtype(np.uint8 if vocabulary_size <= 1 << 8 else np.uint16 if vocabulary_size <= 1 << 16 else np.int32)


def load_dataset(folder: Path) -> Dataset:
    """Maps the token files that `prepare` wrote."""
    sealed = Sealed(folder)
    about = json.loads(sealed.read("about.json"))
    vocabulary = restore_vocabulary(json.loads(sealed.read("vocabulary.json")))
    train, held_out = (sealed.array(f"{p}.bin", about["dtype"]) for p in ("train", "held_out"))
    return Dataset(vocabulary, train, held_out, about["digest"])


class TokenStream:
    """Training batches: ``batch`` windows of ``length`` tokens at random places of a text, by (seed, step, row).

    Raises:
        DataError: A window and its targets are longer than the text.
    """

    def __init__(self, tokens: Tokens, batch: int, length: int, seed: int = 0) -> None:
        if batch < 1 or length < 1:
            raise DataError(f"cannot cut batches of {batch} windows of {length} tokens.", "Both must be at least 1.")
        if len(tokens) < length + 1:
            raise DataError(
                f"the training text has {len(tokens)} tokens; a window of {length} and its targets need {length + 1}.",
                "Use a longer text or a shorter length.",
            )
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed

    def feeds(self, step: int, held: Held) -> dict[str, Block]:
        """The feeds "tokens" and "targets" of a step, as far as this rank holds them."""
        return dict(zip(("tokens", "targets"), self.block(step, *held["tokens"] or ()), strict=True))

    def block(self, step: int, rows: Range | None = None, columns: Range | None = None) -> tuple[Block, Block]:
        """Tokens and targets (one further), int32 [rows, columns], of the batch of a step; it reads no others."""
        offsets = self.offsets(step, *_within("rows", rows, self.batch))
        start, stop = _within("columns", columns, self.length)
        both = np.empty((len(offsets), stop - start + 1), np.int32)
        for row, offset in zip(both, offsets, strict=True):
            row[:] = self.tokens[offset + start : offset + stop + 1]
        return both[:, :-1], both[:, 1:]

    def offsets(self, step: int, start: int, stop: int) -> list[int]:
        """Where the windows of rows ``start`` to ``stop`` of a step begin in the text."""
        # Row r takes the r-th number of the generator of its (seed, step).  The product's
        # high half maps 64 random bits to a place with a bias below 2**-30 for any real text.
        places = len(self.tokens) - self.length
        generator = np.random.Philox(key=np.array([self.seed & _MASK64, step & _MASK64], np.uint64))
        return [int(n) * places >> 64 for n in generator.random_raw(stop)[start:]]


def _within(what: str, wanted: Range | None, size: int) -> Range:
    start, stop = (0, size) if wanted is None else wanted
    if not 0 <= start <= stop <= size:
        raise DataError(f"{what} {start}..{stop} of a batch with {size}.", "Ask for a range inside the batch.")
    return start, stop
