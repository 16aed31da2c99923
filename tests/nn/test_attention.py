"""Attention against NumPy, with gradients."""

import numpy as np
import pytest

from meshmpi import nn
from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Graph, ops
from tests.nn.build import check_gradients, random_variables, value
from tests.nn.textbook import softmax

RNG = np.random.default_rng(11)
HEADS, KV = Dimension("heads", 2), Dimension("d_kv", 3)
X = RNG.normal(size=(2, 4, 6))


def attend(x, memory, v, prefix="attention", mask=None, scale=3**-0.5):
    """Attention as a textbook writes it; ``v`` are the variables."""

    def project(a, name):
        return np.einsum("nld,dhk->nhlk", a, v[f"{prefix}/{name}"]) + v.get(
            f"{prefix}/{name}_bias", np.zeros((2, 3))
        ).reshape(1, 2, 1, 3)

    q, k, val = project(x, "q"), project(memory, "k"), project(memory, "v")
    logits = np.einsum("nhqk,nhmk->nhqm", q, k) * scale
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    y = np.einsum("nhqm,nhmk->nqhk", softmax(logits), val)
    return np.einsum("nqhk,hkd->nqd", y, v[f"{prefix}/o"]) + v.get(f"{prefix}/o_bias", 0)


def build(causal=True, memory=False, **options):
    with Graph() as graph:
        x = ops.placeholder("x", "batch:2;length:4;d_model:6", "float64")
        m, n = None, 4
        if memory:
            m, n = ops.placeholder("m", "batch:2;memory_length:5;d_model:6", "float64"), 5
        mask = None
        if causal:
            mask = nn.attention_mask_autoregressive(Dimension("length", 4), Dimension("memory_length", n))
        return graph, nn.multihead_attention(x, m, mask, KV, HEADS, **options)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(causal, use_bias):
    graph, y = build(causal, use_bias=use_bias)
    variables = random_variables(graph)
    mask = np.tril(np.ones((4, 4), bool)) if causal else None
    assert y.shape.names == ("batch", "length", "d_model")
    found = value(y, {"x": X}, variables)
    np.testing.assert_allclose(found, attend(X, X, variables, mask=mask), rtol=1e-11, atol=1e-13)
    with graph:
        total = ops.reduce_sum(ops.square(y))
    # A key's bias adds the same number to all logits of a query: its gradient is 0.
    check_gradients(total, {"x": X}, variables)


def test_attention_to_a_memory_with_padding():
    with Graph() as graph:
        x = ops.placeholder("x", "batch:2;length:4;d_model:6", "float64")
        m = ops.placeholder("m", "batch:2;memory_length:5;d_model:6", "float64")
        ids = ops.placeholder("ids", "batch:2;memory_length:5", "int32")
        mask = nn.attention_mask_ignore_padding(ids)
        y = nn.multihead_attention(x, m, mask, KV, HEADS, scale=1.0, name="cross")
        total = ops.reduce_sum(ops.square(y))
    memory = RNG.normal(size=(2, 5, 6))
    feeds = {"x": X, "m": memory, "ids": np.array([[3, 1, 2, 0, 0], [1, 1, 1, 1, 1]], np.int32)}
    variables = random_variables(graph)
    seen = (feeds["ids"] != 0)[:, None, None, :]
    expected = attend(X, memory, variables, "cross", seen, 1.0)
    np.testing.assert_allclose(value(y, feeds, variables), expected, rtol=1e-11, atol=1e-13)
    check_gradients(total, feeds, variables)


def test_shapes_are_the_ones_that_map_to_batched_products():
    graph, _ = build()
    shapes = [op.output.shape.names for op in graph.operations if type(op).__name__ == "Einsum"]
    assert ("batch", "heads", "length", "memory_length") in shapes
    assert ("batch", "length", "heads", "d_kv") in shapes


def test_only_the_antecedent_is_renamed():
    """One rename of [batch, length, d_model]: with a split length one gather, not two."""
    graph, _ = build()
    reshapes = [op for op in graph.operations if type(op).__name__ == "Reshape"]
    assert [op.inputs[0].name for op in reshapes] == ["x"]


def test_bfloat16_softmax_is_float32():
    with Graph():
        q = ops.placeholder("q", "length:4;heads:2;d_kv:3", "bfloat16")
        k = ops.placeholder("k", "memory_length:4;heads:2;d_kv:3", "bfloat16")
        y = nn.dot_product_attention(q, k, k, "memory_length", KV, KV)
    assert y.dtype == "bfloat16"
    exps = [op for op in y.graph.operations if getattr(op, "function", "") == "exp"]
    assert [op.output.dtype for op in exps] == ["float32"]


def test_initializers_fold_the_scale():
    io = Dimension("d_model", 16)
    plain = nn.attention_initializers(io, Dimension("k", 4), HEADS)
    folded = nn.attention_initializers(io, Dimension("k", 4), HEADS, folded_scale=True)
    scales = [[getattr(i, n).resolve(Shape()).scale for n in "qkvo"] for i in (plain, folded)]
    assert scales[0] == pytest.approx([0.25, 0.25, 0.25, 8**-0.5])
    assert scales[1] == pytest.approx([0.25 * 4**-0.25] * 2 + [0.25, 32**-0.5])


def test_bad_antecedent():
    with Graph(), pytest.raises(ShapeError, match=r"antecedent is \[d_model=6\]"):
        nn.multihead_attention(ops.placeholder("x", "d_model:6"), None, None, KV, HEADS)
