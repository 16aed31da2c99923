"""Checksums of pieces: the values that checkpoints of every version have had."""

from __future__ import annotations

import numpy as np
import pytest

from meshmpi.checkpoint.hashing import LEAST_BYTES, PIECE_BYTES, hash_of, hashes

WRITTEN = {
    1: 0xA68DFBB1D75C6E8D,
    239: 0x67CE5B68F97CE09B,
    256: 0x809E68B3ABC5A152,
    1000: 0x1F31110EB12040C4,
    1024: 0x9658450B2B4A256E,
    1025: 0xA27116BEBF6DA875,
    5000: 0x60E0D148668E8E5F,
    PIECE_BYTES: 0x46BBBC7FBD30134D,
}
"""Size of `data` -> the checksum that checkpoints written before have."""


def data(n: int) -> np.ndarray:
    return (np.arange(n, dtype=np.uint64) * 2654435761 >> 8).astype(np.uint8)


@pytest.mark.parametrize("n", list(WRITTEN))
def test_the_values_are_those_of_checkpoints_written_before(n):
    assert hashes(data(n)).tolist() == [WRITTEN[n]]
    assert hash_of(data(n).tobytes()) == WRITTEN[n]


@pytest.mark.parametrize("rest", [0, 7, 300])
def test_each_piece_has_its_own(rest):
    x = data(2 * PIECE_BYTES + rest)
    found = hashes(x)
    assert found.dtype == np.uint64
    assert found.tolist() == [hash_of(x[a : a + PIECE_BYTES].tobytes()) for a in range(0, x.size, PIECE_BYTES)]


def test_short_pieces_are_padded():
    assert hash_of(b"abc") == hash_of(b"abc" + bytes(LEAST_BYTES - 3)) != hash_of(b"abc" + bytes(LEAST_BYTES - 2))


def test_nothing_has_no_pieces():
    assert hashes(data(0)).size == 0
