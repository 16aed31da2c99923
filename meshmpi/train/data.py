"""Token files and the batches cut from them; a rank reads only the block that it holds.

Which tokens a batch holds depends on (seed, step, row) alone: to resume, the step number is
enough, and every layout sees the same data.  Knows nothing of meshes, models or MPI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.errors import DataError
from meshmpi.train.cache import cache_folder, make_folder
from meshmpi.train.corpora import Corpus, open_corpus
from meshmpi.train.vocabulary import (
    Vocabulary,
    build_vocabulary,
    check_vocabulary_name,
    count_bytes,
    load_vocabulary,
    save_vocabulary,
    vocabulary_key,
)

_FORMAT = "1"  # part of every name in the cache: raise it when the files change
Range = tuple[int, int]
Block = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """A corpus in tokens, mapped from files.

    Attributes:
        vocabulary: What the tokens mean.
        train: Tokens of the training part, a read-only map.
        held_out: Tokens of the held-out part, likewise.
        digest: Checksum of all tokens and the vocabulary: equal digests, equal training data.
    """

    vocabulary: Vocabulary
    train: npt.NDArray[Any]
    held_out: npt.NDArray[Any]
    digest: str


def prepare(
    corpus: str = "tinyshakespeare",
    vocabulary: str = "characters",
    *,
    held_out_fraction: float = 0.1,
) -> Dataset:
    """Fetches a corpus, builds its vocabulary and writes its tokens, unless that has been done.

    All ranks may call this at once: one on each file system does the work, the others wait for it.

    Args:
        corpus: A name or a path, as in `corpora.open_corpus`.
        vocabulary: A name, as in `vocabulary.build_vocabulary`.
        held_out_fraction: As in `corpora.open_corpus`.

    Raises:
        DataError: The corpus or the vocabulary cannot be had.
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
    vocabulary = build_vocabulary(name, text.train_pieces(), text.held_out_pieces())
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


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and int32 that holds every token."""
    return np.dtype(
        np.uint8 if vocabulary_size <= 1 << 8
        else np.uint16 if vocabulary_size <= 1 << 16
        else np.int32
    )  # fmt: skip


def load_dataset(folder: Path) -> Dataset:
    """Maps the token files that `prepare` wrote.

    Raises:
        DataError: A file is missing, or shorter or longer than it was.
    """
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        dtype = np.dtype(about["dtype"])
        parts = [
            _map(folder / f"{p}.bin", dtype, about["tokens"][p]) for p in ("train", "held_out")
        ]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the token files in {folder} are damaged: {error}.", "Delete the folder; it is remade."
        ) from error
    vocabulary = load_vocabulary(folder / "vocabulary.json")
    return Dataset(vocabulary, parts[0], parts[1], about["digest"])


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    found = path.stat().st_size
    if found != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {found} bytes, expected {count * dtype.itemsize}")
    return np.memmap(path, dtype, mode="r", shape=(count,))


class _Windows:
    """Batches of windows of ``length`` tokens, each with the tokens one further as targets."""

    def __init__(self, tokens: npt.NDArray[Any], batch: int, length: int, what: str) -> None:
        if batch < 1 or length < 1:
            raise DataError(
                f"cannot cut batches of {batch} windows of {length} tokens.",
                "Both must be at least 1.",
            )
        if len(tokens) < length + 1:
            raise DataError(
                f"the {what} text has {len(tokens)} tokens; a window of {length} and its targets "
                f"need {length + 1}.",
                "Use a longer text or a shorter length.",
            )
        self.tokens, self.batch, self.length = tokens, batch, length

    def _cut(self, offsets: Iterable[int], columns: Range) -> tuple[Block, Block]:
        start, stop = columns
        offsets = list(offsets)
        both = np.empty((len(offsets), stop - start + 1), np.int32)
        for row, offset in zip(both, offsets, strict=True):
            row[:] = self.tokens[offset + start : offset + stop + 1]
        return both[:, :-1], both[:, 1:]

    def _block(self, rows: Range | None, columns: Range | None) -> tuple[Range, Range]:
        return _within("rows", rows, self.batch), _within("columns", columns, self.length)


def _within(what: str, wanted: Range | None, size: int) -> Range:
    start, stop = (0, size) if wanted is None else wanted
    if not 0 <= start <= stop <= size:
        raise DataError(
            f"{what} {start}..{stop} of a batch with {size}.", "Ask for a range inside the batch."
        )
    return start, stop


class TokenStream(_Windows):
    """Training batches: windows at random places of a text, by (seed, step, row).

    Args:
        tokens: The text, such as `Dataset.train`.
        batch: Windows per batch, of all ranks together.
        length: Tokens per window.
        seed: Any integer.
    """

    def __init__(self, tokens: npt.NDArray[Any], batch: int, length: int, seed: int = 0) -> None:
        super().__init__(tokens, batch, length, "training")
        self.seed = seed

    def block(
        self, step: int, rows: Range | None = None, columns: Range | None = None
    ) -> tuple[Block, Block]:
        """The part of a batch that one rank holds; no other tokens are read.

        Args:
            step: Number of the step, from 0.
            rows: First window and the one after the last; None for all.
            columns: First place in the windows and the one after the last; None for all.

        Returns:
            Tokens and targets, both int32 [rows, columns]; targets are one token further.
        """
        rows, columns = self._block(rows, columns)
        return self._cut(self.offsets(step, *rows), columns)

    def offsets(self, step: int, start: int, stop: int) -> list[int]:
        """Where the windows of rows ``start`` to ``stop`` of a step begin in the text."""
        # Row r takes the r-th number of a generator of its own per (seed, step).  The product's
        # high half maps 64 random bits to a place with a bias below 2**-30 for any real text.
        mask = (1 << 64) - 1
        key = np.array([self.seed & mask, step & mask], np.uint64)
        places = len(self.tokens) - self.length
        numbers = np.random.Philox(key=key).random_raw(stop)[start:]
        return [int(number) * places >> 64 for number in numbers]


class HeldOutWindows(_Windows):
    """Evaluation batches: windows that follow each other without gap or overlap, in order.

    The windows that do not fill a last batch are left out, and are not counted either.

    Args:
        tokens: The text, such as `Dataset.held_out`.
        batch: Windows per batch, of all ranks together.
        length: Tokens per window.
        limit: The most batches to make; None for as many as there are.

    Attributes:
        batches: Number of batches.
        windows: Number of windows in them.
        predicted: Number of tokens predicted in them: every window predicts ``length``.
    """

    def __init__(
        self, tokens: npt.NDArray[Any], batch: int, length: int, limit: int | None = None
    ) -> None:
        super().__init__(tokens, batch, length, "held-out")
        there_are = (len(tokens) - 1) // length
        if there_are < batch:
            raise DataError(
                f"the held-out text has {there_are} windows of {length} tokens, fewer than a "
                f"batch of {batch}.",
                f"Evaluate in batches of at most {there_are}, or hold out more text.",
            )
        self.batches = there_are // batch if limit is None else min(limit, there_are // batch)
        self.windows = self.batches * batch
        self.predicted = self.windows * length

    def block(
        self, index: int, rows: Range | None = None, columns: Range | None = None
    ) -> tuple[Block, Block]:
        """The part of batch ``index`` that one rank holds; as `TokenStream.block`."""
        if not 0 <= index < self.batches:
            raise DataError(
                f"there is no held-out batch {index}.", f"There are {self.batches}, from 0."
            )
        rows, columns = self._block(rows, columns)
        first = index * self.batch
        return self._cut((self.length * (first + r) for r in range(*rows)), columns)

    def text_bytes(self, vocabulary: Vocabulary) -> int:
        """Bytes of text that the predicted tokens stand for, for `vocabulary.bits_per_byte`."""
        return count_bytes(vocabulary, self.tokens[1 : self.predicted + 1])
