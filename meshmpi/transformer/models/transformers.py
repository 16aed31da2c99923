"""The models: a language model (decoder), an encoder for masked tokens, and an encoder-decoder.

One model for every layout: data-parallel ``"batch:all"``, model-parallel
``"heads:all;d_ff:all;vocab:all"``, or both on a two-dimensional mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmpi.errors import ConfigError, ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.structure import rename_dimension
from meshmpi.ir.scalar import INTEGERS
from meshmpi.nn.attention import attention_mask_ignore_padding, attention_mask_same_segment
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.stack import Stack

SOURCE_LENGTH = "source_length"


@dataclass(frozen=True)
class PackedPairs:
    """Where the pairs are of which several share a row; they do not see each other.

    Attributes:
        source_segments: int32 [batch, source_length]: number of the pair in its row, 1, 2, ...; 0 where there is none.
        segments: The same, [batch, length], of the decoder's tokens.
        source_places: int32 [batch, source_length]: place of a token in its own sequence, from 0.
        places: The same, [batch, length].
    """

    source_segments: Tensor
    segments: Tensor
    source_places: Tensor
    places: Tensor


def lm(
    config: TransformerConfig,
    tokens: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    *,
    mask: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Logits of the next token at every position.

    Args:
        config: The model.
        tokens: int32 [batch, length], length at most ``config.length``.
        training: Whether dropout and jitter act.
        mixtures: Takes what each mixture of experts returns, for its losses.
        mask: bool [batch, length], True for tokens and False for padding, which no token sees; None: all are tokens.
        types: int32 [batch, length], kinds of tokens for a config with ``token_types``; None: 0.

    Returns:
        [batch, length, vocab] in the activation type; position i sees tokens 0..i.

    Raises:
        ShapeError: The tokens have other dims or are too long.
        ConfigError: The config has ``token_dropout``.
    """
    check_tokens(tokens, "tokens", "length")
    _check_causal(config)
    stack = Stack(config, training, mixtures)
    with scope("decoder"):
        table, positions = stack.token_embedding(), stack.position_embedding()
        return _decoded(stack, tokens, table, positions, mask, types=types)


def lm_loss(
    config: TransformerConfig,
    tokens: Tensor,
    targets: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
) -> tuple[Tensor, Tensor]:
    """(mean loss in nats per counted token, logits).

    Args:
        config: The model.
        tokens: int32 [batch, length].
        targets: int32 [batch, length], the token that follows each of ``tokens``; those equal to
            ``config.padding_id`` do not count.
        training: Whether dropout, jitter, label smoothing, z_loss and losses of experts act.
        mixtures: Takes what each mixture of experts returns.

    Example:
        >>> config = mm.transformer.TransformerConfig(
        ...     vocab=100, length=16, d_model=32, d_ff=64, heads=4, d_kv=8, layers=2)
        >>> with mm.Graph():
        ...     tokens = mm.placeholder("tokens", "batch:8;length:16", "int32")
        ...     targets = mm.placeholder("targets", "batch:8;length:16", "int32")
        ...     loss, logits = mm.transformer.lm_loss(config, tokens, targets, training=True)
        ...     updates = mm.optimize.AdamW(1e-3, clip_norm=1.0).minimize(loss)
        >>> logits.shape
        [batch=8, length=16, vocab=100]
    """
    mixtures = [] if mixtures is None else mixtures
    logits = lm(config, tokens, training, mixtures)
    return Stack(config, training, mixtures).mean_loss(logits, targets), logits


