"""Families of proteins by the 5-letter words they share, so that held-out proteins are new ones.

Two sequences are linked when they share at least `LEAST_WORDS` different words that are at least
`LEAST_SHARE` of the words of the one with fewer.  A family is what links connect, directly or not;
it is held out as a whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

WORD = 5
LEAST_WORDS, LEAST_SHARE = 6, 0.03
"""Two proteins of 350 residues share 0.05 words by chance, relatives of whose residues half are
alike some 3 % of them.  Measured on 20,000 proteins: with 3 words and 2 % chance joins 18,500 of
them into one family, with these the largest has 3,087."""
COMMON = 200
"""Words in more sequences than this tell of composition rather than descent and are left out."""
_ROWS = 256
"""Sequences compared with all others at a time."""


def words(tokens: np.ndarray) -> np.ndarray:
    """The different words of a sequence of numbers below 32, sorted, as int64."""
    if len(tokens) < WORD:
        return np.zeros(0, np.int64)
    found = np.zeros(len(tokens) - WORD + 1, np.int64)
    for k in range(WORD):
        found = found << 5 | tokens[k : len(tokens) - WORD + 1 + k]
    return np.unique(found)


def families(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Number of the first sequence of its family, for each of ``sequences`` (uint8 numbers)."""
    parents = np.arange(len(sequences))
    for a, b in links([words(s) for s in sequences]):
        a, b = _root(parents, a), _root(parents, b)
        parents[max(a, b)] = min(a, b)
    return np.array([_root(parents, k) for k in range(len(parents))], np.int64)


def _root(parents: np.ndarray, k: int) -> int:
    while parents[k] != k:
        parents[k] = parents[parents[k]]
        k = int(parents[k])
    return k


def links(lists: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """All pairs of linked sequences, given the words of each."""
    sizes = np.array([len(found) for found in lists], np.int64)
    ends = np.cumsum(sizes)
    owner = np.repeat(np.arange(len(lists)), sizes)
    word = np.concatenate([np.zeros(0, np.int64), *lists])
    order = np.argsort(word, kind="stable")
    _, ids, counts = np.unique(word, return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    for first in range(0, len(lists), _ROWS):
        last = min(first + _ROWS, len(lists))
        places = slice(ends[first] - sizes[first], ends[last - 1])
        row, w = owner[places] - first, ids[places]
        shared = (counts[w] > 1) & (counts[w] <= COMMON)
        row, w = row[shared], w[shared]
        c = counts[w]
        # The owners of word w stand at starts[w] ... starts[w] + counts[w] of the sorted list.
        at = np.repeat(starts[w] - (np.cumsum(c) - c), c) + np.arange(c.sum())
        key = np.repeat(row * len(lists), c) + owner[order[at]]
        table = np.bincount(key, minlength=(last - first) * len(lists))
        table = table.reshape(last - first, len(lists))
        a, b = np.nonzero(table >= LEAST_WORDS)
        least = LEAST_SHARE * np.minimum(sizes[a + first], sizes[b])
        linked = (table[a, b] >= least) & (a + first < b)
        yield from zip((a[linked] + first).tolist(), b[linked].tolist(), strict=True)


def held_out(names: Sequence[str], family: np.ndarray, share: float) -> np.ndarray:
    """Whether each sequence is held out: whole families, until they are ``share`` of all.

    The order in which families are taken depends on the name of their first sequence only.  Those
    with more than a twentieth of what shall be held out are trained on.
    """
    size = np.bincount(family, minlength=len(names))
    wanted = share * len(names)
    firsts = sorted(np.flatnonzero(size), key=lambda k: (zlib.crc32(names[k].encode()), names[k]))
    chosen, total = np.zeros(len(names), bool), 0
    for k in firsts:
        if total < wanted and size[k] <= max(1, wanted / 20):
            chosen[k], total = True, total + size[k]
    return chosen[family]
