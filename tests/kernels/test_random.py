"""Random numbers: the same in every block, plausible as numbers, pinned for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshmpi.dims import Shape
from meshmpi.errors import ProgramError
from meshmpi.kernels import random_block, random_numbers
from meshmpi.kernels.random_numbers import DISTRIBUTIONS, stream_key
from tests.kernels.build import MESH, local_type, run

FLOATS = ("float32", "float64", "bfloat16")
SHAPE = Shape("b:7;l:5;d:11")
WHOLE = tuple((0, n) for n in SHAPE.sizes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("splits", [{}, {"b": "rows"}, {"d": "cols"}, {"b": "cols", "d": "rows"}, {"l": "rows+cols"}])
def test_blocks_are_parts_of_the_whole(distribution: str, dtype: str, splits):
    whole = random_block(distribution, 3, "dropout", 5, SHAPE, WHOLE, dtype)
    t = local_type("b:7;l:5;d:11", dtype, **splits)
    for ran in run("random", [], [t], [], step=5, seed=3, distribution=distribution, key="dropout"):
        assert ran.outputs[0].tobytes() == whole[ran.blocks[0]].tobytes()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_and_alignment_do_not_matter(distribution: str, dtype: str, monkeypatch):
    shape, whole = (3, 9000), ((0, 3), (0, 9000))
    full = random_block(distribution, 0, "w", 0, shape, whole, dtype)
    for start, stop in ((0, 9000), (1, 8999), (17, 8200), (4095, 4097), (13, 14)):
        part = random_block(distribution, 0, "w", 0, shape, ((1, 3), (start, stop)), dtype)
        assert part.tobytes() == full[1:3, start:stop].tobytes()
    monkeypatch.setattr(random_numbers, "PIECE_ELEMENTS", 77)
    assert random_block(distribution, 0, "w", 0, shape, whole, dtype).tobytes() == full.tobytes()


def test_data_types_come_from_the_same_bits():
    for distribution in DISTRIBUTIONS:
        wide, middle, short = (
            random_block(distribution, 0, "w", 0, (10000,), ((0, 10000),), d).astype(np.float64)
            for d in ("float64", "float32", "bfloat16")
        )
        far = np.abs(wide - middle) > 1e-5
        assert far.mean() < (2e-3 if "normal" in distribution else 1e-9)
        assert np.abs(middle - short).max() < 0.02


@pytest.mark.parametrize("piece", [1, 4, 9, 30])
def test_pieces_of_blocks_that_are_not_contiguous(piece: int, monkeypatch):
    whole = random_block("normal", 0, "w", 0, SHAPE, WHOLE)
    monkeypatch.setattr(random_numbers, "PIECE_ELEMENTS", piece)
    part = random_block("normal", 0, "w", 0, SHAPE, ((2, 6), (1, 4), (3, 10)))
    assert part.tobytes() == whole[2:6, 1:4, 3:10].tobytes()


@pytest.mark.parametrize("change", ["seed", "key", "step"])
def test_streams_differ(change: str):
    base = {"seed": 1, "key": "a", "step": 2}
    other = {**base, change: "b" if change == "key" else 9}
    block = ((0, 4096),)
    x, y = (random_block("uniform", v["seed"], v["key"], v["step"], (4096,), block) for v in (base, other))
    assert (x != y).mean() > 0.99
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.08


def test_keys_are_irregular():
    """Eight different hexadecimal digits other than 0 in each half; the last digit is odd."""
    keys = [stream_key(s, k, t) for s in range(5) for k in ("a", "b") for t in range(50)]
    assert len(set(keys)) == len(keys)
    for key in keys:
        text = f"{key:016x}"
        assert len(set(text[:8])) == len(set(text[8:])) == 8
        assert "0" not in text
        assert key % 2


def test_the_generator_is_squares():
    """The paper's reference in Python integers."""
    mask = (1 << 64) - 1

    def squares(counter: int, key: int) -> int:
        y = x = counter * key & mask
        z = y + key & mask
        for term in (y, z, y):
            x = x * x + term & mask
            x = (x >> 32 | x << 32) & mask
        return (x * x + z & mask) >> 32

    key = stream_key(7, "w", 3)
    got = random_block("uniform", 7, "w", 3, (5, 40), ((2, 5), (10, 40)))
    want = [[squares(i * 40 + j, key) >> 8 for j in range(10, 40)] for i in range(2, 5)]
    np.testing.assert_array_equal(got * np.float32(2**24), want)
    wide = random_block("uniform", 7, "w", 3, (9,), ((0, 9),), "float64")
    want = [(squares(i, key) >> 5 << 26 | squares(i + (2 << 48), key) >> 6) / 2**53 for i in range(9)]
    assert wide.tolist() == want


def test_moments_and_ranges():
    n = 200_000
    block = ((0, n),)
    for dtype in FLOATS:
        u = random_block("uniform", 0, "u", 0, (n,), block, dtype).astype(np.float64)
        assert u.min() >= 0 and u.max() < 1
        assert abs(u.mean() - 0.5) < 0.004 and abs(u.var() - 1 / 12) < 0.002
        z = random_block("normal", 0, "z", 0, (n,), block, dtype).astype(np.float64)
        assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01
        assert abs((z**3).mean()) < 0.05 and abs((z**4).mean() - 3) < 0.1
        t = random_block("truncated_normal", 0, "t", 0, (n,), block, dtype).astype(np.float64)
        assert np.abs(t).max() <= 2 and abs(t.std() - 0.8796) < 0.01
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    probability = 0.1015625  # a bfloat16 number: cutting keeps the share below it exact
    u = random_block("uniform", 0, "u", 0, (n,), block, "bfloat16").astype(np.float64)
    assert abs((u < probability).mean() - probability) < 0.003


def test_normal_numbers_are_box_muller():
    n = 5000
    key_bits = random_block("uniform", 1, "n", 0, (n,), ((0, n),), "float64")
    z = random_block("normal", 1, "n", 0, (n,), ((0, n),), "float64")
    radius = np.sqrt(-2 * np.log(key_bits + 2.0**-53))
    assert (np.abs(z) <= radius * (1 + 1e-14)).all()
    cosine = np.clip(z / radius, -1, 1)
    angle = np.arccos(cosine) / math.pi  # uniform in [0, 1] when v is uniform
    assert abs(angle.mean() - 0.5) < 0.02 and abs(angle.var() - 1 / 12) < 0.01


def test_golden_values():
    """Checkpoints and published runs depend on these bits: never change them."""
    block = ((0, 4),)
    assert random_block("uniform", 0, "golden", 0, (4,), block).tolist() == GOLDEN["uniform"]
    assert random_block("normal", 0, "golden", 0, (4,), block).tolist() == GOLDEN["normal"]


GOLDEN: dict[str, list[float]] = {
    "uniform": [0.10714751482009888, 0.7435199022293091, 0.33678138256073, 0.09616482257843018],
    "normal": [-1.621824860572815, 0.5267779231071472, -0.18639624118804932, 0.9966171383857727],
}


def test_unknown_distribution():
    with pytest.raises(ProgramError, match="Use one of uniform"):
        random_block("cauchy", 0, "k", 0, (4,), ((0, 4),))
    assert random_block("normal", 0, "k", 0, (4, 3), ((2, 2), (0, 3))).shape == (0, 3)
    assert random_block("normal", 0, "k", 0, (), ()).shape == ()
    assert MESH.size == 6
