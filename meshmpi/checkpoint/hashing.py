"""Checksums of checkpoints: 64-bit XXH3 of pieces of fixed length.

They find damage, not forgery.  The chance that damage leaves a checksum as it was is about 2**-64 a piece.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

NAME = "xxh3-64"
PIECE_BYTES = 1 << 20
"""Bytes under one checksum: whoever reads any part of a piece reads all of it.  Assumption."""
LEAST_BYTES = 256
"""Shorter pieces are padded with zeros to this length; the format of checkpoints has it so."""


def hashes(data: np.ndarray) -> np.ndarray:
    """The checksum of each piece of PIECE_BYTES; the last piece may be shorter.

    Returns:
        uint64[ceil(n / PIECE_BYTES)].
    """
    starts = range(0, data.size, PIECE_BYTES)
    return np.array([hash_of(data[a : a + PIECE_BYTES].data) for a in starts], np.uint64)


def hash_of(data: bytes | memoryview) -> int:
    """The checksum of bytes as one piece, however many they are."""
    return xxh3_64_intdigest(data if len(data) >= LEAST_BYTES else bytes(data).ljust(LEAST_BYTES, b"\0"))
