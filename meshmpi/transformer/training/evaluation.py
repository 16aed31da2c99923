"""The exact held-out loss: every token is predicted once, whatever the batch size.

The last window of a text may be shorter and the last batch smaller than the others; unused places have weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from meshmpi.dims import Range
from meshmpi.errors import DataError
from meshmpi.runtime.feeding import Held
from meshmpi.training.callback import Evaluation
from meshmpi.transformer.text.base import Vocabulary, count_bytes
from meshmpi.transformer.training.sealed import CheckedArray


@dataclass(frozen=True)
class HeldOutLoss(Evaluation):
    """A held-out loss, the mean in nats per token."""

    title: ClassVar[str] = "held-out loss"
    bits_per_byte: float | None = None  # the same per byte of the text that the tokens stand for; None without a text
    tokens: int = 0  # predicted
    share: float = 1.0  # of the held-out text

    def numbers(self) -> dict[str, float]:
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {**super().numbers(), **bits, "held_out_tokens": self.tokens}

    def __str__(self) -> str:
        numbers = [f"{self.loss:.4f} nats/token"]
        if self.bits_per_byte is not None:
            numbers.append(f"{self.bits_per_byte:.4f} bits/byte")
        numbers += [f"{name} {value:.4f}" for name, value in self.measures.items()]
        data = f"{self.tokens:,} tokens, {self.share:.0%} of the held-out text"
        return f"{', '.join(numbers)} ({data}, {self.seconds:.1f} s)"


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
