"""The ESM2 models as Transformers of meshmpi; knows no layout.

Source: Lin et al. 2023 and the configs of its checkpoints.
"""

from __future__ import annotations

from apps.esm2.alphabet import MASK, PAD, TOKENS
from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.models import TransformerConfig

SIZES = {
    "8M": (6, 320, 20),
    "35M": (12, 480, 20),
    "150M": (30, 640, 20),
    "650M": (33, 1280, 20),
    "3B": (36, 2560, 40),
    "15B": (48, 5120, 40),
}
"""Name -> layers, d_model, heads; the feed-forward layers are four times as wide as the model."""
OPTIONS = {
    "norm": "layer",
    "norm_epsilon": 1e-5,
    "activation": "gelu_exact",
    "ff_bias": True,
    "attention_bias": True,
    "tied_softmax": True,
    "scale_softmax": False,
    "softmax_bias": True,
    "head_transform": True,
    "learned_positions": False,
    "rotary": True,
    "initializers": "gpt2",
    "scale_logits": True,
    "padding_id": PAD,
    "mask_id": MASK,
    "token_dropout": 0.12,
}
"""What makes a Transformer an ESM2."""


def esm2(size: str, length: int = 1024, **changes: object) -> TransformerConfig:
    """The model of a published size, "8M" to "15B"; random until weights are read.

    Args:
        size: Key of `SIZES`.
        length: Tokens of a row.
        **changes: Other options of the Transformer.

    Example:
        >>> esm2("15B").d_ff
        20480
    """
    if size not in SIZES:
        raise ConfigError(f"there is no ESM2 of size '{size}'.", suggest(size, SIZES))
    layers, d_model, heads = SIZES[size]
    values = {
        "vocab": len(TOKENS),
        "length": length,
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "heads": heads,
        "d_kv": d_model // heads,
        "layers": layers,
        **OPTIONS,
        **changes,
    }
    return TransformerConfig(**values)  # type: ignore[arg-type]


def weight_count(c: TransformerConfig) -> int:
    """Numbers of an ESM2 by formula, from its published structure alone.

    Per layer four projections of attention and two of the feed-forward layer, with biases, and two
    norms; an embedding that is also the last matrix; a norm; and a head of a dense layer, a norm
    and a bias for each token.
    """
    d, wide = c.d_model, c.heads * c.d_kv
    attention = 4 * d * wide + 3 * wide + d
    feed_forward = 2 * d * c.d_ff + c.d_ff + d
    head = d * d + d + 2 * d + c.vocab
    return c.layers * (attention + feed_forward + 4 * d) + 2 * d + c.vocab * d + head
