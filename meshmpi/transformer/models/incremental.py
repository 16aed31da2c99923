"""Builds decoders that take a few tokens at a time and cache the keys and values of earlier ones.

Caches are variables [memory_length, batch, heads, d_kv] (with beams [.., batch, beam, ..]). New rows are written in
place; the first positions of a cache are contiguous, so the cost of a program depends only on the positions that it
looks at. Each row of the batch has its own position. Projections, norms and layers are those of `lm` and
`encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, ShapeError
from meshmpi.graph import Tensor, Update, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import gather, put
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.sources import assign
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.attention import Projections, attention_mask_ignore_padding, dot_product_attention
from meshmpi.nn.positions import bias_of_distance
from meshmpi.transformer.models.caches import (
    CACHE_K,
    CACHE_V,
    MEMORY,
    OF_BEAMS,
    cache_variable,
    projections,
    source_ids,
    undropped,
)
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.stack import Stack, layer_scope
from meshmpi.transformer.models.transformers import check_tokens


@dataclass(frozen=True)
class Chunk:
    """The tokens that a decoder is given in one call, and how far it looks back.

    Attributes:
        tokens: int32 [batch, length], or [batch, beam, length].
        start: int32 [batch], the position of the first of them in each row.
        count: int32 [batch], how many of them are there; the others change nothing.
        memory: Positions that caches hold.
        seen: Positions that are looked at: all up to ``start + count`` of every row.
    """

    tokens: Tensor
    start: Tensor
    count: Tensor
    memory: int
    seen: int

    def __post_init__(self) -> None:
        check_tokens(self.tokens, "tokens", "length")
        if not 1 <= self.length.size <= self.seen <= self.memory:
            raise ShapeError(
                f"Chunk: length is {self.length.size}, seen is {self.seen} and memory is {self.memory}.",
                "Give 1 <= length <= seen <= memory.",
                str(self.tokens.source),
            )

    @property
    def length(self) -> Dimension:
        return self.tokens.shape[-1]

    @property
    def rows(self) -> Shape:
        """[batch], or [batch, beam]."""
        return self.tokens.shape.without(["length"])

    def positions(self) -> Tensor:
        """int32 [batch, length]: where every token stands."""
        shape = self.start.shape + [self.length]
        return ew.add(self.start, index_range(self.length), output_shape=shape)


@dataclass
class Decoded:
    """The result of one call of a decoder.

    Attributes:
        logits: [batch, vocab] (or [batch, beam, vocab]) of the token after the last of each row.
        updates: Updates of the caches; all must be made.
    """

    logits: Tensor
    updates: list[Update] = field(default_factory=list[Update])


def incremental_lm(config: TransformerConfig, chunk: Chunk) -> Decoded:
    """`lm` of texts whose tokens before those of ``chunk`` were given in earlier calls.

    The parameters are those of `lm`.  Experts take all tokens that come, so that a text does not
    depend on the other rows: equal to `lm` where that drops none.

    Args:
        config: The model.
        chunk: The new tokens.

    Returns:
        The logits that `lm` gives at the last token of each row, and the updates of the caches.

    Lowers: where memory_length is split, three small all_reduces per layer for the softmax; the rest as `lm`.
    """
    stack = Stack(undropped(config))
    with scope("decoder"):
        table, positions = stack.token_embedding(), stack.position_embedding()
        return _decoded(stack, chunk, table, positions)


def incremental_decoder(config: TransformerConfig, chunk: Chunk, source_length: int) -> Decoded:
    """The decoder of `encoder_decoder`, for the sources that `encoder_caches` was given.

    Args:
        config: The model.
        chunk: The new tokens of the target.
        source_length: Length of those sources.
    """
    stack, source = Stack(undropped(config.decoder_stack)), Dimension(MEMORY, source_length)
    table, positions = stack.token_embedding("decoder"), stack.position_embedding()
    batch = chunk.rows.dim("batch")
    seen = attention_mask_ignore_padding(source_ids(batch, source), config.padding_id)

    def attend(h: Tensor) -> Tensor:
        with scope("encdec_attention"):
            layer = projections(stack.config, h, None)
            shape = Shape([source, batch, *layer.per_memory])
            k, v = (cache_variable(name, shape, h.dtype) for name in (CACHE_K, CACHE_V))
            return layer.output(_attention(stack.config, layer.queries(h), k, v, seen, None))

    with scope("decoder"):
        return _decoded(stack, chunk, table, positions, lambda x: stack.sublayer(x, "encdec_attention", attend))


def _decoded(
    stack: Stack, chunk: Chunk, table: Tensor, positions: Tensor | None, cross: Callable[[Tensor], Tensor] = lambda x: x
) -> Decoded:
    """The decoder; ``cross`` is the sublayer between self-attention and feed-forward layer."""
    config = stack.config
    if config.token_dropout:
        raise ConfigError(
            f"token_dropout is {config.token_dropout}: the embeddings of a text then depend on its later tokens.",
            "Decode with a config without token_dropout.",
        )
    look = _Look(config, chunk)
    x = stack.embed(chunk.tokens, table, positions, places=look.positions)
    for i in range(config.layers):
        with layer_scope(i):
            x = stack.feed_forward(cross(stack.sublayer(x, "attention", look.attend)), x, i)
    x = stack.final(x)
    last = ew.maximum(ew.subtract(chunk.count, 1), 0)
    return Decoded(stack.logits(gather(x, last, "length"), table), look.updates)


def _attention(config: TransformerConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    return dot_product_attention(
        q, k, v, MEMORY, config.kv_dim, config.kv_dim, mask, scale=config.attention_scale, position_bias=bias
    )


class _Look:
    """Attention of the tokens of a chunk to themselves and to all before them."""

    def __init__(self, config: TransformerConfig, chunk: Chunk):
        self.config, self.chunk = config, chunk
        self.positions = chunk.positions()
        real = ew.less(index_range(chunk.length), chunk.count, output_shape=self.positions.shape)
        self.rows = ew.where(real, self.positions, -1)
        self.held, self.seen = Dimension(MEMORY, chunk.memory), Dimension(MEMORY, chunk.seen)
        self.distance = ew.subtract(
            index_range(self.seen), self.positions, output_shape=self.positions.shape + [self.seen]
        )
        self.mask = ew.less_equal(self.distance, 0)
        if config.local_window:
            back = ew.negative(self.distance)
            self.mask = ew.logical_and(ew.greater_equal(back, 0), ew.less(back, config.local_window))
        self.bias = self._bias()
        self.updates: list[Update] = []

    def _bias(self) -> Tensor | None:
        config = self.config
        if not config.relative_buckets:
            return None
        heads, _ = config.attention_options().heads_dims(config.heads_dim)
        how = (False, config.relative_buckets, config.relative_distance, config.variable_dtype, None)
        return bias_of_distance(self.distance, heads, *how, "relative_position_bias")

    def attend(self, h: Tensor) -> Tensor:
        """The new tokens' keys and values are kept, then all that is kept is looked at."""
        with scope("attention"):
            layer = projections(self.config, h, self.positions)
            q, (k, v) = layer.queries(h), layer.memories(h)
            k, v = self._kept(CACHE_K, k, layer), self._kept(CACHE_V, v, layer)
            return layer.output(_attention(self.config, q, k, v, self.mask, self.bias))

    def _kept(self, name: str, new: Tensor, layer: Projections) -> Tensor:
        """The first ``seen`` positions of the cache, with ``new`` in it."""
        rows = self.chunk.rows
        name += "" if rows.find("beam") < 0 else OF_BEAMS
        cache = cache_variable(name, Shape([self.held, *rows, *layer.per_memory]), new.dtype)
        grown = put(cache, new, self.rows, MEMORY)
        self.updates.append(assign(cache, grown))
        if self.seen == self.held:
            return grown
        return slice_dim(grown, 0, self.seen.size, MEMORY)
