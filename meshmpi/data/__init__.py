"""Readers of your own data: batches by step number, of which each rank reads its part (`mm.data`)."""

from meshmpi.data.reader import Reader, reader, tokens
from meshmpi.errors import missing

__all__ = ["Reader", "reader", "tokens"]


def __getattr__(name: str) -> object:
    raise missing("meshmpi.data", name, __all__)
