"""Normal numbers in C are those of NumPy, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.kernels import random_block, random_numbers
from meshmpi.kernels.native import available, normal
from meshmpi.kernels.native.compiler import CompilerError

needs_compiler = pytest.mark.skipif(not available(), reason="there is no C compiler")
BLOCKS = {
    (300, 40): ((0, 300), (0, 40)),
    (7, 30, 11): ((2, 6), (1, 30), (3, 10)),
    (50_000,): ((1, 49_999),),
    (3, 0): ((0, 3), (0, 0)),
    (): (),
}


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
@pytest.mark.parametrize("piece", [77, 16384])
def test_the_same_bits(sizes: tuple[int, ...], dtype: str, piece: int, monkeypatch):
    monkeypatch.setattr(random_numbers, "PIECE_ELEMENTS", piece)
    monkeypatch.setattr(normal, "LEAST_ELEMENTS", 0)
    block = BLOCKS[sizes]
    expected = random_block("normal", 3, "w", 0, sizes, block, "float64") * 0.02 + 1.5
    out = np.empty(expected.shape, dtype)
    assert normal.fill_normal(out, 3, "w", sizes, block, 0.02, 1.5)
    assert out.tobytes() == expected.astype(dtype).tobytes()


@needs_compiler
def test_a_million_numbers_are_the_same_bits():
    """Rare branches of rounding: logarithms near 1 and near 0, all quadrants."""
    n = 1 << 20
    out = np.empty(n)
    assert normal.fill_normal(out, 5, "v", (n,), ((0, n),), 1.0, 0.0)
    assert out.tobytes() == random_block("normal", 5, "v", 0, (n,), ((0, n),), "float64").tobytes()
    assert abs(out.mean()) < 0.005
    assert abs(out.std() - 1) < 0.005


def test_what_it_leaves_to_numpy(monkeypatch):
    few = np.empty(10, np.float32)
    assert not normal.fill_normal(few, 0, "w", (10,), ((0, 10),), 1.0, 0.0)
    monkeypatch.setattr(normal, "LEAST_ELEMENTS", 0)
    assert not normal.fill_normal(np.empty(10, np.float16), 0, "w", (10,), ((0, 10),), 1.0, 0.0)
    across = np.empty((4, 6), np.float32)[:, ::2]
    assert not normal.fill_normal(across, 0, "w", (4, 3), ((0, 4), (0, 3)), 1.0, 0.0)


def test_without_a_compiler_numpy_does_it(monkeypatch):
    def none(source: str) -> None:
        raise CompilerError("none", "")

    monkeypatch.setattr(normal, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(normal, "load_library", none)
    normal._library.cache_clear()
    out = np.empty(10, np.float32)
    try:
        assert not normal.fill_normal(out, 0, "w", (10,), ((0, 10),), 1.0, 0.0)
    finally:
        normal._library.cache_clear()


@needs_compiler
def test_a_library_with_other_bits_is_not_used(monkeypatch):
    monkeypatch.setattr(normal, "LEAST_ELEMENTS", 0)
    changed = normal._SOURCE.replace("* scale + shift", "* scale * (1 + 0x1p-52) + shift")
    assert changed != normal._SOURCE
    monkeypatch.setattr(normal, "_SOURCE", changed)
    normal.load_library(normal._source())  # it is fit to be loaded
    normal._library.cache_clear()
    out = np.empty(10, np.float32)
    try:
        assert not normal.fill_normal(out, 0, "w", (10,), ((0, 10),), 1.0, 0.0)
    finally:
        normal._library.cache_clear()


@pytest.mark.parametrize("layout", ["", "rows:all", "columns:all"])
def test_first_values_are_the_same_with_both_kernels(layout: str, monkeypatch):
    monkeypatch.setattr(normal, "LEAST_ELEMENTS", 0)
    with mm.Graph() as graph:
        w = mm.get_variable("w", "rows:30;columns:7", initializer=mm.random_normal_initializer(1.0, 0.3))
        total = mm.reduce_sum(w)
    whole = [
        mm.compile(graph, mm.SimulatedMesh("all:3"), layout, fetches=[total], kernels=k, seed=9).variables["w"]
        for k in ("numpy", "auto")
    ]
    assert whole[0].tobytes() == whole[1].tobytes()
    assert whole[0].std() > 0.1
