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
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.sources import VariableDType, get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name, rename_dimension
from meshmpi.ir.bands import Band
from meshmpi.nn.functions import TensorOrNumber, softmax, widened
from meshmpi.nn.initializers import random_normal_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, dropout_over, variable_type
from meshmpi.nn.positions import RotaryScaling, rotary

MASKED_LOGIT = -1e9
"""Finite, so that no row of logits is ever all -inf, and representable in bfloat16."""


def rename_length_to_memory_length(
    x: Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> Tensor:
    """x as the memory of an attention: a view where length is whole, a gather where it is split."""
    return rename_dimension(x, length_name, memory_length_name)


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory_length_dim: DimLike,
    key_dim: DimLike,
    value_dim: DimLike,
    mask: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    extra_logit: TensorOrNumber | None = None,
    *,
    is_training: bool = False,
    scale: float | None = None,
    position_bias: Tensor | None = None,
    band: Band | None = None,
) -> Tensor:
    """softmax(scale * q k + position_bias) v, over the memory.

    Args:
        q: [batch dims, query length, heads, key_dim] in any order.
        k: The same with ``memory_length_dim`` in place of the query length.  Dims of heads that k
            and v lack share them (multi-query and grouped-query attention).
        v: As k, with ``value_dim`` in place of ``key_dim``.
        memory_length_dim: Dim (or name) that is attended over.
        key_dim: Dim of q and k that is summed over.
        value_dim: Dim of v that is returned.
        mask: bool over dims of the logits, True where attention is allowed; every query must be
            allowed at least one memory.  Other logits are replaced by -1e9.
        dropout_rate: Share of the attention weights that is dropped in training.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        extra_logit: A logit that takes probability and returns nothing.
        is_training: Whether dropout acts.
        scale: Factor of the logits; default 1 / sqrt(size of ``key_dim``).
        position_bias: Added to the logits, over some of their dims; see `relative_position_bias`.
        band: Which pairs of a query's and a memory's position there are, as
            ``mm.Band.causal("length", "memory_length")``.  What stands outside takes no part,
            whatever its values, and whole blocks of it are not computed.

    Returns:
        The dims of q with ``value_dim`` in place of ``key_dim``.

    Source: Vaswani et al. 2017.
    """
    key, memory = q.shape.dim(dim_name(key_dim)), k.shape.dim(dim_name(memory_length_dim))
    scale = 1.0 / math.sqrt(key.size) if scale is None else scale
    # Softmax in at least float32, whatever q and k are.
    logits = widened(einsum([q, k], _logits_shape(q, k, key, memory), band=band))
    if scale != 1.0:
        logits = ew.multiply(logits, scale)
    if position_bias is not None:
        bias = ew.cast(position_bias, logits.dtype)
        logits = ew.add(logits, bias, output_shape=logits.shape)
    if mask is not None:
        logits = ew.where(mask, logits, MASKED_LOGIT, output_shape=logits.shape)
    weights = ew.cast(softmax(logits, memory, extra_logit, band=band), v.dtype)
    weights = dropout_over(weights, is_training, dropout_rate, dropout_broadcast_dims)
    value = v.shape.dim(dim_name(value_dim))
    return einsum([weights, v], Shape([value if d == key else d for d in q.shape]), band=band)


def _logits_shape(q: Tensor, k: Tensor, key: Dimension, memory: Dimension) -> Shape:
    """Dims shared by q and k, then those of q alone, then of k alone: one GEMM per shared index."""
    shared = [d for d in q.shape if d in k.shape and d != key]
    alone = [d for d in q.shape if d not in k.shape]
    extra = [d for d in k.shape if d not in q.shape and d != memory]
    return Shape([*shared, *alone, *extra, memory])


@dataclass(frozen=True)
class AttentionInitializers:
    """Initializers of the four projections of an attention layer; with ``shared_kv`` k is both."""

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


