"""Local attention against dense attention with a mask, whole and with lengths split."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError
from tests.nn.build import check_gradients, check_layouts, random_variables, value
from tests.nn.textbook import softmax

RNG = np.random.default_rng(29)
MESH = "rows:2;cols:3"


def dense(q, k, v, mask):
    """q [b, l, h, c], k and v [b, m, h, c], mask [.., l, m]."""
    logits = np.einsum("blhc,bmhc->bhlm", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhlm,bmhc->blhc", softmax(np.where(mask, logits, -np.inf)), v)


def near(length, window, causal):
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    return (distance < window) & (distance >= (0 if causal else 1 - window))


def arrays(*sizes):
    return {n: RNG.normal(size=sizes) for n in "qkv"}


CASES = [  # length, window, block
    (24, 4, None),
    (18, 3, None),
    (17, 5, 3),
    (20, 7, 4),
    (12, 30, None),
    (10, 1, 4),
    (7, 3, 7),
    (13, 9, 2),
]
LAYOUTS = ["length:rows", "length:cols", "length:rows+cols", "length:rows;heads:cols", "d_kv:cols"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "window", "block"), CASES)
def test_equals_dense_attention(length, window, block, causal):
    """Whole, and split 2, 3 and 6 ways: blocks that are even, uneven, and fewer than ranks."""
    with mm.Graph():
        q, k, v = (mm.placeholder(n, f"batch:2;length:{length};heads:2;d_kv:4", "float64") for n in "qkv")
        y = mm.local_attention_1d(q, k, v, "length", "d_kv", "d_kv", window, causal, block_length=block)
        total = mm.reduce_sum(mm.square(y))
        grads = mm.gradients(total, [q, k, v])
    feeds = arrays(2, length, 2, 4)
    wanted = dense(*feeds.values(), near(length, window, causal))
    np.testing.assert_allclose(value(y, feeds), wanted, rtol=1e-12, atol=1e-12)
    check_gradients(total, feeds, {})
    check_layouts(LAYOUTS, {y: wanted, **{g: value(g, feeds) for g in grads}}, feeds, atol=1e-12)


def test_float32():
    with mm.Graph() as graph:
        q, k, v = (mm.placeholder(n, "batch:2;length:24;heads:2;d_kv:4") for n in "qkv")
        y = mm.local_attention_1d(q, k, v, "length", "d_kv", "d_kv", 4)
    feeds = {n: a.astype(np.float32) for n, a in arrays(2, 24, 2, 4).items()}
    wanted = dense(*(a.astype(np.float64) for a in feeds.values()), near(24, 4, True))
    step = mm.compile(graph, mm.SimulatedMesh("rows:3"), "length:rows", fetches=[y])
    np.testing.assert_allclose(step(feeds)[y].numpy(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_only_halos_travel(ranks):
    """window - 1 positions of k and v, to one neighbour or both; nothing is gathered.

    Of two ranks neither has two neighbours.
    """
    for causal, sides in ((True, 1), (False, min(2, ranks - 1))):
        with mm.Graph() as graph:
            q, k, v = (mm.placeholder(n, "batch:2;length:48;heads:2;d_kv:4") for n in "qkv")
            y = mm.local_attention_1d(q, k, v, "length", "d_kv", "d_kv", 8, causal)
        program = mm.plan(graph, f"r:{ranks}", "length:r", fetches=[y]).program
        assert program.values() == {"shift": {"r": 2 * sides * 7 * 2 * 2 * 4}}


def test_segments():
    ids = np.array([[1] * 5 + [2] * 9 + [3] * 4, [1] * 18], np.int32)
    with mm.Graph():
        q, k, v = (mm.placeholder(n, "batch:2;length:18;heads:2;d_kv:4", "float64") for n in "qkv")
        segments = mm.placeholder("segments", "batch:2;length:18", "int32")
        y = mm.local_attention_1d(q, k, v, "length", "d_kv", "d_kv", 4, segments=segments)
    feeds = arrays(2, 18, 2, 4)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    wanted = dense(*feeds.values(), near(18, 4, True) & same)
    feeds["segments"] = ids
    check_layouts(("", "length:rows", "length:cols"), {y: wanted}, feeds, rtol=1e-12, atol=1e-12)


def test_dropout_may_be_the_same_for_all_positions():
    """Weights are dropped by place in the neighbourhood: alike for all queries, or each anew."""
    masks = {}
    for dims in ((), ("length",)):
        with mm.Graph() as graph:
            q = mm.placeholder("q", "length:12;d_kv:4", "float64")
            mm.local_attention_1d(
                q, q, q, "length", "d_kv", "d_kv", 4, dropout_rate=0.5, is_training=True, dropout_broadcast_dims=dims
            )
        (draw,) = [op.output for op in graph.operations if type(op).__name__ == "Random"]
        masks[dims] = draw.shape.names
    assert masks == {(): ("length", "length_in_block", "length_memory"), ("length",): ("length_memory",)}


@pytest.mark.parametrize(("memory_heads", "shared"), [(0, False), (1, False), (2, True)])
def test_self_attention_layer(memory_heads, shared):
    """The layer is the full one with a local mask, whatever its heads are."""
    heads, d_kv = mm.Dimension("heads", 4), mm.Dimension("d_kv", 2)
    options = mm.AttentionOptions(memory_heads, shared, rotary=True)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:10;d_model:6", "float64")
        length, memory = mm.Dimension("length", 10), mm.Dimension("memory_length", 10)
        mask = mm.attention_mask_local(length, memory, 3)
        full = mm.multihead_attention(x, None, mask, d_kv, heads, options=options, use_bias=True)
        with mm.scope(reuse=True):
            local = mm.local_self_attention(x, d_kv, heads, 3, options=options, use_bias=True)
        total = mm.reduce_sum(mm.square(local))
    feeds, variables = {"x": RNG.normal(size=(2, 10, 6))}, random_variables(graph)
    np.testing.assert_allclose(value(local, feeds, variables), value(full, feeds, variables), rtol=1e-11, atol=1e-13)
    check_gradients(total, feeds, variables)


# -- two dims --------------------------------------------------------------------------------------


def near_2d(shape, window, causal):
    rows, columns = (i.ravel() for i in np.indices(shape))
    far = [np.subtract.outer(i, i) for i in (rows, columns)]
    seen = (np.abs(far[0]) < window[0]) & (np.abs(far[1]) < window[1])
    return seen & ((far[0] > 0) | ((far[0] == 0) & (far[1] >= 0))) if causal else seen


IMAGES = [  # height, width, window, block
    (8, 12, (2, 3), (2, 4)),
    (6, 6, (2, 2), None),
    (5, 7, (3, 2), (2, 3)),
    (4, 5, (9, 1), None),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("height", "width", "window", "block"), IMAGES)
def test_images(height, width, window, block, causal):
    with mm.Graph():
        dims = f"batch:2;height:{height};width:{width};heads:2;d_kv:3"
        q, k, v = (mm.placeholder(n, dims, "float64") for n in "qkv")
        y = mm.local_attention_2d(q, k, v, ["height", "width"], "d_kv", "d_kv", window, causal, block=block)
        total = mm.reduce_sum(mm.square(y))
    feeds = arrays(2, height, width, 2, 3)
    flat = [a.reshape(2, height * width, 2, 3) for a in feeds.values()]
    wanted = dense(*flat, near_2d((height, width), window, causal)).reshape(feeds["q"].shape)
    np.testing.assert_allclose(value(y, feeds), wanted, rtol=1e-12, atol=1e-12)
    check_gradients(total, feeds, {})
    layouts = ("height:rows", "width:cols", "height:cols;width:rows", "height:rows+cols")
    check_layouts(layouts, {y: wanted}, feeds, atol=1e-12)


def test_only_halos_of_images_travel():
    with mm.Graph() as graph:
        dims = "batch:2;height:12;width:12;heads:2;d_kv:3"
        q, k, v = (mm.placeholder(n, dims) for n in "qkv")
        y = mm.local_attention_2d(q, k, v, ["height", "width"], "d_kv", "d_kv", (3, 3))
    program = mm.plan(graph, "r:2;c:2", "height:r;width:c", fetches=[y]).program
    assert list(program.values()) == ["shift"]


def test_image_layer():
    heads, d_kv = mm.Dimension("heads", 2), mm.Dimension("d_kv", 2)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "height:4;width:5;d_model:3", "float64")
        y = mm.local_self_attention_2d(x, d_kv, heads, (2, 2), num_memory_heads=1)
        total = mm.reduce_sum(mm.square(y))
    assert y.shape == x.shape
    assert graph.variables["attention/k"].shape.names == ("d_model", "d_kv")
    check_gradients(total, {"x": RNG.normal(size=(4, 5, 3))}, random_variables(graph))


# -- halos -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("halo", [0, 1, 2, 3, 7])
def test_halos(halo, wrap):
    """Also halos wider than a block of 2, and wider than all 10 elements on one side."""
    with mm.Graph():
        x = mm.placeholder("x", "blocks:5;size:2;other:3", "float64")
        both = mm.halo_exchange(x, "blocks", "size", halo, wrap)
        left = mm.left_halo_exchange(x, "blocks", "size", halo, wrap) * 1.0
    array = RNG.normal(size=(5, 2, 3))
    line = array.reshape(10, 3)
    padded = np.pad(line, ((halo, halo), (0, 0)), mode="wrap" if wrap else "constant")
    wanted = np.stack([padded[2 * i : 2 * i + 2 + 2 * halo] for i in range(5)])
    layouts = ("", "blocks:rows", "blocks:cols", "other:cols;blocks:rows")
    check_layouts(layouts, {both: wanted, left: wanted[:, : halo + 2]}, {"x": array}, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "call", "message"),
    [
        ("length:4;d:2", lambda q: mm.local_attention_1d(q, q, q, "length", "d", "d", 0), "window along 'length' is 0"),
        ("blocks:2;size:3", lambda x: mm.halo_exchange(x, "blocks", "size", -1), "halo: sizes are -1"),
        (
            "width:4;d_model:3",
            lambda x: mm.local_self_attention_2d(x, mm.Dimension("d", 2), mm.Dimension("h", 2), (1, 1)),
            r"x is \[width=4, d_model=3\]",
        ),
    ],
)
def test_errors(shape, call, message):
    with mm.Graph(), pytest.raises(ShapeError, match=message):
        call(mm.placeholder("x", shape))
