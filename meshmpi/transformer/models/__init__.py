"""Transformer models: ``mm.nn.transformer.lm(config, tokens)``."""

from meshmpi.graph import builds_graphs as _builds_graphs
from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.encoder import encoder, masked_lm, masked_lm_loss
from meshmpi.transformer.models.encoder_decoder import PackedPairs, encoder_decoder, encoder_decoder_loss
from meshmpi.transformer.models.language_model import lm, lm_loss
from meshmpi.transformer.models.sizes import (
    PAPER_LM_SIZES,
    PAPER_MT_SIZES,
    encoder_decoder_parameter_count,
    paper_language_model,
    paper_translation_model,
    parameter_count,
)

__all__ = [
    "PAPER_LM_SIZES",
    "PAPER_MT_SIZES",
    "PackedPairs",
    "TransformerConfig",
    "encoder",
    "encoder_decoder",
    "encoder_decoder_loss",
    "encoder_decoder_parameter_count",
    "lm",
    "lm_loss",
    "masked_lm",
    "masked_lm_loss",
    "paper_language_model",
    "paper_translation_model",
    "parameter_count",
]
_check_all(globals(), __all__, "transformer.")
_builds_graphs(__file__)
