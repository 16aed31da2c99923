"""Counts parameters by formula, and makes the models of the paper's Tables 2 and 3."""

from __future__ import annotations

from meshmpi.errors import ConfigError
from meshmpi.nn.layers import factors
from meshmpi.transformer.models.config import TransformerConfig

PAPER_LM_SIZES = tuple(range(7))
"""k of the language models of Table 2: d_ff 4096 * 2**k, 4 * 2**k heads."""
PAPER_MT_SIZES = tuple(range(6))
"""k of the translation models of Table 3: d_ff 2048 * 2**k, 4 * 2**k heads."""


def parameter_count(config: TransformerConfig) -> int:
    """Trainable numbers of the language model `lm`, or of the same layers as `masked_lm`."""
    return _shared(config) + _layers(config) + _ends(config) + _head(config)


def encoder_decoder_parameter_count(config: TransformerConfig) -> int:
    """Trainable numbers of `encoder_decoder`."""
    encoder, decoder = config.encoder_stack, config.decoder_stack
    between = decoder.layers * (_attention(config) + _norm(config))
    stacks = _layers(encoder) + _layers(decoder) + between
    stacks += 0 if config.shared_embedding else config.vocab * config.d_model
    return _shared(config) + stacks + 2 * _ends(config) + _head(config)


def _shared(c: TransformerConfig) -> int:
    """Embedding, softmax matrix and positions."""
    tables = c.vocab * (1 if c.tied_softmax else 2)
    return (tables + (c.positions_dim.size if c.learned_positions else 0)) * c.d_model


def _ends(c: TransformerConfig) -> int:
    """Kinds of tokens, and the norms before the first and behind the last layer of a stack."""
    norms = int(c.embedding_norm) + int(not c.norm_after)
    return c.token_types * c.d_model + norms * _norm(c)


def _head(c: TransformerConfig) -> int:
    """Parameters of the output head without the softmax matrix."""
    transform = c.d_model**2 + c.d_model + _norm(c) if c.head_transform else 0
    return transform + (c.vocab if c.softmax_bias else 0)


def _layers(c: TransformerConfig) -> int:
    """A stack: self-attention and feed-forward or experts, each with its norm; relative biases."""
    each = _attention(c) + 2 * _norm(c)
    mixed = sum(c.has_experts(i) for i in range(c.layers))
    experts = mixed * (c.experts * _feed_forward(c) + c.experts * c.d_model)
    plain = (c.layers - mixed) * _feed_forward(c)
    return c.layers * each + plain + experts + c.relative_buckets * c.heads


def _feed_forward(c: TransformerConfig) -> int:
    inner = len(factors(c.activation))
    biases = inner * c.d_ff + c.d_model if c.ff_bias else 0
    return (inner + 1) * c.d_model * c.d_ff + biases


def _attention(c: TransformerConfig) -> int:
    memory = (c.memory_heads or c.heads) * c.d_kv
    biases = c.heads * c.d_kv + 2 * memory if c.attention_bias else 0
    biases += c.d_model if c.attention_has_output_bias else 0
    norms = {"": 0, "head": 2 * c.d_kv, "all": c.heads * c.d_kv + memory}[c.query_norm]
    return 2 * c.d_model * (c.heads * c.d_kv + memory) + biases + norms


def _norm(c: TransformerConfig) -> int:
    vectors = int(c.norm_scale) + int(c.norm_bias and c.norm == "layer")
    return vectors * c.d_model


_PAPER_TRAINING = {
    "attention_dropout": 0.1,
    "ff_dropout": 0.1,
    "residual_dropout": 0.1,
    "dropout_over_length": True,
    "logit_jitter": 1e-2,
}


def paper_language_model(k: int) -> TransformerConfig:
    """The k-th language model of Table 2, k = 0 (0.14 B parameters) to 6 (4.9 B).

    Example:
        >>> mm.transformer.parameter_count(mm.transformer.paper_language_model(6))
        4899222528
    """
    _check(k, PAPER_LM_SIZES, "language")
    return TransformerConfig(
        vocab=32768, length=256, d_model=1024, d_ff=4096 * 2**k, heads=4 * 2**k, d_kv=256, layers=6, **_PAPER_TRAINING
    )


def paper_translation_model(k: int) -> TransformerConfig:
    """The k-th translation model of Table 3, k = 0 (0.15 B parameters) to 5 (2.9 B).

    The vocabulary of 32,512 is derived: the paper prints "32k", and of the multiples of 128 only
    those up to about 32.5k give all six printed sizes.
    """
    _check(k, PAPER_MT_SIZES, "translation")
    return TransformerConfig(
        vocab=32512,
        length=256,
        d_model=1024,
        d_ff=2048 * 2**k,
        heads=4 * 2**k,
        d_kv=128,
        layers=6,
        label_smoothing=0.1,
        padding_id=0,
        **_PAPER_TRAINING,
    )


def _check(k: int, sizes: tuple[int, ...], what: str) -> None:
    if k not in sizes:
        raise ConfigError(f"the paper has no {what} model number {k}.", f"Give {sizes[0]} to {sizes[-1]}.")
