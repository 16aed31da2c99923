"""Pretrained models: Hugging Face checkpoints, read and written split over a mesh."""

from meshmpi.transformer.pretrained.architectures import ARCHITECTURES, Architecture, architecture
from meshmpi.transformer.pretrained.files import Checkpoint
from meshmpi.transformer.pretrained.layouts import Suggestion, suggested_layout
from meshmpi.transformer.pretrained.load import Loaded, load
from meshmpi.transformer.pretrained.save import save

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Checkpoint",
    "Loaded",
    "Suggestion",
    "architecture",
    "load",
    "save",
    "suggested_layout",
]
