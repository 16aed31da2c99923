"""Checkpoints: every rank writes the blocks that it holds; any mesh, layout or storage layout can read them."""

from meshmpi.checkpoint.background import BackgroundSaver
from meshmpi.checkpoint.buddies import Buddies
from meshmpi.checkpoint.folder import find
from meshmpi.checkpoint.loading import Loaded, load, load_newest
from meshmpi.checkpoint.manifest import ForeignCheckpointError, Manifest, check_same_model, read_manifest
from meshmpi.checkpoint.saving import owns_block, save
from meshmpi.errors import missing
from meshmpi.graph.arguments.checked import check_all

Partners = Buddies
"""The former name of `Buddies`."""

__all__ = [
    "BackgroundSaver",
    "Buddies",
    "ForeignCheckpointError",
    "Loaded",
    "Manifest",
    "Partners",
    "check_same_model",
    "find",
    "load",
    "load_newest",
    "owns_block",
    "read_manifest",
    "save",
]


def __getattr__(name: str) -> object:
    raise missing("meshmpi.checkpoint", name, __all__)


check_all(globals(), ["find", "load", "load_newest", "read_manifest", "save"], "checkpoint.")
