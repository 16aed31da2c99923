"""Rows of the table for layers whose traffic is their point: experts, local attention, halos.

Their graphs are large, so each is tried with few layouts; tests/nn has many more.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshmpi as mm
from meshmpi.graph import Tensor, current_graph
from meshmpi.ir.scalar import FLOATS
from tests.ops.build import Builder, data
from tests.ops.elementwise_cases import case


def given(b: Builder, ys: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same, after the variables that layers made have got values that the oracle knows."""
    for v in current_graph().variables.values():
        if v.name not in b.variables and v.dtype in FLOATS:
            b.variables[v.name] = data("signed", v.shape.sizes, b.rng)
            v.initializer = b.variables[v.name]
            (b.sources[v.name],) = (t for key, t in v._reads.items() if key != "stored")
    return ys


# -- mixtures of experts: a rows of b tokens, io c, hidden k ---------------------------------------


@case(limit=3)
def experts_two_choices_in_groups(b: Builder) -> Sequence[Tensor]:
    x, gating = b.feed("x", "a b c"), mm.Gating(choices=2, group_size=3, min_capacity=1, z_loss=0.1)
    mask = mm.greater(b.feed("_m", "a b"), -1.0)
    found = mm.mixture_of_experts(x, b.e, b.k, gating, True, mask=mask, activation="tanh")
    return given(b, [found.output, found.loss])


@case(limit=3)
def experts_choose_tokens(b: Builder) -> Sequence[Tensor]:
    x, gating = b.feed("x", "a b c"), mm.Gating(chooser="experts", min_capacity=1)
    return given(b, [mm.mixture_of_experts(x, b.e, b.k, gating, True, activation="tanh").output])


# -- local attention: a rows, b positions, c heads, e numbers per head -----------------------------


@case(limit=6)
def local_attention_of_earlier_positions(b: Builder) -> Sequence[Tensor]:
    q, k, v = (b.feed(n, "a b c e") for n in "qkv")
    return [mm.local_attention_1d(q, k, v, b.b, b.e, b.e, 3, block_length=2)]


@case(limit=4)
def local_attention_of_both_sides(b: Builder) -> Sequence[Tensor]:
    q, (k, v) = b.feed("q", "a b c e"), (b.feed(n, "a b e") for n in "kv")
    return [mm.local_attention_1d(q, k, v, b.b, b.e, b.e, 2, autoregressive=False)]


@case(limit=3)
def local_attention_of_images(b: Builder) -> Sequence[Tensor]:
    q, k, v = (b.feed(n, "a b e") for n in "qkv")
    return [mm.local_attention_2d(q, k, v, [b.a, b.b], b.e, b.e, (2, 3), block=(2, 2))]


@case(limit=10)
def halos(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a e b")
    return [mm.halo_exchange(x, b.a, b.e, 1), mm.left_halo_exchange(x, b.a, b.b, 9, wrap=True)]


# -- attention with options ------------------------------------------------------------------------


@case(limit=3)
def attention_with_grouped_heads_and_positions(b: Builder) -> Sequence[Tensor]:
    # heads k, keys of e numbers; uneven b positions may be split, the pairs of e too.
    x, heads = b.feed("x", "a b c"), mm.Dimension("heads", 4)
    options = mm.AttentionOptions(num_memory_heads=2, rotary=True)
    (dims, _), memory = options.heads_dims(heads), b.b._replace(name="memory_length")
    bias = mm.relative_position_bias(dims, b.b, memory, True, 8, 20, "float64")
    y = mm.multihead_attention(x, None, None, b.e, heads, position_bias=bias, options=options)
    return given(b, [y])


@case(limit=5)
def attention_to_means(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a c k")
    y = mm.multihead_self_attention_memory_compressed(x, True, 3, b.e, mm.Dimension("heads", 2))
    return given(b, [y])


@case(limit=6)
def gated_units_and_norms(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    h = mm.dense_product(mm.scale_norm(x, "b"), "b", b.c, "swiglu")
    return given(b, [mm.rezero(mm.rms_norm_subsampled(h, "c", 0.5)), mm.corr(x, mm.tanh(x), "a")])


@case(limit=8)
def cross_entropy_with_all_options(b: Builder) -> Sequence[Tensor]:
    logits, targets = b.feed("x", "a b c"), b.index("t", "a c", 0, b.b.size)
    loss = mm.softmax_cross_entropy_with_logits(logits, targets, "b", 0.01, 0.2)
    return [loss, mm.clip_activation_gradient(logits, 100.0)]
