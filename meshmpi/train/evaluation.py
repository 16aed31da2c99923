"""The held-out loss, exactly: every token of the text is predicted once, whatever the batch size.

The last window may be shorter than the others and the last batch may have fewer; the places left
over have weight 0.  Knows nothing of training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmpi.errors import DataError
from meshmpi.runtime.arrays import local
from meshmpi.train.vocabulary import Vocabulary, bits_per_byte, count_bytes

Range = tuple[int, int]


@dataclass(frozen=True)
class Evaluation:
    """A held-out loss.

    Attributes:
        loss: Mean, nats per token.
        bits_per_byte: The same, per byte of the text that the tokens stand for.
        tokens: Tokens predicted.
        share: Part of the held-out text that they are.
        seconds: Time taken.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    share: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.loss:.4f} nats/token, {self.bits_per_byte:.4f} bits/byte"
            f" ({self.tokens:,} tokens, {self.share:.0%} of the held-out text,"
            f" {self.seconds:.1f} s)"
        )


class HeldOutText:
    """Windows of ``length`` that follow each other without gap or overlap, in batches.

    Args:
        tokens: The held-out tokens.
        batch: Windows evaluated together.
        length: Tokens per window.
        windows: The most windows to take from the start; 0: all.

    Attributes:
        batches: Number of batches.
        predicted: Number of tokens predicted.
    """

    def __init__(self, tokens: np.ndarray, batch: int, length: int, windows: int = 0) -> None:
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

    def block(
        self, index: int, rows: Range | None = None, columns: Range | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The part of batch ``index`` that one rank holds; no other tokens are read.

        Returns:
            Tokens and targets, int32, and weights, float32; all [rows, columns].
        """
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
    """Feeds each rank the rows and columns that it holds, and reads no others.

    Args:
        step: A compiled step.
        name: A placeholder [batch, length]; all that are fed must be split alike.
    """

    def __init__(self, step: Any, name: str) -> None:
        # A simulated mesh plays all ranks: it is fed the whole.
        self.whole = not hasattr(step.mesh, "comm")
        self.rows, self.columns = (None, None) if self.whole else step.feed_block(name)

    def feeds(self, **blocks: np.ndarray) -> Mapping[str, Any]:
        """What to call the step with."""
        return blocks if self.whole else {name: local(b) for name, b in blocks.items()}


class Evaluator:
    """Computes held-out losses with one compiled step.

    Args:
        step: Fetches the sum of losses, see `model.TrainingGraph.held_out_loss`.
        tokens: The held-out tokens.
        vocabulary: What they mean.
        batch: Windows evaluated together.
        length: Tokens per window.
    """

    def __init__(
        self, step: Any, tokens: np.ndarray, vocabulary: Vocabulary, batch: int, length: int
    ) -> None:
        self._step, self._tokens, self._vocabulary = step, tokens, vocabulary
        self._batch, self._length = batch, length
        self._feeder = BlockFeeder(step, "held_out_tokens")

    def evaluate(self, windows: int = 0) -> Evaluation:
        """The held-out loss.  Collective.

        Args:
            windows: The most windows to take from the start of the text; 0: all.
        """
        text = HeldOutText(self._tokens, self._batch, self._length, windows)
        began, total = time.perf_counter(), 0.0
        for index in range(text.batches):
            x, y, w = text.block(index, self._feeder.rows, self._feeder.columns)
            feeds = self._feeder.feeds(held_out_tokens=x, held_out_targets=y, held_out_weights=w)
            (loss,) = self._step(feeds).values()
            total += loss
        mean = total / text.predicted
        bits = bits_per_byte(mean, text.predicted, text.text_bytes(self._vocabulary))
        share = text.predicted / (len(self._tokens) - 1)
        return Evaluation(mean, bits, text.predicted, share, time.perf_counter() - began)
