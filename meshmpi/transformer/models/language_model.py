"""The decoder-only language model of the paper's section 9 (and its modern variants).

One model for every layout: data-parallel ``"batch:all"``, model-parallel
``"heads:all;d_ff:all;vocab:all"``, or both on a two-dimensional mesh.
"""

from __future__ import annotations

from meshmpi.errors import ConfigError, ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.ops.structure import rename_dimension
from meshmpi.ir.scalar import INTEGERS
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.transformer.models.blocks import (
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
        mask: bool [batch, length], True for tokens and False for padding, which no token sees;
            None: all are tokens.
        types: int32 [batch, length], kinds of tokens for a config with ``token_types``; None: 0.

    Returns:
        [batch, length, vocab] in the activation type; position i sees tokens 0..i.

    Raises:
        ShapeError: The tokens have other dims or are too long.
        ConfigError: The config has ``token_dropout``.
    """
    check_tokens(tokens, "tokens", "length")
    check_causal(config)
    length = tokens.shape.dim("length")
    with scope("decoder"):
        table, positions = token_embedding(config), position_embedding(config)
        x = embed(config, tokens, table, positions, training, real=mask, types=types)
        seen = None if mask is None else rename_dimension(mask, "length", "memory_length")
        bias = relative_bias(config, length, bidirectional=False)

        def attend(x: Tensor) -> Tensor:
            return causal_attention_sublayer(config, x, seen, training, bias, mask)

        return softmax_logits(config, layers(config, x, attend, training, mixtures, mask), table, training)


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
    return mean_loss(config, logits, targets, training, mixtures), logits


def check_causal(config: TransformerConfig) -> None:
    """ConfigError if the config has an option by which a token would see later ones."""
    if config.token_dropout:
        raise ConfigError(
            f"token_dropout is {config.token_dropout}: the embedding of a token then depends on how"
            " many later ones are hidden.",
            "Set it to 0; it is for encoders.",
        )


def check_tokens(tokens: Tensor, what: str, length_name: str) -> None:
    """ShapeError unless ``tokens`` are integers with the given length dim last."""
    shape = tokens.shape
    if tokens.dtype not in INTEGERS or shape.ndims < 2 or shape[-1].name != length_name:
        raise ShapeError(
            f"the {what} are {tokens.dtype}{shape}.", f"Give int32 [batch, {length_name}].", str(tokens.source)
        )
