"""The architectures that are known, by the ``model_type`` of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshmpi.errors import ConfigError, suggest
from meshmpi.pretrained.architectures.entries import Architecture
from meshmpi.pretrained.architectures.gpt2 import gpt2
from meshmpi.pretrained.architectures.llama import llama
from meshmpi.pretrained.architectures.options import Options

ARCHITECTURES: dict[str, Callable[[Options], Architecture]] = {
    "gpt2": gpt2, "llama": llama,
}  # fmt: skip
"""model_type -> what reads its config."""


def architecture(config: Mapping[str, Any], ignore: Sequence[str] = ()) -> Architecture:
    """The model that a config.json describes.

    Args:
        config: Keys and values, as ``json.load`` gives them.
        ignore: Keys that shall not be asked about, since they change nothing in this model.

    Returns:
        Its Transformer and where its variables stand in files.

    Raises:
        ConfigError: The ``model_type`` is unknown, or an option has a value that is not
            implemented; both are named.

    Example:
        >>> from meshmpi.pretrained import architecture
        >>> found = architecture({"model_type": "gpt2", "n_layer": 2})
        >>> found.kind, found.config.layers, found.entries[0].keys
        ('lm', 2, ('transformer.wte.weight',))
    """
    name = config.get("model_type")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"the config is of model_type {name!r}; there are {known}.",
            suggest(str(name), ARCHITECTURES) if name else "Give the config.json of one of them.",
        )
    return ARCHITECTURES[name](Options(config, name, ignore))
