"""The exact held-out loss: every token is predicted once, whatever the batch size.

The last window of a text may be shorter and the last batch smaller than the others; unused places have weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from meshmpi.dims import Range
from meshmpi.errors import DataError
from meshmpi.runtime.arrays import local
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.transformer.text.base import Vocabulary, count_bytes
from meshmpi.transformer.training.sealed import CheckedArray

Held = Mapping[str, "tuple[Range, ...] | None"]
"""Feed -> (start, stop) along each dimension of the block that this rank holds; None: the whole."""


@dataclass(frozen=True)
class Evaluation:
    """A held-out loss."""

    loss: float  # mean, nats per token
    bits_per_byte: float | None  # the same per byte of the text that the tokens stand for; None without a text
    tokens: int  # predicted
    share: float  # of the held-out text
    seconds: float  # time taken
    measures: Mapping[str, float] = field(default_factory=dict)  # others by name, such as ``perplexity``

    def __str__(self) -> str:
        numbers = [f"{self.loss:.4f} nats/token"]
        if self.bits_per_byte is not None:
            numbers.append(f"{self.bits_per_byte:.4f} bits/byte")
        numbers += [f"{name} {value:.4f}" for name, value in self.measures.items()]
        data = f"{self.tokens:,} tokens, {self.share:.0%} of the held-out text"
        return f"{', '.join(numbers)} ({data}, {self.seconds:.1f} s)"


@dataclass(frozen=True)
class Sample:
    """What a trained model shows of itself at the end of a run."""

    text: str = ""  # for people
    measures: Mapping[str, float] = field(default_factory=dict)  # by name, such as ``bleu``: for the metrics
    heading: str = ""  # printed above the text


class HeldOut(Protocol):
    """Held-out data in ``batches`` batches."""

    batches: int

    def feeds(self, index: int, held: Held) -> dict[str, np.ndarray]:
        """The blocks of batch ``index`` that this rank holds, one for each name of ``held``."""
        ...


class HeldOutText:
    """Windows of ``length`` tokens that follow each other without gap or overlap, in batches.

    Args:
        windows: Maximum number of windows, from the start; 0: all.

    Attributes:
        predicted: Number of tokens predicted.
    """

    def __init__(self, tokens: np.ndarray | CheckedArray, batch: int, length: int, windows: int = 0) -> None:
        if len(tokens) < 2:
            raise DataError(
                f"the held-out text has {len(tokens)} tokens; none can be predicted.",
                "Use a longer text, or hold out more of it.",
            )
        there_are = -(-(len(tokens) - 1) // length)
        used = min(windows, there_are) if windows else there_are
        self.tokens, self.batch, self.length = tokens, batch, length
        self.batches = -(-used // batch)
        self.predicted = min(used * length, len(tokens) - 1)

    def feeds(self, index: int, held: Held) -> dict[str, np.ndarray]:
        """The feeds of batch ``index``; weights are 1 where a target counts, else 0."""
        names = ("held_out_tokens", "held_out_targets", "held_out_weights")
        return dict(zip(names, self.block(index, *held[names[0]] or ()), strict=True))

    def block(
        self, index: int, rows: Range | None = None, columns: Range | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and weights [rows, columns] of batch ``index`` that one rank holds; it reads no others."""
        (r0, r1), (c0, c1) = rows or (0, self.batch), columns or (0, self.length)
        tokens = np.zeros((r1 - r0, c1 - c0), np.int32)
        targets, weights = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
        for k in range(r1 - r0):
            start = (index * self.batch + r0 + k) * self.length + c0
            n = max(0, min(c1 - c0, self.predicted - start))
            tokens[k, :n] = self.tokens[start : start + n]
            targets[k, :n] = self.tokens[start + 1 : start + n + 1]
            weights[k, :n] = 1.0
        return tokens, targets, weights

    def text_bytes(self, vocabulary: Vocabulary) -> int:
        """Bytes of text that the predicted tokens stand for."""
        return count_bytes(vocabulary, self.tokens[1 : self.predicted + 1])


class BlockFeeder:
    """Feeds each rank its blocks of those placeholders ``names`` that the program of a step needs.

    Attributes:
        held: Where these blocks lie.
    """

    def __init__(self, step: CompiledStep, names: Sequence[str]) -> None:
        self._simulated = step.mesh.simulated  # plays all ranks: it is fed the whole
        needed = [n for n in names if n in step.program.feeds]
        self.held: Held = {n: None if self._simulated else step.feed_block(n) for n in needed}

    def feeds(self, blocks: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """What to call the step with."""
        return {n: blocks[n] if self._simulated else local(blocks[n]) for n in self.held}
