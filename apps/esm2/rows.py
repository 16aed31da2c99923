"""Sequences as rows of tokens of few different lengths, in batches.

Every length has a program of its own, so lengths are rounded up to one of a few buckets, at most a
quarter more than needed.  Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from apps.esm2.alphabet import CLS, EOS, PAD, numbers
from apps.esm2.fasta import Record
from meshmpi.errors import DataError

LEAST = 16
"""Tokens of the shortest bucket."""
MARKS = 2
"""Tokens of begin and end around the residues."""


class Window(NamedTuple):
    """A part of a sequence that is one row.

    Attributes:
        sequence: Its number.
        tokens: int32, marks included where the sequence begins or ends.
        first: Residue (from 0) that the first token stands for; -1 is the mark of begin.
        kept: First residue whose result is taken from this window, and the one after the last.
    """

    sequence: int
    tokens: np.ndarray
    first: int
    kept: tuple[int, int]

    def columns(self) -> slice:
        """Where the kept residues stand in the row."""
        return slice(self.kept[0] - self.first, self.kept[1] - self.first)


class Batch(NamedTuple):
    """Rows of one bucket.

    Attributes:
        tokens: int32 [batch, length], padded.
        rows: Number of what each row is; the rows behind it are padding.
    """

    tokens: np.ndarray
    rows: list[int]


def windows(records: Sequence[Record], longest: int, window: int = 0, path: str = "the file") -> list[Window]:
    """The rows of all sequences.

    Args:
        records: The sequences.
        longest: The most tokens of a row, marks included.
        window: Residues of a window into which longer sequences are cut, each beginning in the
            middle of the one before; 0: longer sequences are errors.
        path: Of the file, for messages.

    Raises:
        DataError: A sequence is too long, or the window is.
    """
    if window and not 2 <= window <= longest - MARKS:
        raise DataError(
            f"--window is {window} residues, but a row has at most {longest - MARKS} beside its marks.",
            f"Give 2 to {longest - MARKS}.",
        )
    found = []
    for number, record in enumerate(records):
        n = len(record.sequence)
        row = np.concatenate([[CLS], numbers(record.sequence), [EOS]]).astype(np.int32)
        if n + MARKS <= longest:
            found.append(Window(number, row, -1, (0, n)))
        elif not window:
            raise DataError(
                f"{path}:{record.line}: record '{record.name}' has {n:,} residues, but at most"
                f" {longest - MARKS:,} go into a row.",
                f"Give --window {longest - MARKS} to cut longer ones into windows, or --longest.",
            )
        else:
            found += _cut(number, row, n, window)
    return found


def _cut(number: int, row: np.ndarray, n: int, window: int) -> Iterator[Window]:
    """Windows of a long sequence; a residue's result is that of the window in which it is most
    central.
    """
    half = window // 2
    starts = list(range(0, n - window, half)) + [n - window]
    ends = [(a + b + window) // 2 for a, b in pairwise(starts)]
    kept = [0, *ends, n]
    for k, start in enumerate(starts):
        first, last = start, start + window
        if start == 0:
            first = -1
        if last == n:
            last += 1
        yield Window(number, row[first + 1 : last + 1], first, (kept[k], kept[k + 1]))


def bucket(length: int) -> int:
    """The smallest bucket for a row: 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..."""
    if length <= LEAST:
        return LEAST
    step = 1 << max(2, (length - 1).bit_length() - 3)
    return -(-length // step) * step


def batches(
    lengths: Sequence[int], make: Callable[[int], np.ndarray], tokens: int, multiple: int = 1
) -> Iterator[Batch]:
    """All rows in batches, the longest first, so that memory for all is taken at once.

    Args:
        lengths: Tokens of each row.
        make: Number of a row -> its tokens.
        tokens: Of a batch, about, padding included.
        multiple: The number of rows of a batch is a multiple of this, those of padding included.
    """
    order = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    sizes = {k: bucket(lengths[k]) for k in order}
    at = 0
    while at < len(order):
        length = sizes[order[at]]
        same = sum(1 for k in order[at:] if sizes[k] == length)
        most = -(-max(1, tokens // length) // multiple) * multiple
        # As many batches as needed, of even size: the last shall not be padding for the most part.
        batch = -(-same // -(-same // most))
        batch = -(-batch // multiple) * multiple
        for start in range(at, at + same, batch):
            rows = order[start : min(start + batch, at + same)]
            out = np.full((batch, length), PAD, np.int32)
            out[len(rows) :, 0] = CLS  # a row of padding alone has no mean
            for line, k in zip(out, rows, strict=False):
                line[: lengths[k]] = make(k)
            yield Batch(out, rows)
        at += same
