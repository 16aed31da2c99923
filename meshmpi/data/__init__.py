"""Readers of your own data: batches by step number, of which each rank reads its part (`mm.data`)."""

from meshmpi.data.reader import Reader, reader, tokens

__all__ = ["Reader", "reader", "tokens"]
