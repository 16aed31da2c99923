"""Softmax, arg max, one-hot and clipping against NumPy."""

import numpy as np
import pytest

from meshmpi import nn
from meshmpi.dims import Dimension
from meshmpi.graph import Graph, ops
from meshmpi.graph.autodiff import gradients
from tests.nn.build import check_gradients, value

RNG = np.random.default_rng(3)
X = RNG.normal(0, 3, (4, 5))


def build(function, dtype="float64"):
    with Graph():
        x = ops.placeholder("x", "row:4;col:5", dtype)
        return function(x)


def logsumexp(x, axis=-1):
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + np.squeeze(top, axis)


@pytest.mark.parametrize(("dim", "axis"), [("col", 1), ("row", 0)])
def test_softmax_family(dim, axis):
    lse = np.expand_dims(logsumexp(X, axis), axis)
    feeds = {"x": X}
    y = value(build(lambda x: nn.softmax(x, dim)), feeds)
    np.testing.assert_allclose(y, np.exp(X - lse), rtol=1e-13)
    y = value(build(lambda x: nn.log_softmax(x, dim)), feeds)
    np.testing.assert_allclose(y, X - lse, rtol=1e-12)
    y = value(build(lambda x: nn.reduce_logsumexp(x, dim)), feeds)
    np.testing.assert_allclose(y, np.squeeze(lse, axis), rtol=1e-13)


def test_extra_logit():
    extra = np.log(np.exp(X).sum(1) + np.exp(0.5))
    lse = value(build(lambda x: nn.reduce_logsumexp(x, "col", extra_logit=0.5)), {"x": X})
    np.testing.assert_allclose(lse, extra, rtol=1e-13)
    y = value(build(lambda x: nn.softmax(x, "col", extra_logit=0.5)), {"x": X})
    np.testing.assert_allclose(y, np.exp(X - extra[:, None]), rtol=1e-12)
    with Graph():
        x = ops.placeholder("x", "row:4;col:5", "float64")
        e = ops.placeholder("e", "row:4", "float64")
        w = ops.placeholder("w", "row:4;col:5", "float64")
        y = ops.reduce_sum(nn.softmax(x, "col", e) * w + nn.log_softmax(x, "col", e) * w)
    check_gradients(y, {"x": X, "e": X[:, 0] * 2, "w": RNG.normal(size=(4, 5))}, {})


@pytest.mark.parametrize("function", [nn.softmax, nn.log_softmax, nn.reduce_logsumexp])
def test_gradients(function):
    with Graph():
        x = ops.placeholder("x", "row:4;col:5", "float64")
        w = ops.placeholder("w", "row:4;col:5", "float64")
        y = ops.reduce_sum(function(x, "col") * w)
    check_gradients(y, {"x": X, "w": RNG.normal(size=(4, 5))}, {})


def test_rows_without_finite_elements():
    x = np.array([[-np.inf] * 5, [-np.inf, 0, -np.inf, 1, 2], [1e4] * 5, [-1e4] * 5])
    lse = value(build(lambda t: nn.reduce_logsumexp(t, "col")), {"x": x})
    assert lse[0] == -np.inf
    expected = [np.log(1 + np.e + np.e**2), 1e4 + np.log(5), np.log(5) - 1e4]
    np.testing.assert_allclose(lse[1:], expected)
    y = value(build(lambda t: nn.softmax(t, "col")), {"x": x})
    np.testing.assert_allclose(y.sum(1), [0, 1, 1, 1], rtol=1e-13)
    grads = build(lambda t: gradients(nn.reduce_logsumexp(t, "col"), [t])[0])
    found = value(grads, {"x": x})
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(found, y, atol=1e-13)


def test_nan_is_not_hidden():
    x = X.copy()
    x[1, 2] = np.nan
    lse = value(build(lambda t: nn.reduce_logsumexp(t, "col")), {"x": x})
    assert list(np.isnan(lse)) == [False, True, False, False]
    assert np.isnan(value(build(lambda t: nn.softmax(t, "col")), {"x": x})[1]).all()


def test_argmax_and_top_1():
    x = np.array([[1, 3, 3, 0, 2], [-1, -2, -1, -1, -5], [0, 0, 0, 0, 0], [5, 1, 2, 3, 9]], float)
    with Graph() as graph:
        t = ops.placeholder("x", "row:4;col:5", "float64")
        largest, index = nn.top_1(t, "col")
        other = nn.argmax(t, Dimension("row", 4))
    assert index.dtype == other.dtype == "int32"
    np.testing.assert_array_equal(value(largest, {"x": x}), x.max(1))
    np.testing.assert_array_equal(value(index, {"x": x}), x.argmax(1))
    np.testing.assert_array_equal(value(other, {"x": x}), x.argmax(0))
    assert not any(type(op).__name__ == "TopK" for op in graph.operations)


def test_one_hot():
    with Graph():
        ids = ops.placeholder("ids", "n:4", "int32")
        plain = nn.one_hot(ids, Dimension("k", 3))
        smooth = nn.one_hot(ids, Dimension("k", 3), 0.9, 0.05, "float64")
    feeds = {"ids": np.array([2, 0, -1, 3])}
    expected = np.array([[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]], float)
    assert plain.shape.names == ("n", "k")
    np.testing.assert_array_equal(value(plain, feeds), expected)
    np.testing.assert_allclose(value(smooth, feeds), np.where(expected > 0, 0.9, 0.05), rtol=1e-15)


def test_clip_by_value():
    y = value(build(lambda x: nn.clip_by_value(x, -1.0, 2.0)), {"x": X})
    np.testing.assert_array_equal(y, np.clip(X, -1, 2))


@pytest.mark.parametrize("limit", [0.5, 1e3])
def test_clip_by_global_norm(limit):
    with Graph():
        a = ops.placeholder("a", "row:4;col:5", "float64")
        b = ops.placeholder("b", "row:4", "float64")
        (ca, none, cb), norm = nn.clip_by_global_norm([a, None, b], limit)
    feeds = {"a": X, "b": X[:, 1]}
    expected = np.sqrt((X**2).sum() + (X[:, 1] ** 2).sum())
    assert none is None
    assert value(norm, feeds) == pytest.approx(expected, rel=1e-14)
    factor = min(1.0, limit / expected)
    np.testing.assert_allclose(value(ca, feeds), X * factor, rtol=1e-13)
    np.testing.assert_allclose(value(cb, feeds), X[:, 1] * factor, rtol=1e-13)


def test_clip_of_zero_gradients():
    with Graph():
        a = ops.placeholder("a", "row:4", "float64")
        (clipped,), _ = nn.clip_by_global_norm([a], 1.0)
    np.testing.assert_array_equal(value(clipped, {"a": np.zeros(4)}), np.zeros(4))
