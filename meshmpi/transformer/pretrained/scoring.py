"""Computes log-likelihoods of texts: left to right, token by masked token, or of targets given sources.

Rows of similar length are computed together by one program; programs share the variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from meshmpi.api import compile as compile_step
from meshmpi.dims import Dimension, LayoutLike, Shape
from meshmpi.errors import ConfigError
from meshmpi.graph import Graph, Tensor
from meshmpi.graph.ops.elementwise import cast, multiply
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.sources import placeholder
from meshmpi.nn.losses import softmax_cross_entropy_with_logits
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.pretrained.architectures import model_inputs, model_logits
from meshmpi.transformer.pretrained.lines import Line
from meshmpi.transformer.pretrained.model import Model

SHORTEST = 16
"""Positions of the shortest program; each next one has twice as many.  Assumption: at most half of
the work is padding, and few programs are compiled."""


class Score(NamedTuple):
    """The log-likelihood of a line.

    Attributes:
        log_likelihood: Sum of their log-probabilities, nats; for a masked model the pseudo
            log-likelihood: each token given all others.
    """

    number: int  # number of the line
    tokens: int  # tokens that were predicted
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        """exp of the mean loss of a token; infinite where that is too large for a float."""
        mean = -self.log_likelihood / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


class _Row(NamedTuple):
    """One row of a batch: tokens in, tokens to be predicted, which of them count."""

    line: int
    source: list[int]
    tokens: list[int]
    targets: list[int]
    weights: list[float]


class Scorer:
    """Scores lines with a model.

    Args:
        model: A model on disk; its variables are loaded here, each rank reading its own blocks.
        mesh: The ranks.
        layout: As in ``mm.compile``, and so are ``storage`` and ``kernels``.
        batch: Rows computed together.
        mask: Token that stands for a hidden one; default: the config's.
    """

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        layout: LayoutLike = "",
        storage: LayoutLike = None,
        batch: int = 8,
        kernels: str = "auto",
        mask: int | None = None,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batches of {batch} rows.", "Give at least 1.")
        self._mask = model.special.get("mask") if mask is None else mask
        if model.kind == "encoder_decoder" and "decoder_start" not in model.special:
            raise ConfigError(
                f"{model.path} is an encoder-decoder whose config has no decoder_start_token_id.",
                "Add it to config.json.",
            )
        self.model, self.mesh, self.batch = model, mesh, batch
        self._how: dict[str, Any] = {"layout": layout, "storage": storage, "kernels": kernels}
        self._steps: dict[tuple[int, int], tuple[CompiledStep, Tensor]] = {}
        self.variables: VariableStore | None = None

    def scores(self, lines: Sequence[Line]) -> list[Score]:
        """Scores of all lines, in their order.  Collective."""
        sums = [0.0] * len(lines)
        rows = [row for n, line in enumerate(lines) for row in self._rows(n, line)]
        # Stable, so that every rank makes the same batches.
        rows.sort(key=self._lengths)
        for _, alike in groupby(rows, key=self._lengths):
            while part := list(islice(alike, self.batch)):
                for row, value in zip(part, self._run(part), strict=True):
                    sums[row.line] += value
        counts = [0] * len(lines)
        for row in rows:
            counts[row.line] += sum(w > 0 for w in row.weights)
        return [Score(line.number, n, -total) for line, n, total in zip(lines, counts, sums, strict=True)]

    def loaded(self) -> VariableStore:
        """The model's variables, loaded.  Collective."""
        return self._step(1, 1 if self.model.kind == "encoder_decoder" else 0)[0].variables

    def _rows(self, index: int, line: Line) -> Iterator[_Row]:
        if self.model.kind == "encoder":
            yield from self._masked_rows(index, line)
        elif self.model.kind == "encoder_decoder":
            start = self.model.special["decoder_start"]
            tokens = [start, *line.tokens[:-1]]
            yield _Row(index, line.source, tokens, line.tokens, [1.0] * len(tokens))
        else:
            tokens, targets = line.tokens[:-1], line.tokens[1:]
            yield _Row(index, [], tokens, targets, [1.0] * len(tokens))

    def _masked_rows(self, index: int, line: Line) -> Iterator[_Row]:
        if self._mask is None:
            raise ConfigError(
                f"{self.model.path} is a masked model whose config has no mask_token_id, and no"
                " tokenizer says what stands for a hidden token.",
                "Add mask_token_id to config.json, or put its tokenizer next to it.",
            )
        for k, special in enumerate(line.special):
            if not special:
                hidden = list(line.tokens)
                hidden[k] = self._mask
                yield _Row(index, [], hidden, line.tokens, [float(i == k) for i in range(len(hidden))])

    def _lengths(self, row: _Row) -> tuple[int, int]:
        """Positions of the program that computes a row, of target and source."""
        most = self.model.config.length
        source = _bucket(len(row.source), most) if row.source else 0
        return _bucket(len(row.tokens), most), source

    def _run(self, rows: list[_Row]) -> list[float]:
        """Sums of the losses of some rows."""
        length, source_length = self._lengths(rows[0])
        step, losses = self._step(length, source_length)
        feeds = self._empty(length, source_length)
        for k, row in enumerate(rows):
            n = len(row.tokens)
            feeds["tokens"][k, :n], feeds["targets"][k, :n] = row.tokens, row.targets
            feeds["weights"][k, :n], feeds["mask"][k, :n] = row.weights, 1
            if row.source:
                feeds["source"][k, : len(row.source)] = row.source
                feeds["source_mask"][k, : len(row.source)] = 1
        found = step(feeds)[losses].numpy()
        return [float(x) for x in found[: len(rows)]]

    def _empty(self, length: int, source_length: int) -> dict[str, np.ndarray]:
        """Feeds of a batch of padding."""
        shape, wide = (self.batch, length), (self.batch, source_length)
        padding = max(0, self.model.config.padding_id)
        feeds = {"tokens": np.full(shape, padding, np.int32), "weights": np.zeros(shape, np.float32)}
        feeds |= {name: np.zeros(shape, np.int32) for name in ("targets", "mask")}
        if source_length:
            feeds["source"] = np.full(wide, padding, np.int32)
            feeds["source_mask"] = np.zeros(wide, np.int32)
        elif self.model.config.token_types:
            feeds["types"] = np.zeros(shape, np.int32)
        return feeds

    def _step(self, length: int, source_length: int) -> tuple[CompiledStep, Tensor]:
        key = (length, source_length)
        if key not in self._steps:
            with Graph() as graph:
                losses = self._graph(length, source_length)
            step = compile_step(graph, self.mesh, fetches=[losses], variables=self.variables, **self._how)
            if self.variables is None:
                self.model.load(step)
                self.variables = step.variables
            self._steps[key] = (step, losses)
        return self._steps[key]

    def _graph(self, length: int, source_length: int) -> Tensor:
        """Weighted sum of the losses of each row, nats, float32 [batch]."""
        found = self.model.architecture
        inputs = model_inputs(found, self.batch, length, source_length)
        rows, shape = Dimension("batch", self.batch), inputs.tokens.shape
        targets = placeholder("targets", shape, "int32")
        weights = placeholder("weights", shape, "float32")
        logits = model_logits(found, inputs)
        losses = softmax_cross_entropy_with_logits(logits, targets, found.config.vocab_dim)
        return reduce_sum(multiply(cast(losses, "float32"), weights), output_shape=Shape([rows]))


def _bucket(length: int, most: int) -> int:
    """The number of positions of the program for ``length`` tokens."""
    size = SHORTEST
    while size < length:
        size *= 2
    return max(length, min(size, most))


def total(scores: Sequence[Score]) -> Score:
    """All lines as one."""
    return Score(0, sum(s.tokens for s in scores), math.fsum(s.log_likelihood for s in scores))
