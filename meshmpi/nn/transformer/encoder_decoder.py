"""The encoder-decoder of the paper's translation models.

One embedding and one position table are shared by source and target, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.graph import Tensor, scope
from meshmpi.nn.attention import rename_length_to_memory_length
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.masks import attention_mask_autoregressive, attention_mask_ignore_padding
from meshmpi.nn.transformer.blocks import (
    attention_sublayer,
    causal_attention_sublayer,
    embed,
    feed_forward_sublayer,
    layer_scope,
    mean_loss,
    norm,
    position_embedding,
    recomputed,
    relative_bias,
    softmax_logits,
    token_embedding,
)
from meshmpi.nn.transformer.config import TransformerConfig
from meshmpi.nn.transformer.language_model import check_tokens
from meshmpi.ops.structure import rename_dimension

SOURCE_LENGTH = "source_length"


def encoder_decoder(
    config: TransformerConfig, source: Tensor, decoder_tokens: Tensor, training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
) -> Tensor:  # fmt: skip
    """Logits of the next target token at every target position.

    Args:
        config: The model; ``layers`` are those of the encoder and of the decoder each.
        source: int32 [batch, source_length]; ``config.padding_id`` marks padding, which nothing
            attends to.
        decoder_tokens: int32 [batch, length], the target moved right by one.
        training: Whether dropout and jitter act.
        mixtures: Takes what each mixture of experts returns, for its losses.

    Returns:
        [batch, length, vocab].

    Raises:
        ShapeError: Tokens have other dims or are too long.

    Source: Vaswani et al. 2017, with norms before the sublayers.
    """
    check_tokens(source, "source tokens", SOURCE_LENGTH)
    check_tokens(decoder_tokens, "decoder tokens", "length")
    table, positions = token_embedding(config), position_embedding(config)
    with scope("encoder"):
        memory, seen = _encode(config, source, table, positions, training, mixtures)
    with scope("decoder"):
        x = embed(config, decoder_tokens, table, positions, training)
        length = decoder_tokens.shape.dim("length")
        causal = attention_mask_autoregressive(length, length._replace(name="memory_length"))
        bias = relative_bias(config, length, bidirectional=False)
        for i in range(config.layers):
            with layer_scope(i):

                def attend(x: Tensor) -> Tensor:
                    x = causal_attention_sublayer(config, x, causal, training, bias)
                    return attention_sublayer(config, x, seen, training, memory, "encdec_attention")

                x = _layer(config, x, i, attend, training, mixtures)
        return softmax_logits(config, norm(config, x, "final_norm"), table, training)


def _encode(
    config: TransformerConfig, source: Tensor, table: Tensor, positions: Tensor | None,
    training: bool, mixtures: list[ExpertsOutput] | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The encoder's output as a memory, and the mask of the source positions that hold tokens."""
    x = embed(config, source, table, positions, training, SOURCE_LENGTH)
    seen = real = None
    if config.padding_id >= 0:
        ids = rename_dimension(source, SOURCE_LENGTH, "memory_length")
        seen = attention_mask_ignore_padding(ids, config.padding_id)
        real = attention_mask_ignore_padding(source, config.padding_id)
    bias = relative_bias(config, source.shape.dim(SOURCE_LENGTH), bidirectional=True)
    for i in range(config.layers):
        with layer_scope(i):

            def attend(x: Tensor) -> Tensor:
                return attention_sublayer(config, x, seen, training, position_bias=bias)

            x = _layer(config, x, i, attend, training, mixtures, real)
    x = norm(config, x, "final_norm")
    return rename_length_to_memory_length(x, SOURCE_LENGTH), seen


def _layer(
    config: TransformerConfig, x: Tensor, number: int, attend: Callable[[Tensor], Tensor],
    training: bool, mixtures: list[ExpertsOutput] | None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One layer; what experts return is needed outside, so they are not computed again."""
    dense = not config.has_experts(number)

    def inside(x: Tensor) -> Tensor:
        x = attend(x)
        return feed_forward_sublayer(config, x, training, number, mask=mask) if dense else x

    x = recomputed(config, x, training, inside)
    return x if dense else feed_forward_sublayer(config, x, training, number, mixtures, mask)


def encoder_decoder_loss(
    config: TransformerConfig, source: Tensor, decoder_tokens: Tensor, targets: Tensor,
    training: bool = False, mixtures: list[ExpertsOutput] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean loss in nats per counted target token, logits).

    Args: as `encoder_decoder` and `lm_loss`.
    """
    mixtures = [] if mixtures is None else mixtures
    logits = encoder_decoder(config, source, decoder_tokens, training, mixtures)
    return mean_loss(config, logits, targets, training, mixtures), logits
