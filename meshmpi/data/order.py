"""The order of rows: another permutation in every epoch, computed for any place without a table."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
_ROUNDS = 6
_CHUNK = 1 << 13


def rows_at(places: Places, count: int, seed: int | None) -> Places:
    """Which of ``count`` rows stand at some places of the training, counted from its begin through all epochs.

    Each row comes once in an epoch.

    Args:
        seed: Of the order; None: rows in their own order.
    """
    epochs, within = np.divmod(np.asarray(places, np.int64), count)
    if seed is None:
        return within
    out = np.empty_like(within)
    chunks = within // _CHUNK
    for epoch, chunk in dict.fromkeys(zip(epochs.tolist(), chunks.tolist(), strict=True)):
        here = (epochs == epoch) & (chunks == chunk)
        out[here] = _chunk(epoch, chunk, count, seed)[within[here] - chunk * _CHUNK]
    return out


@functools.lru_cache(8)
def _chunk(epoch: int, chunk: int, count: int, seed: int) -> Places:
    """The rows at the places of a chunk of an epoch: together they cost little more than those of one batch."""
    places = np.arange(chunk * _CHUNK, min(chunk * _CHUNK + _CHUNK, count), dtype=np.uint64)
    return _permuted(places, count, seed, epoch).astype(np.int64)


def _permuted(places: npt.NDArray[np.uint64], count: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """A permutation of range(count) by a Feistel network over the next power of four.

    What falls outside is permuted again, which walks the cycle until it is inside: at most four times on average.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(key=np.array([seed & (1 << 64) - 1, epoch], np.uint64)).random_raw(_ROUNDS)
    out = _network(places, half, keys)
    outside = np.flatnonzero(out >= count)
    while outside.size:
        out[outside] = _network(out[outside], half, keys)
        outside = outside[out[outside] >= count]
    return out


def _network(x: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits (the finaliser of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
