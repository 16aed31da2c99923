"""Seeded bugs: each is one plausible mistake, put in by monkeypatch; tests must catch every one.

A bug that a test missed once belongs into this list.  `python -m tests.mutations` tells which test
catches which, and how.
"""

from __future__ import annotations

from tests.mutations import (
    arguments,
    blocks,
    collectives,
    ends,
    generated,
    gradients,
    halos,
    kernels,
    language,
    lowering,
    memory,
    models,
    passes,
    privacy,
    runs,
    safety,
    tiled,
    trust,
    values,
)
from tests.mutations.registry import MUTATIONS, Mutation

__all__ = [
    "MUTATIONS",
    "Mutation",
    "arguments",
    "blocks",
    "collectives",
    "ends",
    "generated",
    "gradients",
    "halos",
    "kernels",
    "language",
    "lowering",
    "memory",
    "models",
    "passes",
    "privacy",
    "runs",
    "safety",
    "tiled",
    "trust",
    "values",
]
