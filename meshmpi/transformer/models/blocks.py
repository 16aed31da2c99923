"""What all Transformers share: norms, attention and feed-forward sublayers, layers, embeddings and logits.

All options come from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.autodiff import recompute_grad
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.indexing import gather
from meshmpi.graph.ops.placement import constrain
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.sources import get_variable, ones
from meshmpi.graph.ops.structure import rename_dimension, reshape
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.attention import multihead_attention
from meshmpi.nn.embeddings import embedding_weights
from meshmpi.nn.experts import ExpertsOutput, mixture_of_experts
from meshmpi.nn.initializers import zeros_initializer
from meshmpi.nn.layers import dense, dense_relu_dense, dropout_over, factors, layer_norm, rms_norm
from meshmpi.nn.local_attention import local_self_attention
from meshmpi.nn.losses import softmax_cross_entropy_with_logits, weighted_mean, weights_nonzero
from meshmpi.nn.positions import relative_position_bias
from meshmpi.nn.randomness import multiplicative_jitter
from meshmpi.transformer.models.config import TransformerConfig


def placed(config: TransformerConfig, x: Tensor) -> Tensor:
    """x placed as the config says of the residual stream."""
    return constrain(x, config.residual_constraint) if config.residual_constraint else x


def norm(config: TransformerConfig, x: Tensor, name: str) -> Tensor:
    """x normalised over d_model."""
    epsilon, dtype = config.norm_epsilon, config.variable_dtype
    if config.norm == "rms":
        y = rms_norm(x, "d_model", epsilon, name, config.norm_scale, dtype)
    else:
        y = layer_norm(x, "d_model", epsilon, name, config.norm_scale, config.norm_bias, dtype)
    # y is placed like x already.  This places its *gradient* before anything else uses it, so that
    # the sum pending in it is scattered at once.
    return placed(config, y)


def residual_stream(config: TransformerConfig, x: Tensor, training: bool) -> Tensor:
    """What enters the residual stream: placed as the config says, with dropout."""
    x = placed(config, x)
    return dropout_over(x, training, config.residual_dropout, config.dropout_broadcast)


def final_norm(config: TransformerConfig, x: Tensor, training: bool) -> Tensor:
    """What a stack returns: its stream, normalised unless every layer ended with a norm."""
    x = x if config.norm_after else norm(config, x, "final_norm")
    return dropout_over(x, training, config.final_dropout, config.dropout_broadcast)


def sublayer(
    config: TransformerConfig, x: Tensor, name: str, training: bool, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """x + dropout(function(norm(x))), or norm(x + dropout(function(x))) with ``norm_after``."""
    if config.norm_after:
        y = ew.add(x, residual_stream(config, function(x), training))
        return norm(config, y, f"{name}_norm")
    y = function(norm(config, x, f"{name}_norm"))
    return ew.add(x, residual_stream(config, y, training))


def recomputed(config: TransformerConfig, x: Tensor, training: bool, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """``layer(x)``, whose inside the backward pass computes again where the config says so."""
    if training and config.recompute == "layers":
        return recompute_grad(layer, [x])
    return layer(x)


def attention_sublayer(
    config: TransformerConfig,
    x: Tensor,
    mask: Tensor | None,
    training: bool,
    memory: Tensor | None = None,
    name: str = "attention",
    position_bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """x plus attention to itself, or to ``memory`` [batch, memory_length, d_model]."""

    def attend(h: Tensor) -> Tensor:
        return multihead_attention(
            h,
            memory,
            mask,
            config.kv_dim,
            config.heads_dim,
            training,
            config.attention_dropout,
            config.dropout_broadcast,
            use_bias=config.attention_bias,
            scale=config.attention_scale,
            initializers=config.attention_initializers(),
            variable_dtype=config.variable_dtype,
            name=name,
            position_bias=position_bias,
            options=config.attention_options(self_attention=memory is None),
            causal=causal,
        )

    return sublayer(config, x, name, training, attend)


def causal_attention_sublayer(
    config: TransformerConfig,
    x: Tensor,
    seen: Tensor | None,
    training: bool,
    position_bias: Tensor | None,
    real: Tensor | None = None,
) -> Tensor:
    """x plus attention of its positions to earlier ones: all, or those of the local window.

    Args:
        config: The model.
        x: [batch, length, d_model].
        seen: bool over dims of [batch, length, memory_length], False for what no position sees, or
            none of another segment; None: all.
        training: Whether dropout acts.
        position_bias: Added to the logits.
        real: bool [batch, length], for a local window: padding and the rest do not see each other.
    """
    if not config.local_window:
        return attention_sublayer(config, x, seen, training, position_bias=position_bias, causal=True)
    segments = None if real is None else ew.cast(real, "int32")

    def attend(h: Tensor) -> Tensor:
        return local_self_attention(
            h,
            config.kv_dim,
            config.heads_dim,
            config.local_window,
            segments=segments,
            is_training=training,
            dropout_rate=config.attention_dropout,
            dropout_broadcast_dims=config.dropout_broadcast,
            use_bias=config.attention_bias,
            scale=config.attention_scale,
            initializers=config.attention_initializers(),
            variable_dtype=config.variable_dtype,
            name="attention",
            options=config.attention_options(),
        )

    return sublayer(config, x, "attention", training, attend)


def relative_bias(config: TransformerConfig, length: Dimension, bidirectional: bool) -> Tensor | None:
    """The bias of logits by distance that all self-attentions of a stack share, if there is one."""
    if not config.relative_buckets:
        return None
    heads, _ = config.attention_options().heads_dims(config.heads_dim)
    return relative_position_bias(
        heads,
        length,
        length._replace(name="memory_length"),
        bidirectional,
        config.relative_buckets,
        config.relative_distance,
        variable_dtype=config.variable_dtype,
    )


def feed_forward_sublayer(
    config: TransformerConfig,
    x: Tensor,
    training: bool,
    layer: int = 0,
    mixtures: list[ExpertsOutput] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """x plus two dense layers, or plus a mixture of experts.

    Args:
        config: The model.
        x: [batch, length, d_model].
        training: Whether dropout and training capacities act.
        layer: Number of the layer, which says whether it has experts.
        mixtures: Takes what a mixture of experts returns, for its losses.
        mask: bool [batch, length]: positions that may take places of experts; None: all.
    """

    def feed_forward(h: Tensor) -> Tensor:
        if config.has_experts(layer):
            return _mixture(config, h, training, mixtures, mask)
        return dense_relu_dense(
            h,
            config.ff_dim,
            training,
            config.ff_dropout,
            config.dropout_broadcast,
            activation=config.activation,
            use_bias=config.ff_bias,
            variable_dtype=config.variable_dtype,
            initializers=config.ff_initializers(),
            name="feed_forward",
        )

    return sublayer(config, x, "feed_forward", training, feed_forward)


def _mixture(
    config: TransformerConfig, h: Tensor, training: bool, mixtures: list[ExpertsOutput] | None, mask: Tensor | None
) -> Tensor:
    mask = mask if config.experts_skip_padding else None
    found = mixture_of_experts(
        h,
        config.experts_dim,
        config.ff_dim,
        config.gating(),
        training,
        mask=mask,
        activation=config.activation,
        use_bias=config.ff_bias,
        dropout_rate=config.ff_dropout,
        variable_dtype=config.variable_dtype,
        initializers=config.ff_initializers(),
        name="feed_forward",
    )
    if mixtures is not None:
        mixtures.append(found)
    return found.output


def layers(
    config: TransformerConfig,
    x: Tensor,
    attend: Callable[[Tensor], Tensor],
    training: bool,
    mixtures: list[ExpertsOutput] | None,
    mask: Tensor | None,
) -> Tensor:
    """The output of all layers of a stack, with its final norm.

    Args:
        config: The stack.
        x: [batch, length, d_model], embedded tokens.
        attend: The attention sublayers of one layer, in whose scope it is called.
        training: Whether dropout and training capacities act.
        mixtures: Takes what each mixture of experts returns.
        mask: bool [batch, length]: positions that may take places of experts; None: all.
    """
    for i in range(config.layers):
        with layer_scope(i):
            dense = not config.has_experts(i)

            def inside(x: Tensor, i: int = i, dense: bool = dense) -> Tensor:
                x = attend(x)
                return feed_forward_sublayer(config, x, training, i, mask=mask) if dense else x

            # What experts return is needed outside, so experts are not computed again.
            x = recomputed(config, x, training, inside)
            x = x if dense else feed_forward_sublayer(config, x, training, i, mixtures, mask)
    return final_norm(config, x, training)


def token_embedding(config: TransformerConfig, stack: str = "") -> Tensor:
    """The table ``embedding`` [vocab, d_model] of the current scope, for every part that asks.

    Where the stacks of an encoder-decoder have tables of their own, the table of ``stack``, "encoder"
    or "decoder".
    """
    with scope("" if config.shared_embedding else stack, reuse="auto"):
        return embedding_weights(
            config.vocab_dim, config.model_dim, config.variable_dtype, config.embedding_initializer(), "embedding"
        )


def position_embedding(config: TransformerConfig) -> Tensor | None:
    """The table ``positions`` [length, d_model] of the current scope, if the config has one."""
    if not config.learned_positions:
        return None
    shape = Shape([config.length_dim, config.model_dim])
    return get_variable("positions", shape, config.variable_dtype, config.embedding_initializer())


def embed(
    config: TransformerConfig,
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    training: bool,
    length_name: str = "length",
    places: Tensor | None = None,
    *,
    real: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Token plus position vectors, [batch, length, d_model], normalised where the config says so.

    Args:
        config: The model.
        tokens: int32 [batch, length].
        table: [vocab, d_model].
        positions: [length, d_model] or None.
        training: Whether dropout acts.
        length_name: Name of the dim of positions of ``tokens``.
        places: int32 [batch, length]: the position of each token in its own sequence; None: 0, 1,
            2, ... along the length.
        real: bool [batch, length]: which positions count for ``token_dropout``; None: all.
        types: int32 [batch, length], kinds of tokens; None: all of kind 0.

    Raises:
        ShapeError: The tokens are longer than the config's length.
    """
    length = tokens.shape.dim(length_name).size
    x = gather(table, tokens, config.vocab_dim)
    if config.token_dropout:
        x = _tokens_dropped(config, x, tokens, length_name, real)
    if positions is not None:
        if length > config.length:
            raise ShapeError(
                f"the tokens have {length_name} {length}, but there are {config.length} positions.",
                "Cut the tokens, or make a config with a greater length.",
                str(tokens.source),
            )
        if places is None:
            places = rename_dimension(slice_dim(positions, 0, length, "length"), "length", length_name)
        else:
            places = gather(positions, places, config.length_dim)
        x = ew.add(x, places, output_shape=x.shape)
    return embedded(config, x, training, types)


