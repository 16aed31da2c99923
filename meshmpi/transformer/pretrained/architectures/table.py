"""Finds the architecture of a config.json by its ``model_type``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.pretrained.architectures.decoders import DECODERS
from meshmpi.transformer.pretrained.architectures.encoder_decoders import ENCODER_DECODERS
from meshmpi.transformer.pretrained.architectures.encoders import ENCODERS
from meshmpi.transformer.pretrained.architectures.entries import Architecture
from meshmpi.transformer.pretrained.architectures.options import Options, short
from meshmpi.transformer.pretrained.architectures.row import Row

ARCHITECTURES: dict[str, Row] = dict(sorted({**ENCODERS, **DECODERS, **ENCODER_DECODERS}.items()))
"""model_type -> its row."""


def architecture(config: Mapping[str, object], ignore: Sequence[str] = (), keys: Collection[str] = ()) -> Architecture:
    """The model that a config.json describes.

    Args:
        config: Keys and values, as ``json.load`` gives them.
        ignore: Further keys that change nothing in this model.
        keys: Names of the arrays in the checkpoint.  An untied T5 has one embedding for source and
            target or two; only its arrays show which.

    Returns:
        Its Transformer and where its variables stand in files.

    Raises:
        ConfigError: The ``model_type`` is unknown, or an option has a value that is not
            implemented; both are named.

    Example:
        >>> from meshmpi.transformer.pretrained.architectures import architecture
        >>> found = architecture({"model_type": "gpt2", "n_layer": 2})
        >>> found.kind, found.config.layers, found.entries[0].keys
        ('lm', 2, ('transformer.wte.weight',))
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"the config is of model_type {short(name)}; there are {known}.",
            suggest(str(name), ARCHITECTURES) if name else "Give the config.json of one of them.",
        )
    return ARCHITECTURES[name](Options(config, name, ignore, keys))
