"""Attention over named dimensions, and attention masks.

Query and memory positions are different dimensions ("length", "memory_length"), so a layout may split either; a split
length is gathered where one is renamed to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, part, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.positions import band_mask
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import VariableDType, get_variable
from meshmpi.graph.ops.structure import DimLike, concat, dim_name, rename_dimension, reshape
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.ir.bands import Band
from meshmpi.nn.functions import TensorOrNumber, softmax, widened
from meshmpi.nn.initializers import random_normal_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, dropout_over, variable_type
from meshmpi.nn.normalization import rms_norm
from meshmpi.nn.positions import RotaryScaling, rotary

MASKED_LOGIT = -1e9
"""Finite, so that no row of logits is ever all -inf, and representable in bfloat16."""

# -- from queries, keys and values ---------------------------------------------------------------


def rename_length_to_memory_length(
    x: Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> Tensor:
    """x as the memory of an attention: a view where length is whole, a gather where it is split."""
    return rename_dimension(x, length_name, memory_length_name)


class Weighting(NamedTuple):
    """How attention weights are made of products of queries and keys; see `dot_product_attention`."""

    is_training: bool
    dropout_rate: float
    dropout_broadcast_dims: Sequence[DimLike]
    scale: float | None
    mask: Tensor | None = None
    band: Band | None = None
    position_bias: Tensor | None = None
    extra_logit: TensorOrNumber | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, memory: DimLike, key: DimLike, value: DimLike) -> Tensor:
        """The weighted means of v."""
        key_dim, memory_dim = q.shape.dim(dim_name(key)), k.shape.dim(dim_name(memory))
        scale = 1.0 / math.sqrt(key_dim.size) if self.scale is None else self.scale
        # Softmax in at least float32, whatever q and k are.
        with part("attention_weights"):
            logits = widened(einsum([q, k], _logits_shape(q, k, key_dim, memory_dim), band=self.band))
            if scale != 1.0:
                logits = ew.multiply(logits, scale)
            if self.position_bias is not None:
                logits = ew.add(logits, ew.cast(self.position_bias, logits.dtype), output_shape=logits.shape)
            if self.mask is not None:
                logits = ew.where(self.mask, logits, MASKED_LOGIT, output_shape=logits.shape)
            weights = ew.cast(softmax(logits, memory_dim, self.extra_logit, band=self.band), v.dtype)
        # Outside: random numbers depend on the name.
        weights = dropout_over(weights, self.is_training, self.dropout_rate, self.dropout_broadcast_dims)
        value_dim = v.shape.dim(dim_name(value))
        with part("weighted_values"):
            return einsum([weights, v], Shape([value_dim if d == key_dim else d for d in q.shape]), band=self.band)


def _logits_shape(q: Tensor, k: Tensor, key: Dimension, memory: Dimension) -> Shape:
    """Dims shared by q and k, then those of q alone, then of k alone: one GEMM per shared index."""
    shared = [d for d in q.shape if d in k.shape and d != key]
    alone = [d for d in q.shape if d not in k.shape]
    extra = [d for d in k.shape if d not in q.shape and d != memory]
    return Shape([*shared, *alone, *extra, memory])


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
        band: Pairs of query and memory positions, as ``mm.Band.causal("length", "memory_length")``.
            What stands outside takes no part, whatever its values, and whole blocks of it are not computed.

    Returns:
        The dims of q with ``value_dim`` in place of ``key_dim``.

    Source: Vaswani et al. 2017.
    """
    dropout = (is_training, dropout_rate, dropout_broadcast_dims)
    how = Weighting(*dropout, scale, mask, band, position_bias, extra_logit)
    return how.attend(q, k, v, memory_length_dim, key_dim, value_dim)


# -- layers with projections -----------------------------------------------------------------------


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
    q, k, v, out = (random_normal_initializer(0.0, stddev) for stddev in (qk, qk, io.size**-0.5, o))
    return AttentionInitializers(q, k, v, out)


@dataclass(frozen=True)
class AttentionOptions:
    """Variants of an attention layer.

    Attributes:
        num_memory_heads: Heads of keys and values: 0: one for each head of the queries; 1: a single
            one for all (multi-query, Shazeer 2019); else a divisor of the number of heads (grouped-query,
            Ainslie et al. 2023).  The dim of heads then has this size, and ``query_heads`` is the rest.
        shared_kv: Whether keys are the values too, with one projection.
        rotary: Whether queries and keys are rotated by their positions (see `rotary`).
        rotary_base: Sets the slowest rotation.
        rotary_scaling: How rotations are slowed down for texts longer than in training.
        output_bias: Whether the output has a bias; None: if the other projections have.
        query_norm: RMS norm of queries and keys before rotation: "head" over each head, "all" over all
            heads together; "": none.
        norm_epsilon: Number added to the mean square of that norm.
        rotary_width: How many elements of a head are rotated, the first ones; 0: all.
    """

    num_memory_heads: int = 0
    shared_kv: bool = False
    rotary: bool = False
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    output_bias: bool | None = None
    query_norm: str = ""
    norm_epsilon: float = 1e-6
    rotary_width: int = 0

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


