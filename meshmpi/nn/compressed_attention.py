"""Attention to means of groups of positions.  No layout is known here."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.structure import DimLike, dim_name, reshape
from meshmpi.nn.attention import (
    AttentionInitializers,
    AttentionOptions,
    Projections,
    dot_product_attention,
    rename_length_to_memory_length,
)
from meshmpi.nn.layers import DTypeLike, variable_type


def compress_mean(x: Tensor, dim: DimLike, compression_factor: int) -> Tensor:
    """Means of ``compression_factor`` neighbours along ``dim``, which keeps its name.

    Args:
        x: Any floating-point tensor.
        dim: The dim (or its name); its size must be a multiple of the factor.
        compression_factor: Elements in a mean.

    Lowers: nothing, where every rank holds whole groups; else an exchange first.

    Raises:
        ShapeError: The factor does not divide the size.

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
    options: AttentionOptions = AttentionOptions(),  # noqa: B008
) -> Tensor:
    """Self-attention whose memories are means of groups of positions.

    Args:
        x: [batch dims, length, io].
        mask_right: Whether a query sees only groups that have ended: those all of whose positions
            are its own or earlier.  (The reference shows it all of the group it stands in.)  A
            logit of 0 that returns nothing stands beside the others, so that the first queries,
            which see none, get 0.
        compression_factor: Positions in a group; must divide the length.
        kv_channels: As `multihead_attention`, as are all that follow.

    Returns:
        A tensor of x's shape.

    Lowers: as `multihead_attention`; where length is split, what is gathered is smaller by the
    factor.

    Source: Liu et al. 2018; Mesh-TensorFlow's function of that name.
    """
    name = layer_name(name, "attention")
    if options.rotary:
        raise ShapeError(
            "memory-compressed attention: a mean of positions has no position to rotate by.",
            "Use options without rotary.",
        )
    length = x.at(-2, "multihead_self_attention_memory_compressed")
    memory = rename_length_to_memory_length(compress_mean(x, length, compression_factor), length.name)
    layer = Projections(
        x.shape[-1], kv_channels, heads, options, initializers, variable_type(variable_dtype, x), use_bias
    )
    groups, mask = memory.shape[-2], None
    if mask_right:
        last = ew.add(ew.multiply(index_range(groups), compression_factor), compression_factor - 1)
        mask = ew.greater_equal(index_range(length), last, output_shape=Shape([length, groups]))
    with scope(name):
        q, (k, v) = layer.queries(x), layer.memories(memory)
        y = dot_product_attention(
            q,
            k,
            v,
            groups,
            kv_channels,
            kv_channels,
            mask,
            dropout_rate,
            dropout_broadcast_dims,
            extra_logit=0.0 if mask_right else None,
            is_training=is_training,
            scale=scale,
        )
        return layer.output(y)
