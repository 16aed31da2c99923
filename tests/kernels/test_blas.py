"""Products bound to each BLAS library that is installed, against float64; choosing a library."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from meshmpi.errors import ConfigError
from meshmpi.kernels import blas

FLOATS = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2e-6}
"""Data type of the operands -> error of a product, relative to its largest element."""


def library(name: str) -> blas.Blas:
    try:
        return blas.find(name)
    except ConfigError:
        missing = "AVX512-BF16 or a compiler" if name in blas.EXTENDED else f"the library '{name}'"
        pytest.skip(f"{missing} is not there (for mkl: pip install 'meshmpi[mkl]')")


def numbers(*shape: int, dtype: str, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def result(*shape: int, dtype: str) -> np.ndarray:
    return np.full(shape, np.nan, np.float32 if dtype == "bfloat16" else dtype)


def held_as(x: np.ndarray, how: str) -> np.ndarray:
    """The same values with other strides: rows, columns, or inside a larger array of either."""
    if how.startswith("transposed"):
        return np.swapaxes(held_as(np.swapaxes(x, -1, -2), how.removeprefix("transposed ")), -1, -2)
    if how == "padded":
        wide = np.zeros((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 3), x.dtype)
        wide[..., : x.shape[-2], : x.shape[-1]] = x
        return wide[..., : x.shape[-2], : x.shape[-1]]
    if how == "outer backwards":  # steps of the outer dims go back
        turned = tuple(slice(None, None, -1) for _ in x.shape[:-2])
        return np.ascontiguousarray(x[turned])[turned]
    if how == "outer last":  # the first loop is the innermost but one in memory
        moved = np.ascontiguousarray(np.moveaxis(x, 0, -2))
        return np.moveaxis(moved, -2, 0)
    return np.ascontiguousarray(x)


FORMS = ["plain", "transposed plain", "padded", "transposed padded"]


@pytest.fixture(params=["openblas", "openblas+bf16", "mkl"])
def bound(request) -> blas.Blas:
    return library(request.param)


def check(of: blas.Blas, a: np.ndarray, b: np.ndarray, y: np.ndarray, dtype: str) -> None:
    run = of.gemm(a, b, y)
    if dtype == "bfloat16" and not of.bfloat16:
        assert run is None
        return
    assert run is not None
    run()
    first = y.tobytes()
    run()
    assert y.tobytes() == first, "a second call gives something else"
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(y - want).max() <= FLOATS[dtype] * max(1, np.abs(want).max())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_a", FORMS)
@pytest.mark.parametrize("of_b", FORMS)
def test_every_form(bound: blas.Blas, of_a: str, of_b: str, dtype: str):
    a, b = numbers(17, 33, dtype=dtype), numbers(33, 21, dtype=dtype, seed=1)
    for of_y in FORMS:
        y = held_as(result(17, 21, dtype=dtype), of_y)
        check(bound, held_as(a, of_a), held_as(b, of_b), y, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["outer last", "outer backwards", "padded", "transposed plain"])
def test_batches(bound: blas.Blas, form: str, dtype: str):
    """Products large enough to be worth a call each; strides as attention has them."""
    a = held_as(numbers(3, 2, 48, 40, dtype=dtype), form)
    b = held_as(numbers(3, 2, 40, 64, dtype=dtype, seed=1), form)
    check(bound, a, b, held_as(result(3, 2, 48, 64, dtype=dtype), form), dtype)
    repeated = np.broadcast_to(b[:1, :1], b.shape)
    check(bound, a, repeated, result(3, 2, 48, 64, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_size(bound: blas.Blas, dtype: str):
    for m, n, k in np.ndindex(4, 4, 4):
        m, n, k = (1, 2, 5, 16)[m], (1, 3, 8, 31)[n], (1, 2, 7, 64)[k]
        a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, seed=1)
        if dtype != "bfloat16" and 1 in (m, n):
            assert bound.gemm(a, b, result(m, n, dtype=dtype)) is None
        else:
            check(bound, a, b, result(m, n, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adding_to_what_is_there(bound: blas.Blas, dtype: str):
    a, b = numbers(70, 700, dtype=dtype), numbers(700, 90, dtype=dtype, seed=1)
    y = np.ones((90, 70), result(0, dtype=dtype).dtype).T
    run = bound.gemm(a, b, y, accumulate=True)
    if run is None:
        assert dtype == "bfloat16" and not bound.bfloat16
        return
    run()
    run()
    want = 1 + 2 * (a.astype(np.float64) @ b.astype(np.float64))
    np.testing.assert_allclose(y, want, rtol=0, atol=2 * FLOATS[dtype] * np.abs(want).max())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4, 6, 3), (64, 96, 48)])
def test_nan_and_infinity(bound: blas.Blas, dtype: str, shape: tuple[int, int, int]):
    m, k, n = shape
    a, b = numbers(m, k, dtype=dtype) * 0, numbers(k, n, dtype=dtype)
    b[2, 1], b[3, 2] = np.nan, np.inf
    y = result(m, n, dtype=dtype)
    run = bound.gemm(a, b, y)
    if run is None:
        assert dtype == "bfloat16"
        return
    run()
    assert np.isnan(y[:, 1:3]).all()
    assert (y[:, 0] == 0).all()
    assert (y[:, 3:] == 0).all()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 50, 33), (130, 100, 1100), (200, 801, 2)])
@pytest.mark.parametrize("of_y", FORMS)
def test_results_in_bfloat16_are_rounded_once(sizes: tuple[int, int, int], of_y: str):
    """Depths and widths beyond one packed block, too."""
    m, n, k = sizes
    of = library("openblas+bf16")
    a, b = numbers(m, k, dtype="bfloat16"), numbers(k, n, dtype="bfloat16", seed=1)
    y = held_as(np.full((m, n), np.nan, ml_dtypes.bfloat16), of_y)
    run = of.gemm(a, b, y)
    assert run is not None and of.gemm(a, b, y, accumulate=True) is None
    run()
    want = a.astype(np.float64) @ b.astype(np.float64)
    step = 2.0**-8 * np.abs(want)  # half the distance to the next bfloat16
    assert (np.abs(y.astype(np.float64) - want) <= step + 2e-6 * np.abs(want).max()).all()


def test_ways_to_multiply_bfloat16_count_where_they_are_asked_for(monkeypatch):
    of = library("openblas+bf16")
    assert of.bfloat16 and of.narrow
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    assert "openblas+bf16" in blas.available(bfloat16=True)
    assert "openblas+bf16" not in blas.available()
    monkeypatch.setenv(blas.VARIABLE, "openblas")
    assert blas.available(bfloat16=True) == ("openblas",)
    assert not blas.find("openblas").bfloat16


def test_what_no_library_can_do_is_refused(bound: blas.Blas):
    a, b, y = (numbers(6, 6, dtype="float32", seed=s) for s in range(3))
    assert bound.gemm(numbers(6, 12, dtype="float32")[:, ::2], b, y) is None
    assert bound.gemm(a, np.broadcast_to(b[:1], (6, 6)), y) is None
    assert bound.gemm(a[::-1], b, y) is None
    assert bound.gemm(a.astype(int), b.astype(int), y.astype(int)) is None
    assert bound.gemm(a, b.astype(float), y) is None
    assert bound.gemm(a.astype(np.float16), b.astype(np.float16), y.astype(np.float16)) is None
    assert bound.gemm(a[:0], b, y[:0]) is None
    assert bound.gemm(a[:, :0], b[:0], y) is None
    assert blas.find("numpy").gemm(a, b, y) is None


def test_a_bound_product_keeps_its_memory(bound: blas.Blas):
    a, b, y = (numbers(64, 64, dtype="float32", seed=s) for s in range(3))
    want, run = a @ b, bound.gemm(a, b, y)
    assert run is not None
    del a, b
    gc.collect()
    others = [np.full((64, 64), 7, np.float32) for _ in range(50)]
    run()
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    assert len(others) == 50


def test_it_tells_what_it_is(bound: blas.Blas):
    assert bound.name in ("openblas", "openblas+bf16", "mkl")
    assert any(c.isdigit() for c in bound.version)
    assert bound.threads >= 1


def test_the_user_decides(monkeypatch):
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    assert blas.available()[-1] == "numpy"
    assert blas.find().name == blas.available()[0]
    monkeypatch.setenv(blas.VARIABLE, "numpy")
    assert blas.available() == ("numpy",)
    assert blas.find().name == "numpy"
    monkeypatch.setenv(blas.VARIABLE, "atlas")
    assert blas.available() == ()
    with pytest.raises(ConfigError, match="Use one of openblas, mkl, numpy"):
        blas.find()
    with pytest.raises(ConfigError, match="MESHMPI_BLAS=atlas"):
        blas.agree([{}])
    with pytest.raises(ConfigError, match="'netlib' was not found"):
        blas.find("netlib")
