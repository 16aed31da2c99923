"""The encoder alone, for masked language models: every position sees every other.

One model for every layout, as the language model: ``"heads:all;d_ff:all;vocab:all"``, or on a
two-dimensional mesh also ``"d_model:rows"``.
"""

from __future__ import annotations

from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.ops.structure import rename_dimension
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.masks import attention_mask_ignore_padding
from meshmpi.transformer.models.blocks import (
    attention_sublayer,
    embed,
    layers,
    mean_loss,
    position_embedding,
    relative_bias,
    softmax_logits,
    token_embedding,
)
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.language_model import check_tokens


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

    Args:
        config: The model.
        tokens: int32 [batch, length].
        training: Whether dropout acts.
        mixtures: Takes what each mixture of experts returns, for its losses.
        mask: bool [batch, length], True for tokens and False for padding, which no token sees;
            None: as ``config.padding_id`` says, or all are tokens.
        types: int32 [batch, length], kinds of tokens for a config with ``token_types``; None: 0.

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
    if mask is None and config.padding_id >= 0:
        mask = attention_mask_ignore_padding(tokens, config.padding_id)
    with scope("encoder"):
        table, positions = token_embedding(config), position_embedding(config)
        x = embed(config, tokens, table, positions, training, real=mask, types=types)
        seen = None if mask is None else rename_dimension(mask, "length", "memory_length")
        bias = relative_bias(config, tokens.shape.dim("length"), bidirectional=True)

        def attend(x: Tensor) -> Tensor:
            return attention_sublayer(config, x, seen, training, position_bias=bias)

        return layers(config, x, attend, training, mixtures, mask)


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

    Args: as `encoder`.

    Returns:
        [batch, length, vocab].

    Source: BERT (Devlin et al. 2019); ESM-2 (Lin et al. 2023).
    """
    x = encoder(config, tokens, training, mixtures, mask=mask, types=types)
    with scope("encoder"):
        return softmax_logits(config, x, token_embedding(config), training)


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

    Label smoothing, z_loss and the losses of experts act in training only.

    Args:
        config: The model.
        tokens: int32 [batch, length], some of them replaced by ``config.mask_id`` or others.
        targets: int32 [batch, length], the tokens before that.
        weights: [batch, length], how much each position counts: 1 where a token was replaced or
            chosen to be predicted, else 0.
        training: Whether dropout and the training losses act.
        mixtures: Takes what each mixture of experts returns.
        mask: bool [batch, length], as in `encoder`.
        types: int32 [batch, length], as in `encoder`.
    """
    mixtures = [] if mixtures is None else mixtures
    logits = masked_lm(config, tokens, training, mixtures, mask=mask, types=types)
    return mean_loss(config, logits, targets, training, mixtures, weights), logits
