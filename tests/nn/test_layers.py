"""Layers with variables against NumPy, with gradients."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import nn
from meshmpi.dims import Dimension
from meshmpi.errors import ShapeError
from meshmpi.graph import Graph, ops, scope
from tests.nn.build import check_gradients, random_variables, value

RNG = np.random.default_rng(7)
X = RNG.normal(1.0, 2.0, (3, 4, 5))
HIDDEN, OUT, A, B = (Dimension(n, s) for n, s in [("hidden", 6), ("out", 2), ("a", 4), ("b", 5)])


def build(function, dtype="float64"):
    with Graph() as graph:
        x = ops.placeholder("x", "batch:3;a:4;b:5", dtype)
        return graph, function(x)


def check(function, reference, tolerance=1e-12):
    """Values against ``reference(x, variables)`` and gradients, with random variables."""
    graph, y = build(function)
    variables = random_variables(graph)
    found, expected = value(y, {"x": X}, variables), reference(X, variables)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    with graph:
        w = ops.placeholder("w", y.shape, "float64")
        total = ops.reduce_sum(y * w)
    check_gradients(total, {"x": X, "w": RNG.normal(size=y.shape.sizes)}, variables)
    return graph, y


def test_dense():
    graph, y = check(
        lambda x: nn.dense(x, HIDDEN, activation="tanh"), lambda x, v: np.tanh(x @ v["dense/kernel"] + v["dense/bias"])
    )
    assert y.shape.names == ("batch", "a", "hidden")
    kernel = graph.variables["dense/kernel"]
    assert kernel.initializer.resolve(kernel.shape).scale == pytest.approx(5**-0.5)


def test_dense_over_several_dims():
    graph, _ = check(
        lambda x: nn.dense(x, [HIDDEN, OUT], ["a", B], use_bias=False, name="d"),
        lambda x, v: np.einsum("nab,abho->nho", x, v["d/kernel"]),
    )
    assert list(graph.variables) == ["d/kernel"]
    kernel = graph.variables["d/kernel"]
    assert kernel.initializer.resolve(kernel.shape).scale == pytest.approx(20**-0.5)


def test_dense_with_experts():
    check(
        lambda x: nn.dense(x, HIDDEN, expert_dims=A),
        lambda x, v: np.einsum("nab,abh->nah", x, v["dense/kernel"]) + v["dense/bias"],
    )


def test_dense_refuses_a_dim_twice():
    with pytest.raises(ShapeError, match="new dimension 'a' is already in x"):
        build(lambda x: nn.dense(x, A))


def test_layer_norm():
    def reference(x, v):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * v["ln/scale"] + v["ln/bias"]

    check(lambda x: nn.layer_norm(x, "b", 1e-5, "ln"), reference)
    check(
        lambda x: nn.layer_norm(x, A, use_scale=False, use_bias=False),
        lambda x, v: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6),
    )


def test_gradient_of_layer_norm_is_accurate_in_float32():
    """Far from 0, where mean(x**2) - mean(x)**2 would lose all digits of the variance."""
    with mm.Graph():
        x = mm.placeholder("x", "row:4;col:64")
        w = mm.placeholder("w", "row:4;col:64")
        y = mm.reduce_sum(mm.layer_norm(x, "col", use_scale=False, use_bias=False) * w)
        (dx,) = mm.gradients(y, [x])
    feeds = {n: RNG.normal(m, 1, (4, 64)).astype(np.float32) for n, m in (("x", 1000.0), ("w", 0.0))}
    step = mm.compile(dx.graph, mm.SimulatedMesh("all:1"), fetches=[dx])
    found, expected = step(feeds)[dx].numpy(), value(dx, feeds)
    # x itself is rounded to 3e-5 of its deviation; the rest is float32 arithmetic.
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_rms_norm():
    def reference(x, v):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * v["rms_norm/scale"]

    check(lambda x: nn.rms_norm(x, "b"), reference)


def test_norms_of_bfloat16_are_computed_in_float32():
    graph, y = build(lambda x: nn.layer_norm(x, "b"), "bfloat16")
    assert y.dtype == "bfloat16"
    assert {v.dtype for v in graph.variables.values()} == {"float32"}
    means = [op for op in graph.operations if type(op).__name__ == "Reduce"]
    assert {op.output.dtype for op in means} == {"float32"}


def test_embedding():
    with Graph() as graph:
        ids = ops.placeholder("ids", "batch:3;length:2", "int32")
        y = nn.embedding(ids, Dimension("vocab", 7), [A, B], "float64", name="table")
        total = ops.reduce_sum(ops.square(y))
    variables = random_variables(graph)
    feeds = {"ids": np.array([[0, 6], [2, 2], [7, -1]], np.int32)}
    expected = variables["table"][np.clip(feeds["ids"], 0, 6)]
    expected[2] = 0
    assert y.shape.names == ("batch", "length", "a", "b")
    np.testing.assert_array_equal(value(y, feeds, variables), expected)
    check_gradients(total, feeds, variables)


@pytest.mark.parametrize("use_bias", [True, False])
def test_dense_relu_dense(use_bias):
    def reference(x, v):
        wi, wo = v["feed_forward/wi/kernel"], v["feed_forward/wo/kernel"]
        bi = v.get("feed_forward/wi/bias", 0)
        return np.maximum(x @ wi + bi, 0) @ wo + v.get("feed_forward/wo/bias", 0)

    check(lambda x: nn.dense_relu_dense(x, HIDDEN, use_bias=use_bias), reference)


def test_variables_of_two_layers_and_of_a_shared_one():
    with Graph() as graph:
        x = ops.placeholder("x", "batch:3;a:4")
        for i in range(2):
            with scope(f"layer_{i}"):
                nn.dense(x, OUT)
        with scope(reuse=True):
            nn.dense(x, OUT, name="layer_0/dense")
    assert list(graph.variables) == [f"layer_{i}/dense/{n}" for i in range(2) for n in ("kernel", "bias")]


class TestDropout:
    def test_identity_outside_training(self):
        _, y = build(lambda x: nn.dropout(x, False, keep_prob=0.5))
        assert y.operation.name == "x"

    def test_mask_and_scale(self):
        with Graph():
            x = ops.placeholder("x", "batch:40;a:50", "float64")
            y = nn.dropout(x, True, rate=0.25)
            rows = nn.dropout(x, True, rate=0.25, noise_shape="batch:40")
        found = value(y, {"x": np.ones((40, 50))})
        assert sorted(np.unique(found)) == [0.0, pytest.approx(1 / 0.75)]
        # 2,000 draws: the share kept is within 5 standard deviations (0.0097 each).
        assert abs((found > 0).mean() - 0.75) < 0.05
        found = value(rows, {"x": np.ones((40, 50))})
        assert (found == found[:, :1]).all()
        assert 0 < (found[:, 0] > 0).sum() < 40

    @pytest.mark.parametrize("options", [{}, {"rate": 0.1, "keep_prob": 0.9}, {"rate": 1.0}])
    def test_errors(self, options):
        with pytest.raises(ShapeError, match="dropout:"):
            build(lambda x: nn.dropout(x, True, **options))


def test_jitter_and_sampling():
    with Graph():
        x = ops.placeholder("x", "row:3000;col:3", "float64")
        jittered = nn.multiplicative_jitter(x, True, 0.1)
        greedy = nn.sample_with_temperature(x, "col", 0.0)
        drawn = nn.sample_with_temperature(x, "col", 2.0)
    logits = np.tile(np.log([0.5, 0.3, 0.2]) * 2, (3000, 1))
    ratio = value(jittered, {"x": logits}) / logits
    assert ratio.min() >= 0.9
    assert ratio.max() < 1.1
    assert ratio.std() == pytest.approx(0.2 / 12**0.5, rel=0.03)
    assert (value(greedy, {"x": logits}) == 0).all()
    shares = np.bincount(value(drawn, {"x": logits}), minlength=3) / 3000
    # Standard deviations of the shares are below 0.0092.
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.04)