def embedded(config: TransformerConfig, x: Tensor, training: bool, types: Tensor | None = None) -> Tensor:
    """Token plus position vectors as they enter the first layer."""
    if config.token_types:
        shape = Shape([config.types_dim, config.model_dim])
        kinds = get_variable("token_types", shape, config.variable_dtype, config.embedding_initializer())
        if types is None:
            kind = reshape(slice_dim(kinds, 0, 1, "token_types"), Shape([config.model_dim]))
        else:
            kind = gather(kinds, types, config.types_dim)
        x = ew.add(x, kind, output_shape=x.shape)
    if config.embedding_norm:
        x = norm(config, x, "embedding_norm")
    rate = config.embedding_dropout
    rate = config.residual_dropout if rate is None else rate
    return dropout_over(placed(config, x), training, rate, config.dropout_broadcast)


def _tokens_dropped(
    config: TransformerConfig, x: Tensor, tokens: Tensor, length_name: str, real: Tensor | None
) -> Tensor:
    """x with zeros for hidden tokens, the others scaled to the mean size they had in training."""
    dtype = "float64" if x.dtype == "float64" else "float32"  # a bfloat16 cannot count to 1000
    kept = ew.cast(ew.not_equal(tokens, config.mask_id), dtype)
    counted = ones(tokens.shape, dtype) if real is None else ew.cast(real, dtype)
    length = reduce_sum(counted, reduced_dim=length_name)
    hidden = reduce_sum(ew.subtract(1.0, kept), reduced_dim=length_name)
    # An empty row, all padding, divides nothing by 1; a row that is hidden wholly has only zeros.
    visible = ew.maximum(ew.subtract(length, hidden), 1.0)
    factor = ew.multiply(ew.divide(length, visible), 1.0 - config.token_dropout)
    factor = ew.multiply(kept, factor, output_shape=tokens.shape)
    return ew.multiply(x, ew.cast(factor, x.dtype), output_shape=x.shape)