def encoder(
    config: TransformerConfig,
    tokens: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    *,
    mask: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """A vector for every token, made from all tokens of its sequence.

    The other arguments are those of `lm`.

    Args:
        mask: None: as ``config.padding_id`` says, or all are tokens.

    Returns:
        [batch, length, d_model]; vectors of padding mean nothing.

    Raises:
        ShapeError: The tokens have other dims or are too long, or the config has a local window.

    Example:
        >>> config = mm.transformer.TransformerConfig(
        ...     vocab=33, length=16, d_model=32, d_ff=64, heads=4, d_kv=8, layers=2,
        ...     learned_positions=False, rotary=True, padding_id=1)
        >>> with mm.Graph():
        ...     tokens = mm.placeholder("tokens", "batch:8;length:16", "int32")
        ...     mm.transformer.encoder(config, tokens).shape
        [batch=8, length=16, d_model=32]
    """
    check_tokens(tokens, "tokens", "length")
    if config.local_window:
        raise ShapeError(
            f"encoder: the config has a local_window of {config.local_window}, which is for decoders.",
            "Set it to 0.",
            str(tokens.source),
        )
    stack, real = Stack(config, training, mixtures), _real(config, tokens, mask)
    with scope("encoder"):
        table, positions = stack.token_embedding(), stack.position_embedding()
        return encoded(stack, tokens, table, positions, real, "length", types=types)


def masked_lm(
    config: TransformerConfig,
    tokens: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    *,
    mask: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Logits of the token that stands, or is hidden, at every position.

    The arguments are those of `encoder`.

    Returns:
        [batch, length, vocab].

    Source: BERT (Devlin et al. 2019); ESM-2 (Lin et al. 2023).
    """
    x, stack = encoder(config, tokens, training, mixtures, mask=mask, types=types), Stack(config, training)
    with scope("encoder"):
        return stack.logits(x, stack.token_embedding())


def masked_lm_loss(
    config: TransformerConfig,
    tokens: Tensor,
    targets: Tensor,
    weights: Tensor,
    training: bool = False,
    mixtures: list[ExpertsOutput] | None = None,
    *,
    mask: Tensor | None = None,
    types: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mean loss in nats per counted token, logits).

    The other arguments are those of `encoder` and `lm_loss`.

    Args:
        tokens: int32 [batch, length], some of them replaced by ``config.mask_id`` or others.
        targets: int32 [batch, length], the tokens before that.
        weights: [batch, length], how much each position counts: 1 where a token was replaced or
            chosen to be predicted, else 0.
    """
    mixtures = [] if mixtures is None else mixtures
    logits = masked_lm(config, tokens, training, mixtures, mask=mask, types=types)
    return Stack(config, training, mixtures).mean_loss(logits, targets, weights), logits


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

    One embedding and one position table are shared by source and target, as in the paper.

    The other arguments are those of `lm`.

    Args:
        config: The model; ``layers`` are those of the decoder, and of the encoder too unless
            ``encoder_layers`` says otherwise.
        source: int32 [batch, source_length]; ``config.padding_id`` marks padding, which nothing attends to.
        decoder_tokens: int32 [batch, length], the target moved right by one.
        packing: Where several pairs share a row.
        source_mask: bool [batch, source_length], True for tokens, False for padding; None: as
            ``config.padding_id`` says.

    Returns:
        [batch, length, vocab].

    Raises:
        ShapeError: Tokens have other dims or are too long.
        ConfigError: Rows are packed and the config has a local window, which takes no mask; or it
            has ``token_dropout``; or its sublayers are ``parallel``.

    Source: Vaswani et al. 2017, with norms before the sublayers.
    """
    check_tokens(source, "source tokens", SOURCE_LENGTH)
    check_tokens(decoder_tokens, "decoder tokens", "length")
    _check_causal(config)
    _check_pairs(config, packing)
    shared = Stack(config)
    tables = [shared.token_embedding(stack) for stack in ("encoder", "decoder")]
    positions, real = shared.position_embedding(), _real(config, source, source_mask)
    with scope("encoder"):
        stack = Stack(config.encoder_stack, training, mixtures)
        memory = encoded(stack, source, tables[0], positions, real, SOURCE_LENGTH, packing)
        memory = rename_dimension(memory, SOURCE_LENGTH, "memory_length")
    with scope("decoder"):
        stack = Stack(config.decoder_stack, training, mixtures)
        return _decoded(stack, decoder_tokens, tables[1], positions, mask, memory, real, packing)


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

    The arguments are those of `encoder_decoder` and `lm_loss`.
    """
    mixtures = [] if mixtures is None else mixtures
    rows = (source, decoder_tokens, training, mixtures, packing)
    logits = encoder_decoder(config, *rows, source_mask=source_mask, mask=mask)
    return Stack(config, training, mixtures).mean_loss(logits, targets), logits


# -- the stacks ------------------------------------------------------------------------------------


def encoded(
    stack: Stack,
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    real: Tensor | None,
    length: str,
    packing: PackedPairs | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """[batch, length, d_model] of tokens whose dim of positions is called ``length``."""
    places = None if packing is None else packing.source_places
    x = stack.embed(tokens, table, positions, length, places, real=real, types=types)
    seen = None if real is None else rename_dimension(real, length, "memory_length")
    if packing is not None:
        seen = _same(packing.source_segments, packing.source_segments, length)
    bias = stack.relative_bias(tokens.shape.dim(length), bidirectional=True)
    return stack.layers(x, lambda x: stack.attention(x, seen, position_bias=bias), real)


def _decoded(
    stack: Stack,
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    memory: Tensor | None = None,
    real: Tensor | None = None,
    packing: PackedPairs | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """The logits of a decoder, which also attends to a ``memory`` where there is one."""
    places = None if packing is None else packing.places
    x = stack.embed(tokens, table, positions, places=places, real=mask, types=types)
    own = None if mask is None else rename_dimension(mask, "length", "memory_length")
    seen = None if real is None else rename_dimension(real, SOURCE_LENGTH, "memory_length")
    if packing is not None:
        same = _same(packing.segments, packing.segments, "length")
        own = same if own is None else ew.logical_and(own, same)
        seen = _same(packing.segments, packing.source_segments, SOURCE_LENGTH)
    bias = stack.relative_bias(tokens.shape.dim("length"), bidirectional=False)

    def attend(x: Tensor) -> Tensor:
        x = stack.causal_attention(x, own, bias, mask)
        return x if memory is None else stack.attention(x, seen, memory, "encdec_attention")

    return stack.logits(stack.layers(x, attend, mask), table)


def _same(segments: Tensor, memory_segments: Tensor, memory_length: str) -> Tensor:
    """Whether a position and one of the memory are of one pair."""
    return attention_mask_same_segment(segments, rename_dimension(memory_segments, memory_length, "memory_length"))


def _real(config: TransformerConfig, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """Which tokens are no padding: as given, else as the config says."""
    if mask is None and config.padding_id >= 0:
        return attention_mask_ignore_padding(tokens, config.padding_id)
    return mask


# -- what does not fit -----------------------------------------------------------------------------


def _check_causal(config: TransformerConfig) -> None:
    """ConfigError if the config has an option by which a token would see later ones."""
    if config.token_dropout:
        raise ConfigError(
            f"token_dropout is {config.token_dropout}: the embedding of a token then depends on how"
            " many later ones are hidden.",
            "Set it to 0; it is for encoders.",
        )


def _check_pairs(config: TransformerConfig, packing: PackedPairs | None) -> None:
    """ConfigError where a local window would look across pairs, or sublayers are parallel."""
    if config.parallel:
        raise ConfigError(
            "Transformer: parallel is true for an encoder-decoder, whose decoder attends to the source between the two"
            " sublayers.",
            "Set parallel to false.",
        )
    if packing is not None and config.local_window:
        raise ConfigError(
            f"several pairs share a row and local_window is {config.local_window}: a local window"
            " would look across them.",
            "Give one pair a row, or set local_window to 0.",
        )


def check_tokens(tokens: Tensor, what: str, length_name: str) -> None:
    """ShapeError unless ``tokens`` are integers with the given length dim last."""
    shape = tokens.shape
    if tokens.dtype not in INTEGERS or shape.ndims < 2 or shape[-1].name != length_name:
        raise ShapeError(
            f"the {what} are {tokens.dtype}{shape}.", f"Give int32 [batch, {length_name}].", str(tokens.source)
        )
