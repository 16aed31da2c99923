"""Transformers: models, text, tasks, training, decoding, pretrained checkpoints.

``mm.transformer.lm(config, tokens)`` builds a model.
"""

from meshmpi.transformer.models import *  # noqa: F403
from meshmpi.transformer.models import __all__
