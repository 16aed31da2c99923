"""Convolution, pooling and batch normalisation against NumPy, with gradients, in many layouts."""

import itertools

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError
from tests.nn.build import check_gradients, random_variables, run_updates, value

RNG = np.random.default_rng(5)
NEW = mm.Dimension("new", 3)
X = RNG.normal(size=(2, 7, 8, 5))
"""[batch, height, width, channels]; strides of 2 and 3 leave a rest in both pictured dims."""


def windows(x, taps, strides, dilations, pads, fill=0.0):
    """[batch, out..., taps..., rest] of x [batch, sliding..., rest], one by one."""
    n = len(taps)
    sizes = x.shape[1 : 1 + n]
    outs = [
        (size + sum(p) - (k - 1) * d - 1) // s + 1
        for size, p, k, d, s in zip(sizes, pads, taps, dilations, strides, strict=True)
    ]
    y = np.full((x.shape[0], *outs, *taps, *x.shape[1 + n :]), fill)
    for out in itertools.product(*map(range, outs)):
        for tap in itertools.product(*map(range, taps)):
            at = [o * s + t * d - p[0] for o, t, s, d, p in zip(out, tap, strides, dilations, pads, strict=True)]
            if all(0 <= i < size for i, size in zip(at, sizes, strict=True)):
                y[(slice(None), *out, *tap)] = x[(slice(None), *at)]
    return y


def same(size, taps, stride, dilation=1):
    """Padding of "SAME"."""
    total = max(0, (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1 - size)
    return total // 2, total - total // 2


def built(function, shape="batch:2;height:7;width:8;channels:5", dtype="float64"):
    with mm.Graph() as graph:
        x = mm.placeholder("x", shape, dtype)
        return graph, function(x)


def check(function, reference, x=X, shape="batch:2;height:7;width:8;channels:5", wanted=None):
    """Value against ``reference(x, variables)``, and gradients, with random variables."""
    graph, y = built(function, shape)
    variables = random_variables(graph)
    want = reference(x, variables)
    assert y.shape.sizes == want.shape
    np.testing.assert_allclose(value(y, {"x": x}, variables), want, rtol=1e-12, atol=1e-12)
    with graph:
        total = mm.reduce_sum(mm.square(y) + y)
    check_gradients(total, {"x": x}, variables, wanted)
    return graph, y


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (0, 3)]])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize("dilations", [None, (2, 1)])
def test_conv2d(padding, strides, dilations):
    spread = dilations or (1, 1)
    sizes, taps = (7, 8), (3, 2)
    pads = [
        same(*a) if padding == "SAME" else (0, 0) if padding == "VALID" else p
        for a, p in zip(zip(sizes, taps, strides, spread, strict=True), padding, strict=False)
    ]
    graph, y = check(
        lambda x: mm.conv2d(x, NEW, taps, strides, dilations, padding, activation="tanh"),
        lambda x, v: np.tanh(
            np.einsum("bhwijc,ijcn->bhwn", windows(x, taps, strides, spread, pads), v["conv2d/kernel"])
            + v["conv2d/bias"]
        ),
    )
    assert y.shape.names == ("batch", "height", "width", "new")
    kernel = graph.variables["conv2d/kernel"]
    assert kernel.shape.names == ("filter_height", "filter_width", "channels", "new")
    assert kernel.initializer.resolve(kernel.shape).scale == pytest.approx(30**-0.5)


def test_a_stride_of_two_over_an_odd_size_rounds_up():
    _, y = built(lambda x: mm.conv2d(x, NEW, 3, 2))
    assert y.shape.sizes == (2, 4, 4, 3)


def test_conv1d_and_conv3d():
    x = RNG.normal(size=(2, 5, 4, 3, 2))
    shape = "batch:2;depth:5;height:4;width:3;channels:2"
    pads = [same(5, 3, 2), same(4, 3, 2), same(3, 3, 2)]
    check(
        lambda x: mm.conv3d(x, NEW, 3, 2, use_bias=False, name="c"),
        lambda x, v: np.einsum("bdhwijkc,ijkcn->bdhwn", windows(x, (3,) * 3, (2,) * 3, (1,) * 3, pads), v["c/kernel"]),
        x,
        shape,
    )
    check(
        lambda x: mm.conv1d(x, NEW, 4, spatial_dims=["height"], channels="batch"),
        lambda x, v: (
            np.einsum("bhkwc,kbn->nhwc", windows(x, (4,), (1,), (1,), [(1, 2)]), v["conv1d/kernel"])
            + v["conv1d/bias"][:, None, None, None]
        ),
    )


