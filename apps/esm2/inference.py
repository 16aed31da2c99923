"""Runs a model over batches of rows: one compiled program for each shape, weights shared by all.

Knows meshes and layouts as strings only; where weights come from is in `weights`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import meshmpi as mm
from apps.esm2.alphabet import PAD
from apps.esm2.layouts import Splits
from apps.esm2.rows import Batch
from meshmpi.transformer.models import TransformerConfig, encoder, masked_lm

Build = Callable[[TransformerConfig, mm.Shape], mm.Tensor]
"""Config and the shape [batch, length] of a batch -> what is fetched, in the current graph."""


def residue_losses(config: TransformerConfig, shape: mm.Shape) -> mm.Tensor:
    """[batch, length]: -log p of ``targets`` in nats, given ``tokens``; 0 where there is none."""
    tokens = mm.placeholder("tokens", shape, "int32")
    targets = mm.placeholder("targets", shape, "int32")
    logits = masked_lm(config, tokens)
    losses = mm.softmax_cross_entropy_with_logits(logits, targets, config.vocab_dim)
    return mm.multiply(losses, mm.weights_nonzero(targets, PAD, losses.dtype))


def residue_vectors(config: TransformerConfig, shape: mm.Shape) -> mm.Tensor:
    """[batch, length, d_model]: the vector of every token."""
    return encoder(config, mm.placeholder("tokens", shape, "int32"))


def sums_of_vectors(config: TransformerConfig, shape: mm.Shape) -> mm.Tensor:
    """[batch, d_model]: the sum of the vectors of tokens times ``weights``."""
    vectors = residue_vectors(config, shape)
    weights = mm.placeholder("weights", shape, config.dtype)
    return mm.einsum([vectors, weights], [shape[0], vectors.shape[-1]])


class Inference:
    """A model that is called with batches of any shape.

    Args:
        config: The model.
        mesh: A Mesh or a SimulatedMesh.
        splits: How the model lies on it.
        build: What is computed.
        fill: Called once with ``step.variables`` to give them their values.

    Attributes:
        tokens: Tokens computed so far, padding not counted.
        cells: Tokens computed so far, padding counted.
        seconds: Time in steps so far, without compiling.
        comm_seconds: Part of it in collectives.
        weight_bytes: Bytes of variables that this rank (or the largest) holds.
    """

    def __init__(
        self, config: TransformerConfig, mesh: Any, splits: Splits, build: Build, fill: Callable[[Any], None]
    ) -> None:
        self.config, self.mesh, self.splits = splits.config(config), mesh, splits
        self._build, self._fill = build, fill
        self._steps: dict[tuple[int, int], tuple[Any, mm.Tensor]] = {}
        self._variables: Any = None
        self.tokens, self.cells, self.seconds, self.comm_seconds = 0, 0, 0.0, 0.0

    def __call__(self, batch: Batch, **feeds: np.ndarray) -> np.ndarray:
        """The fetched tensor for a batch, whole on every rank.  Collective.

        Args:
            batch: Rows; its tokens are fed.
            feeds: Other placeholders -> arrays.
        """
        step, fetched = self._step(batch.tokens.shape)
        began, communicating = time.perf_counter(), step.comm_seconds
        found = step({"tokens": batch.tokens, **feeds})[fetched]
        self.seconds += time.perf_counter() - began
        self.comm_seconds += step.comm_seconds - communicating
        self.tokens += int((batch.tokens[: len(batch.rows)] != PAD).sum())
        self.cells += batch.tokens.size
        return found.numpy()

    def _step(self, sizes: tuple[int, ...]) -> tuple[Any, mm.Tensor]:
        batch, length = sizes
        if (batch, length) not in self._steps:
            with mm.Graph() as graph:
                shape = mm.Shape([("batch", batch), ("length", length)])
                fetched = self._build(self.config, shape)
            step = mm.compile(
                graph,
                self.mesh,
                self.splits.layout,
                fetches=[fetched],
                storage=self.splits.storage,
                variables=self._variables,
            )
            if self._variables is None:
                self._variables = step.variables
                self._fill(step.variables)
            self._steps[batch, length] = step, fetched
        return self._steps[batch, length]

    def held_weights(self) -> Mapping[int, int]:
        """Rank -> bytes of variables, for the ranks that this process plays."""
        blocks = self._variables.blocks.values() if self._variables is not None else ()
        ranks = self._variables.ranks if self._variables is not None else ()
        return {r: sum(b[r].nbytes for b in blocks) for r in ranks}

    def report(self) -> str:
        """Tokens per second, padding, the share of time in collectives, weights of this rank."""
        seconds, weights = max(self.seconds, 1e-9), self.held_weights()
        return (
            f"{self.tokens:,} tokens in {self.seconds:.2f} s: {self.tokens / seconds:,.0f} tokens/s"
            f" ({1 - self.tokens / max(1, self.cells):.0%} of the cells were padding),"
            f" {self.comm_seconds / seconds:.0%} of the time in collectives;"
            f" {len(self._steps)} programs; weights of a rank {max(weights.values(), default=0):,}"
            " bytes"
        )
