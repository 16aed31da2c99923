"""Sequences of tokens of any length as rows of a fixed one: crops to train on, windows to evaluate.

A batch is a function of (seed, step, row), so every rank makes its own block of it and all layouts
see the same numbers.  Knows nothing of what tokens mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from meshmpi.dims import Range
from meshmpi.errors import DataError

_MASK64 = (1 << 64) - 1


def row_numbers(seed: int, step: int, row: int, count: int) -> np.ndarray:
    """uint64 [count]: random numbers that depend on (seed, step, row) only."""
    key = np.array([seed & _MASK64, step & _MASK64], np.uint64)
    return np.random.Philox(key=key, counter=[0, row, 0, 0]).random_raw(count)


def below(numbers: np.ndarray, limit: int) -> np.ndarray:
    """Random 64-bit numbers as integers in 0 ... limit - 1; the bias is below limit / 2**32."""
    return ((numbers >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


class Sequences:
    """Rows of tokens, one after the other in one array.

    Args:
        rows: Each a one-dimensional array of token numbers, not empty.

    Attributes:
        tokens: All of them, int32.
        starts: Where each sequence begins, and the end of the last; int64 [count + 1].
    """

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        empty = next((k for k, r in enumerate(rows) if not len(r)), None)
        if empty is not None or not len(rows):
            what = "there is no sequence" if empty is None else f"sequence {empty} is empty"
            raise DataError(f"{what} among {len(rows)}.", "Give sequences with tokens.")
        self.tokens = np.concatenate([np.asarray(r, np.int32) for r in rows])
        self.starts = np.cumsum([0, *(len(r) for r in rows)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """Checksum of all tokens and of where sequences begin."""
        found = hashlib.sha256(self.tokens.tobytes())
        found.update(self.starts.tobytes())
        return found.hexdigest()


class Crops:
    """Training rows: a sequence is drawn with a chance by its length, and of a long one a part.

    Args:
        sequences: To draw from.
        batch: Rows of a batch, of all ranks together.
        length: Tokens of a row; what a shorter sequence leaves free is padding.
        padding_id: Token of padding.
        seed: Any integer.
    """

    def __init__(self, sequences: Sequences, batch: int, length: int, padding_id: int, seed: int = 0) -> None:
        self.sequences, self.batch, self.length = sequences, batch, length
        self.padding_id, self.seed = padding_id, seed

    def block(self, step: int, rows: Range | None = None) -> np.ndarray:
        """int32 [rows, length]: some rows of the batch of a step; no other tokens are read."""
        first, last = rows or (0, self.batch)
        out = np.full((last - first, self.length), self.padding_id, np.int32)
        starts, tokens = self.sequences.starts, self.sequences.tokens
        for k in range(first, last):
            numbers = row_numbers(self.seed, step, k, 2)
            place = int(below(numbers[:1], len(tokens))[0])
            chosen = int(np.searchsorted(starts, place, "right")) - 1
            start, stop = int(starts[chosen]), int(starts[chosen + 1])
            spare = stop - start - self.length
            if spare > 0:
                start += int(below(numbers[1:], spare + 1)[0])
            n = min(self.length, stop - start)
            out[k - first, :n] = tokens[start : start + n]
        return out

    def padding_share(self) -> float:
        """Mean share of padding in a row."""
        lengths = self.sequences.lengths
        free = np.maximum(0, self.length - lengths) / self.length
        return float((free * lengths).sum() / lengths.sum())


class Windows:
    """Evaluation rows: all sequences, cut into windows without gap or overlap, in order.

    Args:
        sequences: To evaluate.
        batch: Rows of a batch.
        length: Tokens of a row.
        padding_id: Fills rows, and the last batch.
        limit: The most windows to take, evenly from all; 0: all of them.

    Attributes:
        count: Number of windows.
        batches: Number of batches.
    """

    def __init__(self, sequences: Sequences, batch: int, length: int, padding_id: int, limit: int = 0) -> None:
        self.sequences, self.batch, self.length = sequences, batch, length
        self.padding_id = padding_id
        spans = [
            (start, min(start + length, int(stop)))
            for begin, stop in zip(sequences.starts[:-1], sequences.starts[1:], strict=True)
            for start in range(int(begin), int(stop), length)
        ]
        if limit and limit < len(spans):
            spans = [spans[k * len(spans) // limit] for k in range(limit)]
        self.spans = spans
        self.count, self.batches = len(spans), -(-len(spans) // batch)

    def block(self, index: int, rows: Range | None = None) -> np.ndarray:
        """int32 [rows, length]: some rows of batch ``index``."""
        first, last = rows or (0, self.batch)
        out = np.full((last - first, self.length), self.padding_id, np.int32)
        at = index * self.batch
        for row, (start, stop) in zip(out, self.spans[at + first : at + last], strict=False):
            row[: stop - start] = self.sequences.tokens[start:stop]
        return out