def test_channels_first():
    _, first = built(lambda x: mm.conv2d(x, NEW, (3, 2), 2, spatial_dims=["height", "width"], channels="batch"))
    assert first.shape == mm.Shape("new:3;height:4;width:4;channels:5")


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("taps", "stride"), [(2, 2), (3, 2), (5, 2), (2, 3), (3, 1)])
def test_transposed_is_the_adjoint(taps, stride, padding):
    """<conv(y), x> = <y, transposed(x)> for the convolution that takes y's size to x's."""
    kernel = RNG.normal(size=(taps, taps, 5, 3))
    graph, z = built(lambda x: mm.conv2d_transpose(x, NEW, taps, stride, padding, use_bias=False, name="t"))
    more = max(taps - stride, 0) if padding == "VALID" else 0
    assert z.shape.sizes == (2, 7 * stride + more, 8 * stride + more, 3)
    got = value(z, {"x": X}, {"t/kernel": kernel})
    y = RNG.normal(size=got.shape)
    pads = [same(n, taps, stride) if padding == "SAME" else (0, 0) for n in got.shape[1:3]]
    forward = windows(y, (taps, taps), (stride, stride), (1, 1), pads)
    forward = np.einsum("bhwijn,ijcn->bhwc", forward, kernel)[:, :7, :8]
    np.testing.assert_allclose(np.sum(forward * X), np.sum(y * got), rtol=1e-12)
    with graph:
        total = mm.reduce_sum(mm.square(z))
    check_gradients(total, {"x": X}, {"t/kernel": kernel})


def test_conv3d_transpose():
    _, y = built(lambda x: mm.conv3d_transpose(x, NEW), "b:1;d:2;h:3;w:4;c:5")
    assert y.shape.sizes == (1, 4, 6, 8, 3)


def test_depthwise():
    twice = mm.Dimension("twice", 2)
    pads = [same(7, 3, 2), same(8, 2, 1)]
    check(
        lambda x: mm.depthwise_conv(x, (3, 2), (2, 1), name="d"),
        lambda x, v: np.einsum("bhwijc,ijc->bhwc", windows(x, (3, 2), (2, 1), (1, 1), pads), v["d/kernel"]),
    )
    check(
        lambda x: mm.depthwise_conv(x, (3, 2), (2, 1), multiplier_dim=twice, use_bias=True),
        lambda x, v: (
            np.einsum("bhwijc,ijcm->bhwcm", windows(x, (3, 2), (2, 1), (1, 1), pads), v["depthwise_conv/kernel"])
            + v["depthwise_conv/bias"]
        ),
    )


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-2, 0), (1, 3), (0, 0)])
def test_separable_conv1d_sees_relative_positions(low, high):
    def reference(x, v):
        y = np.zeros((2, 6, 4))
        for p, k in itertools.product(range(6), range(low, high + 1)):
            if 0 <= p + k < 6:
                y[:, p] += x[:, p + k] * v["s/depthwise/kernel"][k - low]
        return y @ v["s/pointwise/kernel"] + v["s/pointwise/bias"]

    check(
        lambda x: mm.separable_conv1d(x, NEW, low, high, name="s"),
        reference,
        RNG.normal(size=(2, 6, 4)),
        "batch:2;length:6;io:4",
    )


def test_separable_conv2d():
    pads = [same(7, 3, 2), same(8, 3, 2)]
    check(
        lambda x: mm.separable_conv2d(x, NEW, strides=2, use_bias=False, name="s"),
        lambda x, v: np.einsum(
            "bhwijc,ijc,cn->bhwn",
            windows(x, (3, 3), (2, 2), (1, 1), pads),
            v["s/depthwise/kernel"],
            v["s/pointwise/kernel"],
        ),
    )


# -- pooling ---------------------------------------------------------------------------------------

POOLS = [
    ((2, 2), None, "VALID"),
    ((2, 3), (1, 2), "SAME"),
    ((3, 3), (2, 2), "SAME"),
    ((2, 2), (3, 3), "VALID"),
    ((3, 2), (1, 1), [(2, 1), (1, 0)]),
    ((1, 4), (2, 1), "VALID"),
]


@pytest.mark.parametrize(("taps", "strides", "padding"), POOLS)
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pools(kind, taps, strides, padding):
    steps = strides or taps
    pads = [
        same(size, k, s) if padding == "SAME" else (0, 0) if padding == "VALID" else p
        for size, k, s, p in zip((7, 8), taps, steps, padding, strict=False)
    ]
    function, reduce = (mm.max_pool2d, np.nanmax) if kind == "max" else (mm.avg_pool2d, np.nanmean)
    check(
        lambda x: function(x, taps, strides=strides, padding=padding),
        lambda x, v: reduce(windows(x, taps, steps, (1, 1), pads, np.nan), axis=(3, 4)),
    )


