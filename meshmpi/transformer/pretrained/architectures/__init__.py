"""Interprets the config.json of a checkpoint: ``architecture(config)``.

Pure Python and NumPy: no files, no MPI, no layout.
"""

from meshmpi.transformer.pretrained.architectures.entries import Architecture, Entry, FileDim
from meshmpi.transformer.pretrained.architectures.graphs import Inputs, model_inputs, model_logits
from meshmpi.transformer.pretrained.architectures.table import ARCHITECTURES, architecture

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Entry",
    "FileDim",
    "Inputs",
    "architecture",
    "model_inputs",
    "model_logits",
]
