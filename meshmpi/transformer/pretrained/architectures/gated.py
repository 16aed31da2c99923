"""Gated units by the activation that their file names."""

from __future__ import annotations

from meshmpi.errors import ConfigError
from meshmpi.nn.layers import GATED_UNITS
from meshmpi.transformer.pretrained.architectures.options import Options


def gated(options: Options, key: str, value: str) -> str:
    """The gated unit of which ``value`` is the activation.

    Raises:
        ConfigError: There is no such gated unit.
    """
    wanted = (options.activation_named(value, key), "linear")
    for name, pair in GATED_UNITS.items():
        if pair == wanted:
            return name
    raise ConfigError(
        f"this {options.name} model has {key}={value!r}, which has no gated unit.",
        f"Use a model with a unit of {', '.join(GATED_UNITS)}.",
    )