def test_valid_pools_round_down_and_same_pools_up():
    _, y = built(lambda x: mm.max_pool2d(x, 2))
    assert y.shape.sizes == (2, 3, 4, 5)
    _, y = built(lambda x: mm.avg_pool2d(x, 2, padding="SAME"))
    assert y.shape.sizes == (2, 4, 4, 5)


def test_pools_in_one_and_three_dims():
    x = RNG.normal(size=(1, 2, 4, 6, 3))
    shape = "batch:1;depth:2;height:4;width:6;channels:3"
    blocks = x.reshape(1, 1, 2, 2, 2, 3, 2, 3)
    check(mm.max_pool3d, lambda x, v: blocks.max(axis=(2, 4, 6)), x, shape)
    check(mm.avg_pool3d, lambda x, v: blocks.mean(axis=(2, 4, 6)), x, shape)
    rows = x.reshape(1, 2, 4, 3, 2, 3)
    check(mm.max_pool1d, lambda x, v: rows.max(axis=4), x, shape)
    check(mm.avg_pool1d, lambda x, v: rows.mean(axis=4), x, shape)


def test_equal_elements_share_the_gradient():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "h:3;c:2", "float64")
        y = mm.max_pool1d(x, 3)
        (g,) = mm.gradients(mm.reduce_sum(y), [x])
    assert graph
    equal = np.array([[1.0, 2.0], [1.0, 0.0], [1.0, 2.0]])
    np.testing.assert_allclose(value(g, {"x": equal}), [[1 / 3, 0.5], [1 / 3, 0], [1 / 3, 0.5]])


# -- batch normalisation ---------------------------------------------------------------------------


def test_batch_norm_in_training():
    def reference(x, v):
        mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
        y = (x - mean) / np.sqrt(variance + 1e-5)
        return y * v["batch_norm/scale"] + v["batch_norm/bias"]

    names = ["batch_norm/scale", "batch_norm/bias"]
    graph, _ = check(lambda x: mm.batch_norm(x, True)[0], reference, wanted=["x", *names])
    assert [v.name for v in graph.trainable_variables] == names


def test_moving_averages():
    _, (_, updates) = built(lambda x: mm.batch_norm(x, True, 0.75, name="n"))
    names = ["n/moving_mean", "n/moving_variance"]
    assert [u.variable.name for u in updates] == names
    variables = {"n/moving_mean": np.zeros(5), "n/moving_variance": np.ones(5)}
    variables |= {"n/scale": np.ones(5), "n/bias": np.zeros(5)}
    after = run_updates(updates, variables, {"x": X}, steps=3)
    mean, variance = X.mean(axis=(0, 1, 2)), X.var(axis=(0, 1, 2))
    share = 1 - 0.75**3
    np.testing.assert_allclose(after[names[0]], share * mean, rtol=1e-12)
    np.testing.assert_allclose(after[names[1]], 0.75**3 + share * variance, rtol=1e-12)


def test_batch_norm_in_inference_uses_the_averages():
    graph, (y, updates) = built(lambda x: mm.batch_norm(x, False, epsilon=0.5, dims="width"))
    assert updates == [] and y.shape.names == ("batch", "height", "width", "channels")
    v = {n: RNG.uniform(0.5, 2, 8) for n in graph.variables}
    scale, bias, mean, variance = (
        v[f"batch_norm/{n}"][:, None] for n in ("scale", "bias", "moving_mean", "moving_variance")
    )
    want = (X - mean) / np.sqrt(variance + 0.5) * scale + bias
    np.testing.assert_allclose(value(y, {"x": X}, v), want, rtol=1e-12)


