"""Transformer models: ``mm.transformer.lm(config, tokens)``."""

from types import ModuleType as _ModuleType

from meshmpi.graph import builds_graphs as _builds_graphs
from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.transformer.models.config import TransformerConfig
from meshmpi.transformer.models.sizes import (
    PAPER_LM_SIZES,
    PAPER_MT_SIZES,
    encoder_decoder_parameter_count,
    paper_language_model,
    paper_translation_model,
    parameter_count,
)
from meshmpi.transformer.models.transformers import (
    PackedPairs,
    encoder,
    encoder_decoder,
    encoder_decoder_loss,
    lm,
    lm_loss,
    masked_lm,
    masked_lm_loss,
)

__all__ = sorted(n for n, v in vars().items() if not (n.startswith("_") or isinstance(v, _ModuleType)))
_check_all(globals(), __all__, "transformer.")
_builds_graphs(__file__)
