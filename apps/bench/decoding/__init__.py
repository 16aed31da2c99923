"""Decoding beside transformers on PyTorch: the same weights, prompts and number of new tokens."""

from apps.bench.decoding.rounds import measure

__all__ = ["measure"]