def test_batch_norm_of_bfloat16_is_computed_in_float32():
    graph, (y, updates) = built(lambda x: mm.batch_norm(x, True), dtype="bfloat16")
    assert y.dtype == "bfloat16"
    assert all(u.variable.dtype == "float32" for u in updates)
    assert all(v.dtype == "float32" for v in graph.variables.values())


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: mm.conv2d(x, mm.Dimension("width", 3)), ["'width'", "already"]),
        (lambda x: mm.conv2d(x, NEW, (9, 3), padding="VALID"), ["9 elements", "height=7"]),
        (lambda x: mm.conv2d(x, NEW, 3, 0), ["strides", "0"]),
        (lambda x: mm.conv2d(x, NEW, (3, 3, 3)), ["filter_size", "2"]),
        (lambda x: mm.conv2d(x, NEW, padding="FULL"), ["'FULL'", "SAME"]),
        (lambda x: mm.conv2d(x, NEW, padding=[(1, 1)]), ["2 pairs"]),
        (lambda x: mm.conv2d(x, NEW, spatial_dims=["height"]), ["2 dimensions"]),
        (lambda x: mm.conv3d(mm.reduce_sum(x, reduced_dim="batch"), NEW), ["3", "slide"]),
        (lambda x: mm.max_pool2d(x, 2, padding=[(2, 0), (0, 0)]), ["padding only"]),
        (lambda x: mm.max_pool2d(mm.cast(x, "bool")), ["bool"]),
        (lambda x: mm.avg_pool2d(mm.cast(x, "int32")), ["int32"]),
        (lambda x: mm.separable_conv1d(x, NEW, 1, 0), ["no position"]),
        (lambda x: mm.batch_norm(x, True, dims=x.shape.names), ["average"]),
        (lambda x: mm.conv(x, x, [mm.ConvDims("h", "k", "o")], []), ["'h'"]),
        (lambda x: mm.conv(x, mm.cast(x, "float32"), [], []), ["float64 and float32"]),
        (lambda x: mm.conv(x, x, [mm.ConvDims("height", "height", "o", stride=0)], "o:2"), ["of 0"]),
        (lambda x: mm.conv(x, x, [mm.ConvDims("height", "width", "o")], "o:2"), ["in one place"]),
        (lambda x: mm.conv(x, x, [mm.ConvDims("height", "height", "o")] * 2, "o:2"), ["twice"]),
        (lambda x: mm.conv(x, x, [], "o:2"), ["no input"]),
    ],
)
def test_errors(function, words):
    with pytest.raises(ShapeError) as caught:
        built(function)
    for word in words:
        assert word in str(caught.value)


# -- layouts ---------------------------------------------------------------------------------------

LAYOUTS = [
    "batch:rows",
    "height:rows",
    "width:cols",
    "height:rows;width:cols",
    "height:cols;width:rows",
    "batch:rows;height:cols",
    "height:rows+cols",
    "width:cols+rows",
    "features:rows;height:cols",
    "deep:cols;features:rows",
    "channels:rows;width:cols",
    "filter_height:rows",
    "classes:cols",
    "batch:rows+cols",
    "features:rows;hidden:cols",
]


def losses(layout, height=7, width=9, mesh="rows:2;cols:3", **options):
    """Three steps of a small network with every kind of layer."""
    rng = np.random.default_rng(2)
    images = rng.normal(size=(4, height, width, 2))
    labels = rng.integers(0, 3, 4).astype(np.int32)
    with mm.Graph() as graph:
        x = mm.placeholder("x", f"batch:4;height:{height};width:{width};channels:2", "float64")
        t = mm.placeholder("t", "batch:4", "int32")
        y = mm.conv2d(x, mm.Dimension("features", 4), 3, activation="relu", name="first")
        y, moved = mm.batch_norm(y, True)
        y = mm.max_pool2d(y, 3, strides=2, padding="SAME")
        y = mm.conv2d(y, mm.Dimension("deep", 5), (2, 3), (2, 1), name="second")
        y = mm.avg_pool2d(mm.depthwise_conv(mm.tanh(y), (3, 3)), 2, strides=1, padding="SAME")
        y = mm.conv2d_transpose(y, mm.Dimension("hidden", 2), 3, 2)
        classes = mm.Dimension("classes", 3)
        y = mm.dense(y, classes, ["height", "width", "hidden"])
        loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(y, t, classes))
        updates = [*mm.optimize.Momentum(0.05, 0.9).minimize(loss), *moved]
    step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[loss], updates=updates, **options)
    return [step(x=images, t=labels)[loss] for _ in range(3)], step


@pytest.fixture(scope="module")
def reference():
    return losses("", mesh="rows:1;cols:1")[0]


@pytest.mark.quick(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_the_same_in_every_layout(layout, reference):
    found, _ = losses(layout)
    np.testing.assert_allclose(found, reference, rtol=1e-10)


def test_split_pictures_exchange_halos_and_gather_no_picture():
    _, step = losses("height:rows;width:cols", height=16, width=18)
    counts = step.program.counts()
    assert counts["shift"] > 10 and "all_to_all" not in counts
    # Nothing of the size of a picture is gathered; only what dense needs is.
    largest = step.program.values().get("all_gather", {})
    assert not largest, largest


def test_a_sum_over_split_channels_is_finished_where_it_is_smallest():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;height:8;width:8;channels:4")
        y = mm.avg_pool2d(mm.conv2d(x, NEW, use_bias=False), 4)
    program = mm.plan(graph, "rows:2", "channels:rows", fetches=[y], updates=[]).program
    assert program.values()["all_reduce"] == {"rows": y.shape.size}
