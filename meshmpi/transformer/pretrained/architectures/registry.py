"""The architectures that are known, by the ``model_type`` of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.pretrained.architectures.bert import bert
from meshmpi.transformer.pretrained.architectures.entries import Architecture
from meshmpi.transformer.pretrained.architectures.esm import esm
from meshmpi.transformer.pretrained.architectures.gpt2 import gpt2
from meshmpi.transformer.pretrained.architectures.llama import llama, mistral, qwen2
from meshmpi.transformer.pretrained.architectures.options import Options, short
from meshmpi.transformer.pretrained.architectures.t5 import switch, t5

ARCHITECTURES: dict[str, Callable[[Options], Architecture]] = {
    "bert": bert,
    "esm": esm,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "switch_transformers": switch,
    "t5": t5,
}
"""model_type -> what reads its config."""


def architecture(config: Mapping[str, Any], ignore: Sequence[str] = (), keys: Collection[str] = ()) -> Architecture:
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
