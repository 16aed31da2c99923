"""Masks, position embeddings, rotations, relative biases, grouped heads: against NumPy."""

import math

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError
from tests.nn.build import check_gradients, check_layouts, random_variables, value
from tests.nn.textbook import softmax

RNG = np.random.default_rng(31)
LENGTH, MEMORY = mm.Dimension("length", 6), mm.Dimension("memory_length", 8)
HEADS, KV = mm.Dimension("heads", 4), mm.Dimension("d_kv", 6)
MESH = "rows:2;cols:3"


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 20])
def test_local_masks(window):
    with mm.Graph():
        causal = mm.attention_mask_local(LENGTH, MEMORY, window)
        both = mm.attention_mask_local(LENGTH, MEMORY, window, autoregressive=False)
    distance = np.arange(6)[:, None] - np.arange(8)
    np.testing.assert_array_equal(value(causal), (distance >= 0) & (distance < window))
    np.testing.assert_array_equal(value(both), np.abs(distance) < window)


def test_packed_sequences_are_apart():
    """Attention over packed sequences is attention over each alone."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:1;length:7;d_model:6", "float64")
        segment = mm.placeholder("segment", "batch:1;length:7", "int32")
        causal = mm.attention_mask_autoregressive(mm.Dimension("length", 7), mm.Dimension("memory_length", 7))
        same = mm.attention_mask_same_segment(segment, mm.rename_length_to_memory_length(segment))
        mask = mm.logical_and(causal, same)
        y = mm.multihead_attention(x, None, mask, KV, HEADS)
    variables, array = random_variables(graph), RNG.normal(size=(1, 7, 6))
    ids = np.array([[1, 1, 1, 2, 2, 2, 2]], np.int32)
    whole = value(y, {"x": array, "segment": ids}, variables)
    changed = array.copy()
    changed[0, :3] += 1.0
    other = value(y, {"x": changed, "segment": ids}, variables)
    np.testing.assert_array_equal(other[0, 3:], whole[0, 3:])
    assert np.abs(other[0, :3] - whole[0, :3]).min() > 1e-6


# -- sinusoids and rotations -----------------------------------------------------------------------


def test_sinusoids():
    d_model = mm.Dimension("d_model", 8)
    with mm.Graph() as graph:
        y = mm.sinusoid_positions(LENGTH, d_model, dtype="float64")
    rates = 10000.0 ** (-2 * np.arange(4) / 8)
    angle = np.arange(6)[:, None] * rates
    wanted = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    np.testing.assert_allclose(value(y), wanted, rtol=1e-12, atol=1e-14)
    assert not graph.variables
    layout = "length:rows;d_model:cols"
    check_layouts([layout], {y: wanted}, {})
    assert not mm.plan(graph, MESH, layout, fetches=[y]).program.values()


def rotated(x, positions, base=10000.0):
    """Pairs as complex numbers; x [..., length, heads, d]."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * positions[..., :, None, None] * base ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag], -1)


def test_rotary():
    with mm.Graph():
        x = mm.placeholder("x", "batch:2;length:6;heads:4;d_kv:6", "float64")
        p = mm.placeholder("p", "batch:2;length:6", "int32")
        y, given = mm.rotary(x, "length", "d_kv"), mm.rotary(x, "length", "d_kv", 100.0, p)
        total = mm.reduce_sum(mm.square(y + given * 2.0))
    feeds = {"x": RNG.normal(size=(2, 6, 4, 6)), "p": np.array([[0, 1, 2, 0, 1, 2], [5] * 6])}
    wanted = [rotated(feeds["x"], np.arange(6)), rotated(feeds["x"], feeds["p"], 100.0)]
    for found, w in zip((y, given), wanted, strict=True):
        np.testing.assert_allclose(value(found, feeds), w, rtol=1e-12, atol=1e-13)
    check_gradients(total, feeds, {})
    layouts = ("length:rows;heads:cols", "d_kv:cols", "d_kv:rows;length:cols")
    check_layouts(layouts, dict(zip((y, given), wanted, strict=True)), feeds, rtol=1e-12)


def test_rotated_products_depend_on_distance_only():
    with mm.Graph():
        x = mm.placeholder("x", "length:6;d_kv:6", "float64")
        y = mm.rotary(x, "length", "d_kv")
    vector = np.tile(RNG.normal(size=6), (6, 1))
    r = value(y, {"x": vector})
    products = r @ r.T
    for k in range(1, 5):
        np.testing.assert_allclose(np.diag(products, k), products[0, k], rtol=1e-12)


def test_odd_sizes():
    with mm.Graph(), pytest.raises(ShapeError, match="d_kv=5.* odd"):
        mm.rotary(mm.placeholder("x", "length:4;d_kv:5"), "length", "d_kv")
    with mm.Graph(), pytest.raises(ShapeError, match="d_model=5.* odd"):
        mm.sinusoid_positions(LENGTH, mm.Dimension("d_model", 5))


# -- relative positions ----------------------------------------------------------------------------