def softmax_logits(config: TransformerConfig, x: Tensor, table: Tensor, training: bool) -> Tensor:
    """Logits [batch, length, vocab], by the variable ``softmax`` or by the embedding ``table``."""
    shape = Shape([*x.shape.without(["d_model"]), config.vocab_dim])
    if config.head_transform:
        x = _transformed(config, x)
    if config.tied_softmax:
        weight = table
    else:
        weight_shape = Shape([config.model_dim, config.vocab_dim])
        dtype, init = config.variable_dtype, config.softmax_initializer()
        weight = get_variable("softmax", weight_shape, dtype, init)
    if config.softmax_scale != 1.0:
        x = ew.multiply(x, config.softmax_scale)
    logits = einsum([x, weight], shape)
    if config.softmax_bias:
        bias_shape = Shape([config.vocab_dim])
        bias = get_variable("softmax_bias", bias_shape, config.variable_dtype, zeros_initializer(), decays=False)
        logits = ew.add(logits, bias, output_shape=shape)
    return multiplicative_jitter(logits, training, config.logit_jitter)


def _transformed(config: TransformerConfig, x: Tensor) -> Tensor:
    """norm(activation(dense(x))), with the first factor of a gated activation."""
    y = dense(
        x,
        config.transform_dim,
        config.model_dim,
        activation=factors(config.activation)[0],
        variable_dtype=config.variable_dtype,
        kernel_initializer=config.head_initializer(),
        name="head",
    )
    return norm(config, rename_dimension(y, "d_transform", "d_model"), "head_norm")