@dataclass(frozen=True)
class AttentionOptions:
    """What else an attention layer can be.

    Attributes:
        num_memory_heads: Heads of keys and values: 0 as many as queries have; 1 a single one for
            all (multi-query, Shazeer 2019); else a divisor of the number of heads, each for as many
            queries' heads (grouped-query, Ainslie et al. 2023).  The dim of heads then has this
            size, and ``query_heads`` is the rest of them.
        shared_kv: Whether keys are the values too, with one projection.
        rotary: Whether queries and keys are rotated by their positions (see `rotary`).
        rotary_base: Sets the slowest rotation.
        rotary_scaling: How rotations are slowed down for texts longer than in training.
        output_bias: Whether the output has a bias; None: if the other projections have.
    """

    num_memory_heads: int = 0
    shared_kv: bool = False
    rotary: bool = False
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    output_bias: bool | None = None

    def heads_dims(self, heads: Dimension) -> tuple[list[Dimension], list[Dimension]]:
        """(Dims of the queries' heads, those of the memory's).

        Raises:
            ShapeError: The number of memory heads does not divide that of heads.
        """
        n = self.num_memory_heads
        if n == 0 or n == heads.size:
            return [heads], [heads]
        if n < 0 or heads.size % n:
            divisors = [k for k in range(1, heads.size + 1) if heads.size % k == 0]
            raise ShapeError(f"attention: {n} memory heads do not divide {heads}.", f"Give one of {divisors}, or 0.")
        if n == 1:
            return [heads], []
        memory = Dimension(heads.name, n)
        return [memory, Dimension("query_heads", heads.size // n)], [memory]


def multihead_attention(
    query_antecedent: Tensor,
    memory_antecedent: Tensor | None,
    mask: Tensor | None,
    kv_channels: Dimension,
    heads: Dimension,
    is_training: bool = False,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    *,
    use_bias: bool = False,
    scale: float | None = None,
    initializers: AttentionInitializers | None = None,
    variable_dtype: DTypeLike = None,
    name: str | None = None,
    position_bias: Tensor | None = None,
    options: AttentionOptions = AttentionOptions(),
    causal: bool = False,
) -> Tensor:
    """Attention with heads, and its projections.

    Args:
        query_antecedent: [batch dims, query length, io].
        memory_antecedent: [batch dims, memory length, io], its length under another name; None:
            the query itself, renamed to ``memory_length`` (self-attention).
        mask: As `dot_product_attention`.
        kv_channels: Dim of keys and values of one head.
        heads: Dim of heads.
        is_training: Whether dropout acts.
        dropout_rate: Share of the attention weights that is dropped.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        use_bias: Whether the projections have biases.
        scale: Factor of the logits; default 1 / sqrt(size of ``kv_channels``).
        initializers: Default `attention_initializers`.
        variable_dtype: Types of the variables; default as `variable_type`.
        name: Variables are ``name/q``, ``k``, ``v`` [io, heads, kv] and ``name/o`` [heads, kv, io];
            biases ``name/q_bias`` and so on; with shared keys and values ``name/kv``.
        position_bias: As `dot_product_attention`.
        options: Memory heads, shared keys and values, rotations.
        causal: Whether a position sees no later memory; what it does not see is not computed.

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
    name = layer_name(name, "attention")
    x, memory = query_antecedent, memory_antecedent
    if x.shape.ndims < 2:
        raise ShapeError(f"multihead_attention: the antecedent is {x.shape}.", "Give [..., length, io].", str(x.source))
    if memory is None:
        memory = rename_length_to_memory_length(x, x.shape[-2].name)
    layer = Projections(
        x.shape[-1], kv_channels, heads, options, initializers, variable_type(variable_dtype, x), use_bias
    )
    length = memory.at(-2, "multihead_attention")
    with scope(name):
        q, (k, v) = layer.queries(x), layer.memories(memory)
        y = dot_product_attention(
            q,
            k,
            v,
            length,
            kv_channels,
            kv_channels,
            mask,
            dropout_rate,
            dropout_broadcast_dims,
            is_training=is_training,
            scale=scale,
            position_bias=position_bias,
            band=Band.causal(x.shape[-2].name, memory.shape[-2].name) if causal else None,
        )
        return layer.output(y)


class Projections:
    """The projections of an attention layer, as variables of the current scope.

    Args:
        io: Dim of input and output.
        kv: Dim of keys and values of one head.
        heads: Dim of heads.
        options: See `AttentionOptions`.
        initializers: Default `attention_initializers`.
        dtype: Types of the variables.
        use_bias: Whether all have biases.
    """

    def __init__(
        self,
        io: Dimension,
        kv: Dimension,
        heads: Dimension,
        options: AttentionOptions,
        initializers: AttentionInitializers | None,
        dtype: VariableDType,
        use_bias: bool,
    ):
        queries, memories = options.heads_dims(heads)
        self.per_query, self.per_memory = [*queries, kv], [*memories, kv]
        self.io, self.kv, self.options = io, kv, options
        self.initializers = initializers or attention_initializers(io, kv, heads)
        self.dtype, self.use_bias = dtype, use_bias

    def queries(self, x: Tensor) -> Tensor:
        """[batch dims, length, heads, kv] of [batch dims, length, io]."""
        return self._rotated(self._made(x, "q", [self.io], self.per_query), x)

    def memories(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory [batch dims, memory length, io]."""
        if self.options.shared_kv:
            kv = self._made(memory, "kv", [self.io], self.per_memory)
            return self._rotated(kv, memory), kv
        k = self._made(memory, "k", [self.io], self.per_memory)
        v = self._made(memory, "v", [self.io], self.per_memory)
        return self._rotated(k, memory), v

    def output(self, y: Tensor) -> Tensor:
        """[batch dims, length, io] of [batch dims, length, heads, kv]."""
        return self._made(y, "o", self.per_query, [self.io])

    def _rotated(self, y: Tensor, x: Tensor) -> Tensor:
        options = self.options
        if not options.rotary:
            return y
        return rotary(y, x.shape[-2], self.kv, options.rotary_base, scaling=options.rotary_scaling)

    def _made(self, x: Tensor, name: str, reduced: list[Dimension], new: list[Dimension]) -> Tensor:
        initializer = getattr(self.initializers, "k" if name == "kv" else name)
        weight = get_variable(name, Shape([*reduced, *new]), self.dtype, initializer)
        y = einsum([x, weight], Shape([*x.shape.without(d.name for d in reduced), *new]))
        biased = self.use_bias
        if name == "o" and self.options.output_bias is not None:
            biased = self.options.output_bias
        if not biased:
            return y
        bias = get_variable(f"{name}_bias", Shape(new), self.dtype, zeros_initializer(), decays=False)
        return ew.add(y, bias, output_shape=y.shape)
