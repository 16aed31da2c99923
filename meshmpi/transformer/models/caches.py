"""Key-value caches: variables that decoders keep between calls.

A cache is [memory_length, batch, heads, d_kv], or with beams [memory_length, batch, beam, heads, d_kv]: its first
positions are contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Tensor, Update, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import gather, put
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.sources import assign, get_variable
from meshmpi.graph.ops.structure import rename_dimension, transpose
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.attention import Projections, attention_mask_ignore_padding
from meshmpi.nn.initializers import zeros_initializer
from meshmpi.nn.layers import variable_type
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.stack import Stack, layer_scope
from meshmpi.transformer.models.transformers import SOURCE_LENGTH, encoded

CACHE_K, CACHE_V = "cache_k", "cache_v"
MEMORY = "memory_length"
OF_BEAMS = "_of_beams"
"""End of the names of caches with beams."""


def cache_variable(name: str, shape: Shape, dtype: str) -> Tensor:
    """A cache of the current scope, kept as it is computed with."""
    return get_variable(name, shape, dtype, zeros_initializer(), trainable=False, storage="")


def source_ids(batch: Dimension, source: Dimension) -> Tensor:
    """The tokens of the sources, with padding."""
    return cache_variable("source_ids", Shape([batch, source]), "int32")


def projections(config: TransformerConfig, x: Tensor, positions: Tensor | None) -> Projections:
    """The projections of an attention layer in the current scope; self-attention gives ``positions``."""
    return Projections(
        config.model_dim,
        config.kv_dim,
        config.heads_dim,
        config.attention_options(self_attention=positions is not None),
        config.attention_initializers(),
        variable_type(config.variable_dtype, x),
        config.attention_bias,
        positions,
    )


def undropped(config: TransformerConfig) -> TransformerConfig:
    """The same model with places for all tokens at all experts."""
    if not config.experts:
        return config
    return config.with_options(expert_eval_capacity=float(config.experts), expert_places=0, expert_group=0)


def encoder_caches(config: TransformerConfig, source: Tensor, fresh: Tensor) -> list[Update]:
    """Keys and values of sources, kept for `incremental_decoder`.

    Args:
        config: An encoder-decoder with a ``padding_id``.
        source: int32 [batch, source_length], padded.
        fresh: bool [batch], rows that are new; the others are left as they are.
    """
    table, positions = Stack(config).token_embedding("encoder"), Stack(config).position_embedding()
    real = attention_mask_ignore_padding(source, config.padding_id)
    with scope("encoder"):
        memory = encoded(Stack(undropped(config.encoder_stack)), source, table, positions, real, SOURCE_LENGTH)
        memory = rename_dimension(memory, SOURCE_LENGTH, MEMORY)
    batch, dim = source.shape.dim("batch"), memory.shape.dim(MEMORY)
    old = source_ids(batch, dim)
    ids = rename_dimension(source, SOURCE_LENGTH, MEMORY)
    updates = [assign(old, ew.where(fresh, ids, old, output_shape=old.shape))]
    for i in range(config.layers):
        with scope("decoder"), layer_scope(i), scope("encdec_attention"):
            layer = projections(config.decoder_stack, memory, None)
            shape = Shape([dim, batch, *layer.per_memory])
            for name, new in zip((CACHE_K, CACHE_V), layer.memories(memory), strict=True):
                cache = cache_variable(name, shape, new.dtype)
                value = ew.where(fresh, transpose(new, shape), cache, output_shape=shape)
                updates.append(assign(cache, value))
    return updates


def reordered_caches(config: TransformerConfig, rows: Shape, parents: Tensor, memory: int, seen: int) -> list[Update]:
    """Caches whose beams go on from other beams: row ``i`` takes the past of ``parents[i]``.

    Args:
        config: The model.
        rows: [batch, beam].
        parents: int32 [batch, beam], below the number of beams.
        memory, seen: As in `Chunk`.
    """
    held, used = Dimension(MEMORY, memory), Dimension(MEMORY, seen)

    def moved(cache: Tensor) -> Tensor:
        past = slice_dim(cache, 0, seen, MEMORY) if seen < memory else cache
        taken = gather(past, parents, "beam")
        if seen == memory:
            return transpose(taken, cache.shape)
        return put(cache, taken, index_range(used), MEMORY)

    updates = []
    for name, heads, dtype in _each_cache(config):
        cache = cache_variable(name + OF_BEAMS, Shape([held, *rows]) + heads, dtype)
        updates.append(assign(cache, moved(cache)))
    return updates


def spread_caches(config: TransformerConfig, rows: Shape, memory: int) -> list[Update]:
    """The caches of beams, all with the past that the same row has in the caches without beams."""
    held, plain = Dimension(MEMORY, memory), rows.without(["beam"])
    updates = []
    for name, heads, dtype in _each_cache(config):
        single = cache_variable(name, Shape([held, *plain]) + heads, dtype)
        many = cache_variable(name + OF_BEAMS, Shape([held, *rows]) + heads, dtype)
        updates.append(assign(many, ew.broadcast(single, many.shape)))
    return updates


def _each_cache(config: TransformerConfig) -> Iterator[tuple[str, Shape, str]]:
    """(name, dims of heads, dtype) of each cache of self-attention, in whose scope the caller's loop runs."""
    _, heads = config.attention_options().heads_dims(config.heads_dim)
    for i in range(config.layers):
        with scope("decoder"), layer_scope(i), scope("attention"):
            for name in (CACHE_K, CACHE_V):
                yield name, Shape([*heads, config.kv_dim]), config.variable_dtype.activation
