"""Converts sizes to text and back."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from meshmpi.errors import ConfigError

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = {"TB": 2**40, "GB": 2**30, "MB": 2**20, "KB": 2**10, "B": 1}  # the longer endings first


def amount(n: float, unit: str) -> str:
    """A number with a decimal prefix.

    Example:
        >>> amount(84488196, "B")
        '84.5 MB'
    """
    for size, prefix in _PREFIXES:
        if n >= size:
            return f"{n / size:.3g} {prefix}{unit}"
    return f"{n:.3g} {unit}"


def bytes_of(size: Any, what: str = "memory_limit") -> int:
    """Bytes as a number: the number itself, or a text such as ``"1.5 GB"``, which counts in powers of 1024.

    Args:
        size: The number or text.
        what: What it is called in the message.

    Raises:
        ConfigError: It is not a number of bytes, of 1 or more.
    """
    number = size
    if isinstance(size, str):
        text = size.strip().upper()
        unit = next((u for u in _UNITS if text.endswith(u)), "")
        try:
            number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
        except ValueError:
            number = 0
    if not isinstance(number, int | float) or not 1 <= number < math.inf:
        raise ConfigError(
            f"{what} is {reprlib.repr(size)}, which is not a number of bytes.", "Write 2e9, '800 MB' or '1.5 GB'."
        )
    return int(number)
