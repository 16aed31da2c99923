"""The encoder-decoder of the paper's translation models.

One embedding and one position table are shared by source and target, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshmpi.errors import ConfigError
from meshmpi.graph import Tensor, scope
from meshmpi.nn.attention import rename_length_to_memory_length
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.masks import (
    attention_mask_ignore_padding,
    attention_mask_same_segment,
)
from meshmpi.nn.transformer.blocks import (
    attention_sublayer,
    causal_attention_sublayer,
    embed,
    feed_forward_sublayer,
    final_norm,
    layer_scope,
    mean_loss,
    position_embedding,
    recomputed,
    relative_bias,
    softmax_logits,
    token_embedding,
)
from meshmpi.nn.transformer.config import TransformerConfig
from meshmpi.nn.transformer.language_model import causal_mask, check_causal, check_tokens
from meshmpi.ops import elementwise as ew
from meshmpi.ops.structure import rename_dimension

SOURCE_LENGTH = "source_length"


@dataclass(frozen=True)
class PackedPairs:
    """Where the pairs are of which several share a row; they do not see each other.

    Attributes:
        source_segments: int32 [batch, source_length]: number of the pair in its row, 1, 2, ...; 0
            where there is none.
        segments: The same, [batch, length], of the decoder's tokens.
        source_places: int32 [batch, source_length]: place of a token in its own sequence, from 0.
        places: The same, [batch, length].
    """

    source_segments: Tensor
    segments: Tensor
    source_places: Tensor
    places: Tensor


def encoder_decoder(
    config: TransformerConfig, source: Tensor, decoder_tokens: Tensor, training: bool = False,
    mixtures: list[ExpertsOutput] | None = None, packing: PackedPairs | None = None, *,
    source_mask: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits of the next target token at every target position.

    Args:
        config: The model; ``layers`` are those of the decoder, and of the encoder too unless
            ``encoder_layers`` says otherwise.
        source: int32 [batch, source_length]; ``config.padding_id`` marks padding, which nothing
            attends to.
        decoder_tokens: int32 [batch, length], the target moved right by one.
        training: Whether dropout and jitter act.
        mixtures: Takes what each mixture of experts returns, for its losses.
        packing: Where several pairs share a row.
        source_mask: bool [batch, source_length], True for tokens, False for padding; None: as
            ``config.padding_id`` says.
        mask: The same of the decoder's tokens, [batch, length]; None: all are tokens.

    Returns:
        [batch, length, vocab].

    Raises:
        ShapeError: Tokens have other dims or are too long.
        ConfigError: Rows are packed and the config has a local window, which takes no mask; or it
            has ``token_dropout``.

    Source: Vaswani et al. 2017, with norms before the sublayers.
    """
    check_tokens(source, "source tokens", SOURCE_LENGTH)
    check_tokens(decoder_tokens, "decoder tokens", "length")
    check_causal(config)
    _check_packing(config, packing)
    tables = [token_embedding(config, stack) for stack in ("encoder", "decoder")]
    positions = position_embedding(config)
    real = source_mask
    if real is None and config.padding_id >= 0:
        real = attention_mask_ignore_padding(source, config.padding_id)
    with scope("encoder"):
        memory = encode(
            config.encoder_stack, source, tables[0], positions, training, mixtures, packing, real
        )  # fmt: skip
    with scope("decoder"):
        config = config.decoder_stack
        places = None if packing is None else packing.places
        x = embed(config, decoder_tokens, tables[1], positions, training, places=places, real=mask)
        length = decoder_tokens.shape.dim("length")
        causal = causal_mask(length, length._replace(name="memory_length"), mask)
        seen = None if real is None else rename_dimension(real, SOURCE_LENGTH, "memory_length")
        if packing is not None:
            causal = ew.logical_and(causal, _same(packing.segments, packing.segments, "length"))
            seen = _same(packing.segments, packing.source_segments, SOURCE_LENGTH)
        bias = relative_bias(config, length, bidirectional=False)
        for i in range(config.layers):
            with layer_scope(i):

                def attend(x: Tensor) -> Tensor:
                    x = causal_attention_sublayer(config, x, causal, training, bias, mask)
                    return attention_sublayer(config, x, seen, training, memory, "encdec_attention")

                x = _layer(config, x, i, attend, training, mixtures, mask)
        return softmax_logits(config, final_norm(config, x, training), tables[1], training)


def _check_packing(config: TransformerConfig, packing: PackedPairs | None) -> None:
    """ConfigError where a local window would look across pairs."""
    if packing is not None and config.local_window:
        raise ConfigError(
            f"several pairs share a row and local_window is {config.local_window}: a local window"
            " would look across them.", "Give one pair a row, or set local_window to 0.",
        )  # fmt: skip


def _same(segments: Tensor, memory_segments: Tensor, memory_length: str) -> Tensor:
    """Whether a position and one of the memory are of one pair."""
    renamed = rename_dimension(memory_segments, memory_length, "memory_length")
    return attention_mask_same_segment(segments, renamed)


def encode(
    config: TransformerConfig, source: Tensor, table: Tensor, positions: Tensor | None,
    training: bool, mixtures: list[ExpertsOutput] | None, packing: PackedPairs | None,
    real: Tensor | None,
) -> Tensor:  # fmt: skip
    """The encoder's output as a memory [batch, memory_length, d_model]."""
    places = None if packing is None else packing.source_places
    x = embed(
        config, source, table, positions, training, SOURCE_LENGTH, places, real=real
    )  # fmt: skip
    seen = None if real is None else rename_dimension(real, SOURCE_LENGTH, "memory_length")
    if packing is not None:
        seen = _same(packing.source_segments, packing.source_segments, SOURCE_LENGTH)
    bias = relative_bias(config, source.shape.dim(SOURCE_LENGTH), bidirectional=True)
    for i in range(config.layers):
        with layer_scope(i):

            def attend(x: Tensor) -> Tensor:
                return attention_sublayer(config, x, seen, training, position_bias=bias)

            x = _layer(config, x, i, attend, training, mixtures, real)
    return rename_length_to_memory_length(final_norm(config, x, training), SOURCE_LENGTH)


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
    packing: PackedPairs | None = None, *, source_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean loss in nats per counted target token, logits).

    Args: as `encoder_decoder` and `lm_loss`.
    """
    mixtures = [] if mixtures is None else mixtures
    logits = encoder_decoder(
        config, source, decoder_tokens, training, mixtures, packing, source_mask=source_mask,
        mask=mask,
    )  # fmt: skip
    return mean_loss(config, logits, targets, training, mixtures), logits
