"""Inference of ESM2 beside transformers on PyTorch: the same weights, the same batches."""

from apps.bench.esm2.rounds import measure

__all__ = ["measure"]