def mean_loss(
    config: TransformerConfig,
    logits: Tensor,
    targets: Tensor,
    training: bool,
    mixtures: Sequence[ExpertsOutput] = (),
    weights: Tensor | None = None,
) -> Tensor:
    """Mean cross entropy in nats, by weights [batch, length] or over the targets that are not padding.

    Label smoothing, z_loss and the losses of experts act in training only, so that evaluation is
    plain cross entropy.
    """
    losses = softmax_cross_entropy_with_logits(
        logits,
        targets,
        config.vocab_dim,
        config.z_loss if training else 0.0,
        config.label_smoothing if training else 0.0,
    )
    if weights is not None:
        mean = weighted_mean(losses, ew.cast(weights, losses.dtype))
    elif config.padding_id < 0:
        mean = weighted_mean(losses)
    else:
        mean = weighted_mean(losses, weights_nonzero(targets, config.padding_id, losses.dtype))
    for found in mixtures if training else ():
        mean = ew.add(mean, ew.cast(found.loss, mean.dtype))
    return mean


def layer_scope(number: int):
    """Prefix ``layer_007`` of one layer's variables."""
    return scope(f"layer_{number:03d}")


__all__ = [
    "attention_sublayer",
    "causal_attention_sublayer",
    "embed",
    "embedded",
    "feed_forward_sublayer",
    "final_norm",
    "layer_scope",
    "layers",
    "mean_loss",
    "norm",
    "placed",
    "position_embedding",
    "recomputed",
    "relative_bias",
    "residual_stream",
    "softmax_logits",
    "sublayer",
    "token_embedding",
]
