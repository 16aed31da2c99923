"""Transformer models: ``mm.nn.transformer.lm(config, tokens)``."""

from meshmpi.nn.transformer.config import TransformerConfig
from meshmpi.nn.transformer.encoder import encoder, masked_lm, masked_lm_loss
from meshmpi.nn.transformer.encoder_decoder import (
    PackedPairs,
    encoder_decoder,
    encoder_decoder_loss,
)
from meshmpi.nn.transformer.language_model import lm, lm_loss
from meshmpi.nn.transformer.sizes import (
    PAPER_LM_SIZES,
    PAPER_MT_SIZES,
    encoder_decoder_parameter_count,
    paper_language_model,
    paper_translation_model,
    parameter_count,
)

__all__ = [
    "PAPER_LM_SIZES", "PAPER_MT_SIZES", "PackedPairs", "TransformerConfig", "encoder",
    "encoder_decoder", "encoder_decoder_loss", "encoder_decoder_parameter_count", "lm", "lm_loss",
    "masked_lm", "masked_lm_loss", "paper_language_model", "paper_translation_model",
    "parameter_count",
]  # fmt: skip
