"""Attention over named dimensions.

Query and memory positions are different dims ("length", "memory_length"), so a layout may split
either; renaming one into the other is where a split length is gathered.  No layout is known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.nn.functions import TensorOrNumber, softmax, widened
from meshmpi.nn.initializers import random_normal_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, dropout_over, variable_type
from meshmpi.ops import elementwise as ew
from meshmpi.ops.contraction import einsum
from meshmpi.ops.sources import VariableDType, get_variable
from meshmpi.ops.sources import range as index_range
from meshmpi.ops.structure import DimLike, dim_name, rename_dimension

MASKED_LOGIT = -1e9
"""Finite, so that no row of logits is ever all -inf, and representable in bfloat16."""


def rename_length_to_memory_length(
    x: Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> Tensor:
    """x as the memory of an attention: a view where length is whole, a gather where it is split."""
    return rename_dimension(x, length_name, memory_length_name)


def attention_mask_autoregressive(query_length: Dimension, memory_length: Dimension) -> Tensor:
    """True where a query may see a memory: [query_length, memory_length], memory <= query."""
    return ew.greater_equal(
        index_range(query_length), index_range(memory_length),
        output_shape=Shape([query_length, memory_length]),
    )  # fmt: skip


def attention_mask_ignore_padding(memory_ids: Tensor, padding_id: int = 0) -> Tensor:
    """True where a memory position holds a token: not_equal(ids, padding_id)."""
    return ew.not_equal(memory_ids, padding_id)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, memory_length_dim: DimLike, key_dim: DimLike,
    value_dim: DimLike, mask: Tensor | None = None, dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (), extra_logit: TensorOrNumber | None = None, *,
    is_training: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k) v, over the memory.

    Args:
        q: [batch dims, query length, heads, key_dim] in any order.
        k: The same with ``memory_length_dim`` in place of the query length.
        v: As k, with ``value_dim`` in place of ``key_dim``.
        memory_length_dim: Dim (or name) that is attended over.
        key_dim: Dim of q and k that is summed over.
        value_dim: Dim of v that is returned.
        mask: bool over dims of the logits, True where attention is allowed; every query must be
            allowed at least one memory.
        dropout_rate: Share of the attention weights that is dropped in training.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        extra_logit: A logit that takes probability and returns nothing.
        is_training: Whether dropout acts.
        scale: Factor of the logits; default 1 / sqrt(size of ``key_dim``).

    Returns:
        The dims of q with ``value_dim`` in place of ``key_dim``.

    Source: Vaswani et al. 2017.
    """
    key, memory = q.shape.dim(dim_name(key_dim)), k.shape.dim(dim_name(memory_length_dim))
    scale = 1.0 / math.sqrt(key.size) if scale is None else scale
    # Softmax in at least float32, whatever q and k are.
    logits = widened(einsum([q, k], _logits_shape(q, k, key, memory)))
    if scale != 1.0:
        logits = ew.multiply(logits, scale)
    if mask is not None:
        logits = ew.where(mask, logits, MASKED_LOGIT, output_shape=logits.shape)
    weights = ew.cast(softmax(logits, memory, extra_logit), v.dtype)
    weights = dropout_over(weights, is_training, dropout_rate, dropout_broadcast_dims)
    value = v.shape.dim(dim_name(value_dim))
    return einsum([weights, v], Shape([value if d == key else d for d in q.shape]))


def _logits_shape(q: Tensor, k: Tensor, key: Dimension, memory: Dimension) -> Shape:
    """Dims shared by q and k, then those of q alone, then of k alone: one GEMM per shared index."""
    shared = [d for d in q.shape if d in k.shape and d != key]
    alone = [d for d in q.shape if d not in k.shape]
    extra = [d for d in k.shape if d not in q.shape and d != memory]
    return Shape([*shared, *alone, *extra, memory])


@dataclass(frozen=True)
class AttentionInitializers:
    """Initializers of the four projections of an attention layer."""

    q: Any
    k: Any
    v: Any
    o: Any


