"""Pretrained models: checkpoints of Hugging Face, read and written split over a mesh."""

from meshmpi.pretrained.architectures import ARCHITECTURES, Architecture, architecture
from meshmpi.pretrained.files import Checkpoint
from meshmpi.pretrained.layouts import Suggestion, suggested_layout
from meshmpi.pretrained.load import Loaded, load
from meshmpi.pretrained.save import save

__all__ = [
    "ARCHITECTURES", "Architecture", "Checkpoint", "Loaded", "Suggestion", "architecture", "load",
    "save", "suggested_layout",
]  # fmt: skip
