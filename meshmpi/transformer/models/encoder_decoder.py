"""The encoder-decoder of the paper's translation models.

One embedding and one position table are shared by source and target, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmpi.errors import ConfigError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.structure import rename_dimension
from meshmpi.nn.attention import rename_length_to_memory_length
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.masks import attention_mask_ignore_padding, attention_mask_same_segment
from meshmpi.transformer.models.blocks import (
    attention_sublayer,
    causal_attention_sublayer,
    embed,
    layers,
    mean_loss,
    position_embedding,
    relative_bias,
    softmax_logits,
    token_embedding,
)
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.language_model import check_causal, check_tokens

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
    config: TransformerConfig,
    source: Tensor,
    decoder_tokens: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    packing: PackedPairs | None = None,
    *,
    source_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
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
        memory = encode(config.encoder_stack, source, tables[0], positions, training, mixtures, packing, real)
    with scope("decoder"):
        config = config.decoder_stack
        places = None if packing is None else packing.places
        x = embed(config, decoder_tokens, tables[1], positions, training, places=places, real=mask)
        length = decoder_tokens.shape.dim("length")
        own = None if mask is None else rename_dimension(mask, "length", "memory_length")
        seen = None if real is None else rename_dimension(real, SOURCE_LENGTH, "memory_length")
        if packing is not None:
            same = _same(packing.segments, packing.segments, "length")
            own = same if own is None else ew.logical_and(own, same)
            seen = _same(packing.segments, packing.source_segments, SOURCE_LENGTH)
        bias = relative_bias(config, length, bidirectional=False)

        def attend(x: Tensor) -> Tensor:
            x = causal_attention_sublayer(config, x, own, training, bias, mask)
            return attention_sublayer(config, x, seen, training, memory, "encdec_attention")

        return softmax_logits(config, layers(config, x, attend, training, mixtures, mask), tables[1], training)


def _check_packing(config: TransformerConfig, packing: PackedPairs | None) -> None:
    """ConfigError where a local window would look across pairs."""
    if packing is not None and config.local_window:
        raise ConfigError(
            f"several pairs share a row and local_window is {config.local_window}: a local window"
            " would look across them.",
            "Give one pair a row, or set local_window to 0.",
        )


def _same(segments: Tensor, memory_segments: Tensor, memory_length: str) -> Tensor:
    """Whether a position and one of the memory are of one pair."""
    renamed = rename_dimension(memory_segments, memory_length, "memory_length")
    return attention_mask_same_segment(segments, renamed)


def encode(
    config: TransformerConfig,
    source: Tensor,
    table: Tensor,
    positions: Tensor | None,
    training: bool,
    mixtures: list[ExpertsOutput] | None,
    packing: PackedPairs | None,
    real: Tensor | None,
) -> Tensor:
    """The encoder's output as a memory [batch, memory_length, d_model]."""
    places = None if packing is None else packing.source_places
    x = embed(config, source, table, positions, training, SOURCE_LENGTH, places, real=real)
    seen = None if real is None else rename_dimension(real, SOURCE_LENGTH, "memory_length")
    if packing is not None:
        seen = _same(packing.source_segments, packing.source_segments, SOURCE_LENGTH)
    bias = relative_bias(config, source.shape.dim(SOURCE_LENGTH), bidirectional=True)

    def attend(x: Tensor) -> Tensor:
        return attention_sublayer(config, x, seen, training, position_bias=bias)

    return rename_length_to_memory_length(layers(config, x, attend, training, mixtures, real), SOURCE_LENGTH)


def encoder_decoder_loss(
    config: TransformerConfig,
    source: Tensor,
    decoder_tokens: Tensor,
    targets: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    packing: PackedPairs | None = None,
    *,
    source_mask: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mean loss in nats per counted target token, logits).

    Args: as `encoder_decoder` and `lm_loss`.
    """
    mixtures = [] if mixtures is None else mixtures
    logits = encoder_decoder(
        config, source, decoder_tokens, training, mixtures, packing, source_mask=source_mask, mask=mask
    )
    return mean_loss(config, logits, targets, training, mixtures), logits
