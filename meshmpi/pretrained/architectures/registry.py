"""The architectures that are known, by the ``model_type`` of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from meshmpi.errors import ConfigError, suggest
from meshmpi.pretrained.architectures.bert import bert
from meshmpi.pretrained.architectures.entries import Architecture
from meshmpi.pretrained.architectures.esm import esm
from meshmpi.pretrained.architectures.gpt2 import gpt2
from meshmpi.pretrained.architectures.llama import llama, mistral, qwen2
from meshmpi.pretrained.architectures.options import Options
from meshmpi.pretrained.architectures.t5 import switch, t5

ARCHITECTURES: dict[str, Callable[[Options], Architecture]] = {
    "bert": bert, "esm": esm, "gpt2": gpt2, "llama": llama, "mistral": mistral, "qwen2": qwen2,
    "switch_transformers": switch, "t5": t5,
}  # fmt: skip
"""model_type -> what reads its config."""


def architecture(
    config: Mapping[str, Any], ignore: Sequence[str] = (), keys: Collection[str] = ()
) -> Architecture:
    """The model that a config.json describes.

    Args:
        config: Keys and values, as ``json.load`` gives them.
        ignore: Keys that shall not be asked about, since they change nothing in this model.
        keys: Names of the arrays in the checkpoint.  An untied T5 has one embedding for source and
            target or two, and only its arrays tell.

    Returns:
        Its Transformer and where its variables stand in files.

    Raises:
        ConfigError: The ``model_type`` is unknown, or an option has a value that is not
            implemented; both are named.

    Example:
        >>> from meshmpi.pretrained.architectures import architecture
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
    return ARCHITECTURES[name](Options(config, name, ignore, keys))