def bucket(distance, bidirectional, buckets, furthest):
    """T5's formula; memory minus query."""
    n, first = -distance, 0
    if bidirectional:
        buckets //= 2
        first = buckets if n < 0 else 0
        n = abs(n)
    n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return first + n
    share = math.log(n / exact) / math.log(furthest / exact)
    return first + min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (6, 7)])
def test_buckets(bidirectional, buckets, furthest):
    distances = np.arange(-300, 301)
    with mm.Graph():
        x = mm.placeholder("x", "n:601", "int32")
        y = mm.relative_position_bucket(x, bidirectional, buckets, furthest)
    found = value(y, {"x": distances})
    wanted = [bucket(int(d), bidirectional, buckets, furthest) for d in distances]
    np.testing.assert_array_equal(found, wanted)
    assert found.min() == 0 and found.max() == buckets - 1


def test_too_few_buckets():
    with mm.Graph(), pytest.raises(ShapeError, match="2 buckets up to distance 128"):
        mm.relative_position_bucket(mm.placeholder("x", "n:3", "int32"), True, 2)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bias_shared_by_layers(bidirectional):
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:6;d_model:6", "float64")
        memory = mm.rename_length_to_memory_length(x)
        bias = mm.relative_position_bias(
            HEADS, LENGTH, memory.shape.dim("memory_length"), bidirectional, 8, 20, "float64"
        )
        first, second = (
            mm.multihead_attention(x, None, None, KV, HEADS, position_bias=bias, name=n) for n in ("one", "two")
        )
        total = mm.reduce_sum(mm.square(first + second))
    assert [n for n in graph.variables if "/" not in n] == ["relative_position_bias"]
    v, array = random_variables(graph), RNG.normal(size=(2, 6, 6))
    index = [[bucket(m - q, bidirectional, 8, 20) for m in range(6)] for q in range(6)]
    table = v["relative_position_bias"][:, index]
    np.testing.assert_array_equal(value(bias, {}, v), table)
    q, k, val = (np.einsum("bld,dhk->bhlk", array, v[f"one/{n}"]) for n in "qkv")
    weights = softmax(q @ k.swapaxes(2, 3) / np.sqrt(6) + table)
    wanted = np.einsum("bhlk,hkd->bld", weights @ val, v["one/o"])
    np.testing.assert_allclose(value(first, {"x": array}, v), wanted, rtol=1e-11, atol=1e-13)
    check_gradients(total, {"x": array}, v)
    layouts = ("heads:rows;length:cols", "memory_length:cols", "buckets:rows")
    check_layouts(layouts, {total: value(total, {"x": array}, v)}, {"x": array}, v, rtol=1e-12)


# -- heads of the memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory_heads", [0, 1, 2, 4])
def test_grouped_heads(memory_heads, shared, use_bias):
    """Every memory head, repeated for its group of queries' heads, in ordinary attention."""
    options = mm.AttentionOptions(memory_heads, shared)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:2;length:6;d_model:6", "float64")
        m = mm.placeholder("m", "batch:2;memory_length:8;d_model:6", "float64")
        seen = mm.placeholder("seen", "batch:2;memory_length:8", "bool")
        y = mm.multihead_attention(x, m, seen, KV, HEADS, options=options, use_bias=use_bias)
        total = mm.reduce_sum(mm.square(y))
    v = random_variables(graph)
    feeds = {"x": RNG.normal(size=(2, 6, 6)), "m": RNG.normal(size=(2, 8, 6))}
    feeds["seen"] = np.arange(8) < np.array([[8], [5]])
    groups = memory_heads or 4

    def project(a, name, heads):
        bias = v.get(f"attention/{name}_bias", np.zeros(heads * 6)).reshape(heads, 6)
        made = np.einsum("bld,dhk->blhk", a, v[f"attention/{name}"].reshape(6, heads, 6)) + bias
        return np.repeat(made, 4 // heads, axis=2)

    q = project(feeds["x"], "q", 4)
    k = project(feeds["m"], "kv" if shared else "k", groups)
    val = k if shared else project(feeds["m"], "v", groups)
    logits = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(6)
    weights = softmax(np.where(feeds["seen"][:, None, None], logits, -np.inf))
    out = np.einsum("bhlm,bmhk->blhk", weights, val).reshape(2, 6, 24)
    wanted = out @ v["attention/o"].reshape(24, 6) + v.get("attention/o_bias", 0)
    np.testing.assert_allclose(value(y, feeds, v), wanted, rtol=1e-11, atol=1e-13)
    check_gradients(total, feeds, v)
    check_layouts(("heads:cols;batch:rows", "query_heads?:rows;d_kv:cols", "length:cols"), {y: wanted}, feeds, v)


def test_heads_that_do_not_divide():
    with mm.Graph(), pytest.raises(ShapeError, match="3 memory heads do not divide heads=4"):
        x = mm.placeholder("x", "length:6;d_model:6")
        mm.multihead_attention(x, None, None, KV, HEADS, options=mm.AttentionOptions(3))
