"""Packs several pairs into one row, to reduce padding, and makes the arrays of these rows.

A row has room for ``source_length`` tokens of sources and ``length`` of targets. The rows are made once, determined
by a seed; a rank reads the rows that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshmpi.dims import Range
from meshmpi.runtime.feeding import Held
from meshmpi.transformer.training.sealed import CheckedArray

OPEN_ROWS = 256
"""Number of rows that a pair is tried in; more rows waste fewer places and take longer.  Measured on 80,000 pairs of
22 + 26 tokens on average, in rows of 84 + 96: 6 % of the positions are padding, in a second."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenPairs:
    """Sequences of tokens: sources at even numbers, targets at odd ones, each with its end token."""

    tokens: npt.NDArray[np.integer] | CheckedArray  # all of them, one after the other
    starts: Numbers  # where each begins, and the end of the last: int64 [2 * pairs + 1]

    def __len__(self) -> int:
        return len(self.starts) // 2

    @property
    def lengths(self) -> Numbers:
        """Lengths of source and target, [pairs, 2]."""
        return np.diff(self.starts).reshape(-1, 2)


@dataclass(frozen=True)
class Rows:
    """Which pairs are in which row."""

    order: Numbers  # numbers of pairs, row after row
    starts: Numbers  # where each row begins in ``order``, and the end: [rows + 1]
    targets: Numbers  # target tokens of each row
    sources: Numbers  # source tokens of each row
    left_out: int  # pairs that are longer than a row

    def __len__(self) -> int:
        return len(self.starts) - 1


def pack(pairs: TokenPairs, source_length: int, length: int, order: Numbers, packed: bool) -> Rows:
    """Puts pairs into rows, each into the first open row that has room for both sides.

    Args:
        pairs: The pairs.
        source_length: Tokens of sources that fit into a row.
        length: Tokens of targets that fit.
        order: Numbers of the pairs, in the order in which they are placed.
        packed: Whether a row may hold several.
    """
    lengths = pairs.lengths
    fits = (lengths[order] <= (source_length, length)).all(axis=1)
    placed = order[fits]
    row_of = np.arange(len(placed))
    if packed:
        row_of = _first_fit(lengths[placed], np.array([source_length, length]))
    count = int(row_of.max(initial=-1)) + 1
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=count), out=starts[1:])
    sums = [np.bincount(row_of, lengths[placed, side], count).astype(np.int64) for side in (0, 1)]
    by_row = placed[np.argsort(row_of, kind="stable")]
    return Rows(by_row, starts, sums[1], sums[0], int((~fits).sum()))


def _first_fit(lengths: Numbers, room: Numbers) -> Numbers:
    """The row of each pair; at most OPEN_ROWS are open at once, the fullest is closed for a new."""
    left = np.zeros((OPEN_ROWS, 2), np.int64)
    names = np.full(OPEN_ROWS, -1)
    rows = np.empty(len(lengths), np.int64)
    count = 0
    for k, wanted in enumerate(lengths):
        possible = (left >= wanted).all(axis=1)
        place = int(possible.argmax())
        if not possible[place]:
            place = int(left.min(axis=1).argmin())
            left[place], names[place] = room, count
            count += 1
        left[place] -= wanted
        rows[k] = names[place]
    return rows


class PackedRows:
    """The arrays of packed rows, which have room for ``source_length`` and ``length`` tokens."""

    def __init__(self, pairs: TokenPairs, rows: Rows, source_length: int, length: int) -> None:
        self.pairs, self.rows = pairs, rows
        self.source_length, self.length = source_length, length

    @property
    def padding_share(self) -> float:
        """Share of the places of all rows that hold no token."""
        places = len(self.rows) * (self.source_length + self.length)
        used = int(self.rows.targets.sum() + self.rows.sources.sum())
        return 1.0 - used / places if places else 0.0

    def block(self, numbers: Numbers, held: Held, prefix: str, weight: float) -> dict[str, np.ndarray]:
        """The blocks of a batch that a rank holds.

        Args:
            numbers: The rows of the batch; -1: an empty row.
            held: (start, stop) along each dim that this rank holds, by feed; None: the whole.
            prefix: Stands before the names of all feeds.
            weight: Weight of every target.
        """
        made: dict[Range, dict[str, np.ndarray]] = {}
        found = {}
        for name, ranges in held.items():
            rows, columns = ranges or ((0, len(numbers)), (0, None))
            if rows not in made:
                made[rows] = self._arrays(numbers[slice(*rows)], weight)
            found[name] = made[rows][name.removeprefix(prefix)][:, slice(*columns)]
        return found

    def _arrays(self, numbers: Numbers, weight: float) -> dict[str, np.ndarray]:
        """All arrays of some rows, whole."""
        real = np.flatnonzero(numbers >= 0)
        first, last = self.rows.starts[numbers[real]], self.rows.starts[numbers[real] + 1]
        row_of = np.repeat(real, last - first)
        number = _counting(last - first)  # of a pair in its row, from 0
        pairs = self.rows.order[np.repeat(first, last - first) + number]
        out: dict[str, np.ndarray] = {}
        for side, width in ((0, self.source_length), (1, self.length)):
            start, stop = (self.pairs.starts[2 * pairs + side + k] for k in (0, 1))
            lengths = stop - start
            before = np.cumsum(lengths) - lengths  # tokens of all pairs before
            firsts = np.maximum.accumulate(np.where(number == 0, before, 0))  # before the pair's row
            within = _counting(lengths)
            places = np.repeat(row_of * width + before - firsts, lengths) + within
            in_file = np.repeat(start, lengths) + within

            def filled(
                values: npt.ArrayLike, dtype: str = "int32", width: int = width, places: Numbers = places
            ) -> np.ndarray:
                rows = np.zeros((len(numbers), width), dtype)
                rows.reshape(-1)[places] = values
                return rows

            if side == 0:
                out["source"] = filled(self.pairs.tokens[in_file])
            else:
                # What the decoder sees is moved right by one; a sequence begins with padding.
                out["tokens"] = filled(np.where(within == 0, 0, self.pairs.tokens[in_file - 1]))
                out["targets"] = filled(self.pairs.tokens[in_file])
                out["weights"] = filled(np.float32(weight), "float32")
            of = "source_" if side == 0 else ""
            out |= {f"{of}segments": filled(np.repeat(number + 1, lengths)), f"{of}places": filled(within)}
        return out


def _counting(lengths: Numbers) -> Numbers:
    """0, 1, ..., n - 1 for each length n, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


class RowStream:
    """Endless batches of rows by step number: all rows once, then all again in another order."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self._rows, self._batch, self._seed = rows, batch, seed
        self._orders: dict[int, Numbers] = {}

    def numbers(self, step: int) -> Numbers:
        """The rows of a step, from 0."""
        places = np.arange(step * self._batch, (step + 1) * self._batch)
        rounds, within = np.divmod(places, self._rows)
        return np.array([self._order(int(r))[w] for r, w in zip(rounds, within, strict=True)])

    def _order(self, number: int) -> Numbers:
        if number not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == number - 1}
            self._orders[number] = permutation(self._rows, self._seed, number)
        return self._orders[number]


def permutation(count: int, seed: int, number: int) -> Numbers:
    """An order of ``count`` things that depends on (seed, number) alone."""
    mask = (1 << 64) - 1
    key = np.array([seed & mask, number & mask], np.uint64)
    # Sorting random numbers, not Generator.permutation, whose method NumPy may change.
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
