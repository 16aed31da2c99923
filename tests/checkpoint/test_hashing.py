"""XXH3 of pieces: the values are those of the published algorithm, in C and in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshmpi.checkpoint import hashing
from meshmpi.checkpoint.hashing import LEAST_BYTES, PIECE_BYTES, hashes

PUBLISHED = {
    256: 0x809E68B3ABC5A152,
    1000: 0x1F31110EB12040C4,
    1024: 0x9658450B2B4A256E,
    1025: 0xA27116BEBF6DA875,
    5000: 0x60E0D148668E8E5F,
    PIECE_BYTES: 0x46BBBC7FBD30134D,
}
"""Size of `data` -> what XXH3_64bits of xxHash 0.8 returns."""
SIZES = (1, 7, 239, 255, 256, 257, 1000, 1024, 1025, 4097, PIECE_BYTES, 2 * PIECE_BYTES + 300)


def data(n: int) -> np.ndarray:
    return (np.arange(n, dtype=np.uint64) * 2654435761 >> 8).astype(np.uint8)


@pytest.fixture(params=["C", "NumPy"])
def how(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(hashing, "_library", lambda: None)
    elif hashing._library() is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.mark.parametrize("n", list(PUBLISHED))
def test_the_published_values(how, n):
    assert hashes(data(n)).tolist() == [PUBLISHED[n]]


@pytest.mark.parametrize("n", SIZES)
def test_as_the_package_xxhash(how, n):
    xxhash = pytest.importorskip("xxhash")
    pieces = [data(n)[a : a + PIECE_BYTES].tobytes() for a in range(0, n, PIECE_BYTES)]
    padded = [p.ljust(LEAST_BYTES, b"\0") for p in pieces]
    assert hashes(data(n)).tolist() == [xxhash.xxh3_64_intdigest(p) for p in padded]
    assert hashing.hash_of(data(n).tobytes()) == xxhash.xxh3_64_intdigest(
        data(n).tobytes().ljust(LEAST_BYTES, b"\0")
    )


def test_every_single_bit_counts(how):
    x = data(1300)
    seen = {int(hashes(x)[0])}
    for at in range(0, x.size, 1 if how == "C" else 13):
        for bit in range(8):
            x[at] ^= 1 << bit
            seen.add(int(hashes(x)[0]))
            x[at] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(range(0, x.size, 1 if how == "C" else 13))


def test_nothing_has_no_pieces(how):
    assert hashes(data(0)).size == 0


def test_other_instruction_sets(tmp_path):
    """AVX2 and plain C give what AVX-512 gives, or whatever this machine's library uses."""
    import ctypes
    import shutil
    import subprocess

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or hashing._library() is None:
        pytest.skip("no C compiler")
    source = tmp_path / "h.c"
    source.write_text(hashing._source())
    x = data(PIECE_BYTES - 77)
    for name, options in {"avx2": ["-mavx2"], "plain": []}.items():
        if name == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
            continue
        library = tmp_path / f"{name}.so"
        command = [compiler, "-O2", "-shared", "-fPIC", *options, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        out = np.zeros(1, np.uint64)
        hashing._fill(ctypes.CDLL(str(library)), x, PIECE_BYTES, out)
        assert out[0] == hashes(x)[0], name