_PARTS = {"q": "queries", "k": "keys", "v": "values", "kv": "keys_and_values", "o": "output"}
"""Variable -> what the product with it is called in pictures and lists."""


@dataclass(frozen=True)
class Projections:
    """The projections of an attention layer, as variables of the current scope.

    Attributes:
        io: Dim of input and output.
        kv: Dim of keys and values of one head.
        positions: Where the tokens stand that are rotated; None: at 0, 1, 2, ...
    """

    io: Dimension
    kv: Dimension
    heads: Dimension
    options: AttentionOptions
    initializers: AttentionInitializers | None
    dtype: VariableDType
    use_bias: bool
    positions: Tensor | None = None

    @property
    def per_query(self) -> list[Dimension]:
        return [*self.options.heads_dims(self.heads)[0], self.kv]

    @property
    def per_memory(self) -> list[Dimension]:
        return [*self.options.heads_dims(self.heads)[1], self.kv]

    def around(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, memory: Tensor, name: str
    ) -> Tensor:
        """The layer: ``attend`` of the queries of x, and the keys and values of a memory."""
        with scope(name):
            return self.output(attend(self.queries(x), *self.memories(memory)))

    def queries(self, x: Tensor) -> Tensor:
        """[batch dims, length, heads, kv] of [batch dims, length, io]."""
        return self._rotated(self._made(x, "q", [self.io], self.per_query), x, "q_norm")

    def memories(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory [batch dims, memory length, io]."""
        if self.options.shared_kv:
            kv = self._made(memory, "kv", [self.io], self.per_memory)
            return self._rotated(kv, memory, "k_norm"), kv
        k, v = (self._made(memory, name, [self.io], self.per_memory) for name in ("k", "v"))
        return self._rotated(k, memory, "k_norm"), v

    def output(self, y: Tensor) -> Tensor:
        """[batch dims, length, io] of [batch dims, length, heads, kv]."""
        return self._made(y, "o", self.per_query, [self.io])

    def _rotated(self, y: Tensor, x: Tensor, norm: str) -> Tensor:
        """Queries or keys y of x, normalised and rotated as the options say."""
        o = self.options
        if o.query_norm:
            heads = self.per_query if norm == "q_norm" else self.per_memory
            y = rms_norm(y, heads if o.query_norm == "all" else self.kv, o.norm_epsilon, norm, True, self.dtype)
        if not o.rotary:
            return y
        how, width, whole = (o.rotary_base, self.positions, o.rotary_scaling), o.rotary_width, self.kv.size
        if width in (0, whole):
            return rotary(y, x.shape[-2], self.kv, *how)
        turned = rotary(slice_dim(y, 0, width, self.kv.name), x.shape[-2], self.kv.name, *how)
        return concat([turned, slice_dim(y, width, whole - width, self.kv.name)], self.kv.name)

    def _made(self, x: Tensor, name: str, reduced: list[Dimension], new: list[Dimension]) -> Tensor:
        initializers = self.initializers or attention_initializers(self.io, self.kv, self.heads)
        initializer = getattr(initializers, "k" if name == "kv" else name)
        weight = get_variable(name, Shape([*reduced, *new]), self.dtype, initializer)
        with part(_PARTS[name]):
            y = einsum([x, weight], Shape([*x.shape.without(d.name for d in reduced), *new]))
        own = self.options.output_bias if name == "o" else None
        if not (self.use_bias if own is None else own):
            return y
        bias = get_variable(f"{name}_bias", Shape(new), self.dtype, zeros_initializer(), decays=False)
        with part(_PARTS[name]):
            return ew.add(y, bias, output_shape=y.shape)


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

    For mask, dropout, scale and position_bias see `dot_product_attention`.

    Args:
        query_antecedent: [batch dims, query length, io].
        memory_antecedent: [batch dims, memory length, io], its length under another name; None: the query
            itself, renamed to ``memory_length`` (self-attention).
        kv_channels, heads: Dims of keys and values of one head, and of heads.
        use_bias: Whether the projections have biases.
        initializers, variable_dtype: Default `attention_initializers` and `variable_type`.
        name: Variables are ``name/q``, ``k``, ``v`` [io, heads, kv] and ``name/o`` [heads, kv, io];
            biases ``name/q_bias`` and so on; with shared keys and values ``name/kv``.
        options: Memory heads, shared keys and values, rotations.
        causal: Whether a position sees no later memory; what it does not see is not computed.

    Lowers: where heads are split, one all_reduce of the result; where length is split, one
    all_gather of the antecedent.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;length:16;d_model:32")
        ...     heads, d_kv = mm.Dimension("heads", 4), mm.Dimension("d_kv", 8)
        ...     mm.multihead_attention(x, None, None, d_kv, heads).shape
        [batch=8, length=16, d_model=32]
    """
    name, x, memory = layer_name(name, "attention"), query_antecedent, memory_antecedent
    if x.shape.ndims < 2:
        raise ShapeError(f"multihead_attention: the antecedent is {x.shape}.", "Give [..., length, io].", str(x.source))
    if memory is None:
        memory = rename_length_to_memory_length(x, x.shape[-2].name)
    length, kv, dtype = memory.at(-2, "multihead_attention"), kv_channels, variable_type(variable_dtype, x)
    band = Band.causal(x.shape[-2].name, length.name) if causal else None
    how = Weighting(is_training, dropout_rate, dropout_broadcast_dims, scale, mask, band, position_bias)
    layer = Projections(x.shape[-1], kv, heads, options, initializers, dtype, use_bias)
    return layer.around(lambda q, k, v: how.attend(q, k, v, length, kv, kv), x, memory, name)


def compress_mean(x: Tensor, dim: DimLike, compression_factor: int) -> Tensor:
    """Means of ``compression_factor`` neighbours along ``dim``, which keeps its name.

    Args:
        x: Any floating-point tensor.
        dim: The dim (or its name); its size must be a multiple of the factor.
        compression_factor: Elements in a mean.

    Lowers: nothing, where every rank holds whole groups; else an exchange first.

    Source: Mesh-TensorFlow's compress_mean.
    """
    whole = x.shape.dim(dim_name(dim))
    if compression_factor < 1 or whole.size % compression_factor:
        raise ShapeError(
            f"compress_mean: {compression_factor} does not divide {whole}.", "Give a divisor, or pad x.", str(x.source)
        )
    i = x.shape.position(whole.name)
    few = Dimension(whole.name, whole.size // compression_factor)
    group = Dimension(f"_{whole.name}_group", compression_factor)
    x = reshape(x, Shape([*x.shape[:i], few, group, *x.shape[i + 1 :]]))
    return reduce_mean(x, reduced_dim=group)


def multihead_self_attention_memory_compressed(
    x: Tensor,
    mask_right: bool,
    compression_factor: int,
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
    options: AttentionOptions = AttentionOptions(),
) -> Tensor:
    """Self-attention whose memories are means of groups of positions.

    The other arguments are those of `multihead_attention`.

    Args:
        x: [batch dims, length, io].
        mask_right: Whether a query sees only groups that have ended: those all of whose positions
            are its own or earlier.  (The reference shows it all of the group it stands in.)  A logit of 0
            that returns nothing is added, so that the first queries, which see no group, get 0.
        compression_factor: Positions in a group; must divide the length.

    Lowers: as `multihead_attention`; where length is split, what is gathered is smaller by the factor.

    Source: Liu et al. 2018; Mesh-TensorFlow's function of that name.
    """
    name, what = layer_name(name, "attention"), "multihead_self_attention_memory_compressed"
    if options.rotary:
        raise ShapeError(
            "memory-compressed attention: a mean of positions has no position to rotate by.",
            "Use options without rotary.",
        )
    length, kv, dtype = x.at(-2, what), kv_channels, variable_type(variable_dtype, x)
    memory = rename_length_to_memory_length(compress_mean(x, length, compression_factor), length.name)
    layer = Projections(x.shape[-1], kv, heads, options, initializers, dtype, use_bias)
    groups, mask = memory.shape[-2], None
    if mask_right:
        last = ew.add(ew.multiply(index_range(groups), compression_factor), compression_factor - 1)
        mask = ew.greater_equal(index_range(length), last, output_shape=Shape([length, groups]))
    how = Weighting(is_training, dropout_rate, dropout_broadcast_dims, scale, mask)
    how = how._replace(extra_logit=0.0 if mask_right else None)
    return layer.around(lambda q, k, v: how.attend(q, k, v, groups, kv, kv), x, memory, name)


# -- masks -----------------------------------------------------------------------------------------
# bool over query and memory positions, True where allowed; `mm.logical_and` combines them.  They are
# data: every pair is computed.  A `mm.Band` says what depends on distances only, and pairs outside it
# do not exist.


def attention_mask_autoregressive(query_length: Dimension, memory_length: Dimension) -> Tensor:
    """True where a query may see a memory: [query_length, memory_length], memory <= query."""
    return band_mask(Band.causal(query_length.name, memory_length.name), query_length, memory_length)


def attention_mask_ignore_padding(memory_ids: Tensor, padding_id: int = 0) -> Tensor:
    """True where a memory position holds a token: not_equal(ids, padding_id)."""
    return ew.not_equal(memory_ids, padding_id)


def attention_mask_same_segment(query_segment: Tensor, memory_segment: Tensor) -> Tensor:
    """True where both are of one segment, so that packed sequences do not see each other.

    Args:
        query_segment: Integers [batch dims, query length], the number of each position's sequence.
        memory_segment: The same over [batch dims, memory length].
    """
    return ew.equal(query_segment, memory_segment)


def attention_mask_local(
    query_length: Dimension, memory_length: Dimension, window: int, autoregressive: bool = True
) -> Tensor:
    """True where a memory is less than ``window`` positions away, and not later if autoregressive.

    Returns:
        [query_length, memory_length].  With ``window`` 1 a position sees itself only.
    """
    band = Band.local(query_length.name, memory_length.name, window, autoregressive)
    return band_mask(band, query_length, memory_length)