def attention_initializers(
    io: Dimension, kv: Dimension, heads: Dimension, folded_scale: bool = False
) -> AttentionInitializers:
    """Initializers that keep variances of 1 from the input to the output.

    Args:
        io: Dim of input and output.
        kv: Dim of keys and values.
        heads: Dim of heads.
        folded_scale: As Mesh-TensorFlow has them: logits have variance 1 without a scale, and the
            output projection has variance 1 / (heads * io).
    """
    qk = io.size**-0.5 * (kv.size**-0.25 if folded_scale else 1.0)
    o = (heads.size * (io.size if folded_scale else kv.size)) ** -0.5
    v = random_normal_initializer(0.0, io.size**-0.5)
    q, k = random_normal_initializer(0.0, qk), random_normal_initializer(0.0, qk)
    return AttentionInitializers(q, k, v, random_normal_initializer(0.0, o))


def multihead_attention(
    query_antecedent: Tensor, memory_antecedent: Tensor | None, mask: Tensor | None,
    kv_channels: Dimension, heads: Dimension, is_training: bool = False, dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (), *, use_bias: bool = False,
    scale: float | None = None, initializers: AttentionInitializers | None = None,
    variable_dtype: DTypeLike = None, name: str = "attention",
) -> Tensor:  # fmt: skip
    """Attention with heads, and its projections.

    Args:
        query_antecedent: [batch dims, query length, io].
        memory_antecedent: [batch dims, memory length, io], its length under another name; None:
            the query itself, renamed to ``memory_length`` (self-attention).
        mask: As `dot_product_attention`.
        kv_channels: Dim of keys and values of one head.
        heads: Dim of heads.
        is_training: Whether dropout acts.
        dropout_rate: Of the attention weights.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        use_bias: Whether the four projections have biases.
        scale: Factor of the logits; default 1 / sqrt(size of ``kv_channels``).
        initializers: Default `attention_initializers`.
        variable_dtype: Types of the variables; default as `variable_type`.
        name: Variables are ``name/q``, ``k``, ``v`` [io, heads, kv] and ``name/o`` [heads, kv, io];
            biases ``name/q_bias`` and so on.

    Returns:
        A tensor of the shape of ``query_antecedent``.

    Lowers: where heads are split, one all_reduce of the result; where length is split, one
    all_gather of the antecedent.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;length:16;d_model:32")
        ...     heads, d_kv = mm.Dimension("heads", 4), mm.Dimension("d_kv", 8)
        ...     mm.multihead_attention(x, None, None, d_kv, heads).shape
        [batch=8, length=16, d_model=32]
    """
    x, memory = query_antecedent, memory_antecedent
    if x.shape.ndims < 2:
        raise ShapeError(
            f"multihead_attention: the antecedent is {x.shape}.", "Give [..., length, io].",
            str(x.source),
        )  # fmt: skip
    io = x.shape[-1]
    if memory is None:
        memory = rename_length_to_memory_length(x, x.shape[-2].name)
    init = initializers or attention_initializers(io, kv_channels, heads)
    dtype = variable_type(variable_dtype, x)
    per_head = [heads, kv_channels]
    with scope(name):
        q = _projection(x, "q", [io], per_head, init.q, dtype, use_bias)
        k = _projection(memory, "k", [io], per_head, init.k, dtype, use_bias)
        v = _projection(memory, "v", [io], per_head, init.v, dtype, use_bias)
        y = dot_product_attention(
            q, k, v, memory.shape[-2], kv_channels, kv_channels, mask, dropout_rate,
            dropout_broadcast_dims, is_training=is_training, scale=scale,
        )  # fmt: skip
        return _projection(y, "o", per_head, [io], init.o, dtype, use_bias)


def _projection(
    x: Tensor, name: str, reduced: list[Dimension], new: list[Dimension], initializer: Any,
    dtype: VariableDType, use_bias: bool,
) -> Tensor:  # fmt: skip
    weight = get_variable(name, Shape([*reduced, *new]), dtype, initializer)
    y = einsum([x, weight], Shape([*x.shape.without(d.name for d in reduced), *new]))
    if not use_bias:
        return y
    bias = get_variable(f"{name}_bias", Shape(new), dtype, zeros_initializer())
    return ew.add(y, bias, output_shape=y.shape)
