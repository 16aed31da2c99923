"""Gated units, rarer norms, residuals, compressed memories: against NumPy, with gradients."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, ShapeError
from tests.nn.build import check_gradients, check_layouts, random_variables, value
from tests.nn.test_layers import HIDDEN, OUT, RNG, X, build, check
from tests.nn.textbook import gelu

MESH = "rows:2;cols:3"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


GATES = {
    "bilinear": lambda x: x,
    "glu": sigmoid,
    "reglu": lambda x: np.maximum(x, 0),
    "geglu": gelu,
    "swiglu": lambda x: x * sigmoid(x),
}


@pytest.mark.parametrize("name", GATES)
def test_gated_units(name):
    def reference(x, v):
        parts = [x @ v[f"dense/dense_{i}/kernel"] + v[f"dense/dense_{i}/bias"] for i in range(2)]
        return GATES[name](parts[0]) * parts[1]

    graph, y = check(lambda x: mm.dense(x, HIDDEN, activation=name), reference)
    assert y.shape.names == ("batch", "a", "hidden") and name in mm.GATED_UNITS
    kernel = graph.variables["dense/dense_1/kernel"]
    assert kernel.initializer.resolve(kernel.shape).scale == pytest.approx(5**-0.5)


def test_products_of_several_layers():
    check(
        lambda x: mm.dense_product(x, ["a", "b"], OUT, ["tanh", None, mm.relu], use_bias=False),
        lambda x, v: np.prod(
            [
                f(np.einsum("nab,abo->no", x, v[f"dense_product/dense_{i}/kernel"]))
                for i, f in enumerate([np.tanh, lambda y: y, lambda y: np.maximum(y, 0)])
            ],
            axis=0,
        ),
    )


def test_gated_feed_forward_layers():
    def reference(x, v):
        wi = [x @ v[f"feed_forward/wi/dense_{i}/kernel"] for i in range(2)]
        return (gelu(wi[0]) * wi[1]) @ v["feed_forward/wo/kernel"]

    check(lambda x: mm.dense_relu_dense(x, HIDDEN, activation="geglu", use_bias=False), reference)


def test_unknown_activation():
    with pytest.raises(ConfigError, match=r"no activation 'swiglo'.*'swiglu'"):
        build(lambda x: mm.dense(x, HIDDEN, activation="swiglo"))


def test_norms():
    def rms(x, part):
        return x / np.sqrt((x[..., :part] ** 2).mean(-1, keepdims=True) + 1e-6)

    graph, _ = check(lambda x: mm.scale_norm(x, "b"), lambda x, v: rms(x, 5) * v["scale_norm/scale"])
    assert graph.variables["scale_norm/scale"].shape == ()
    check(lambda x: mm.rms_norm_subsampled(x, "b", 0.5), lambda x, v: rms(x, 2) * v["rms_norm/scale"])
    check(lambda x: mm.rms_norm_subsampled(x, "b", 0.01, use_scale=False), lambda x, v: rms(x, 1))
    with pytest.raises(ShapeError, match="fraction is 0"):
        build(lambda x: mm.rms_norm_subsampled(x, "b", 0.0))


def test_residual_and_rezero():
    check(lambda x: mm.residual(x, lambda h: mm.rezero(mm.tanh(h))), lambda x, v: x + np.tanh(x) * v["rezero/scale"])
    graph, _ = build(mm.rezero)
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[_ * 1.0])
    assert not next(iter(step(x=X).values())).numpy().any()


def test_clipped_activation_gradients():
    """The gradient of sum(w * x) is w, scaled to the rms allowed; also where x is split."""
    with mm.Graph():
        x, w = (mm.placeholder(n, "batch:3;a:4;b:5", "float64") for n in "xw")
        y = mm.clip_activation_gradient(x, 0.5)
        (dx,) = mm.gradients(mm.reduce_sum(w * y), [x])
    weights = RNG.normal(size=X.shape)
    np.testing.assert_array_equal(value(y, {"x": X, "w": weights}), X)
    for scale in (0.1, 1.0, 30.0):
        feeds = {"x": X, "w": weights * scale}
        rms = np.sqrt((feeds["w"] ** 2).mean())
        wanted = feeds["w"] * min(1.0, 0.5 / rms)
        np.testing.assert_allclose(value(dx, feeds), wanted, rtol=1e-12)
        check_layouts(["batch:rows;a:cols"], {dx: wanted, y: X}, feeds, rtol=1e-12)
    with pytest.raises(ShapeError, match="clip_rms_norm is 0"):
        build(lambda x: mm.clip_activation_gradient(x, 0))


def test_annealed_dropout():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:40;a:50", "float64")
        y = mm.annealed_dropout(x, True, 0.4, total_steps=10)
        assert mm.annealed_dropout(x, False, 0.4, 10) is x
        with pytest.raises(ShapeError, match=r"rate is 1\.0"):
            mm.annealed_dropout(x, True, 1.0, 10)
    step = mm.compile(graph, mm.SimulatedMesh("rows:3"), "batch:rows", fetches=[y])
    for t in range(13):
        found = step(x=np.ones((40, 50)))[y].numpy()
        rate = 0.4 * max(0.0, 1 - t / 10)
        # 2,000 draws: a standard deviation of the share dropped is below 0.011.
        assert (found == 0).mean() == pytest.approx(rate, abs=0.055)
        np.testing.assert_allclose(found[found != 0], 1 / (1 - rate), rtol=1e-6)
    assert (found != 0).all()


@pytest.mark.parametrize("dims", [None, ["b"], ["batch", "b"]])
def test_corr(dims):
    with mm.Graph():
        x, y = (mm.placeholder(n, "batch:3;a:4;b:5", "float64") for n in "xy")
        r = mm.corr(x, y, dims)
        total = mm.reduce_sum(mm.square(r))
    feeds = {"x": X, "y": 0.3 * X + RNG.normal(size=X.shape)}
    axes = tuple(i for i, n in enumerate(["batch", "a", "b"]) if dims is None or n in dims)
    kept = [i for i in range(3) if i not in axes]
    size = int(np.prod([X.shape[i] for i in axes]))
    samples = [np.transpose(feeds[n], [*kept, *axes]).reshape(-1, size) for n in "xy"]
    rows = [np.corrcoef(p, q)[0, 1] for p, q in zip(*samples, strict=True)]
    wanted = np.reshape(rows, [X.shape[i] for i in kept])
    np.testing.assert_allclose(value(r, feeds), wanted, rtol=1e-11)
    check_gradients(total, feeds, {})
    check_layouts(["batch:rows;b:cols"], {total: (wanted**2).sum()}, feeds)


def test_corr_of_other_dims():
    with mm.Graph(), pytest.raises(ShapeError, match=r"x is \[a=2\] and y is \[b=2\]"):
        mm.corr(mm.placeholder("x", "a:2"), mm.placeholder("y", "b:2"))


def test_means_of_groups():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:12;d:3", "float64")
        y = mm.compress_mean(x, "length", 3)
        with pytest.raises(ShapeError, match="5 does not divide length=12"):
            mm.compress_mean(x, "length", 5)
    array = RNG.normal(size=(2, 12, 3))
    wanted = array.reshape(2, 4, 3, 3).mean(2)
    check_layouts(("", "length:rows", "length:cols", "d:cols"), {y: wanted}, {"x": array}, rtol=1e-12)
    assert not mm.plan(graph, MESH, "length:rows", fetches=[y]).program.values()


@pytest.mark.parametrize("causal", [True, False])
def test_memory_compressed_attention(causal):
    heads, d_kv = mm.Dimension("heads", 2), mm.Dimension("d_kv", 3)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:12;d_model:6", "float64")
        y = mm.multihead_self_attention_memory_compressed(x, causal, 3, d_kv, heads)
        total = mm.reduce_sum(mm.square(y))
    v, array = random_variables(graph), RNG.normal(size=(2, 12, 6))
    memory = array.reshape(2, 4, 3, 6).mean(2)
    q = np.einsum("bld,dhk->bhlk", array, v["attention/q"])
    k, val = (np.einsum("bld,dhk->bhlk", memory, v[f"attention/{n}"]) for n in "kv")
    e = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(3))
    if causal:
        e = e * (np.arange(12)[:, None] >= 3 * np.arange(4) + 2)
    weights = e / (e.sum(-1, keepdims=True) + (1.0 if causal else 0.0))
    wanted = np.einsum("bhlk,hkd->bld", weights @ val, v["attention/o"])
    found = value(y, {"x": array}, v)
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
    assert not causal or not found[:, :2].any()
    check_gradients(total, {"x": array}, v)
    check_layouts(("length:rows", "length:cols;heads:rows", "memory_length:cols"), {y: wanted}, {"x": array}, v)
