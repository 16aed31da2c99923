"""Which continuations a beam search keeps: bookkeeping of scores, on numbers that all ranks share.

Works on the candidates of one row at a time.  Knows no model, no mesh and no caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Hypothesis:
    """A result of beam search.

    Attributes:
        tokens: Without the stop token.
        score: ``log_probability`` divided by the length penalty.
        log_probability: Of the tokens, and of the stop token where there is one; nats.
        ended: Whether a stop token ended it; else it reached the greatest length.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    ended: bool


def length_penalty(length: int, alpha: float) -> float:
    """((5 + length) / 6)**alpha: 1 for one token.  Source: Wu et al. 2016, equation 14."""
    return ((5.0 + length) / 6.0) ** alpha


@dataclass
class _Beam:
    """A continuation that has not ended."""

    tokens: tuple[int, ...]
    log_probability: float


@dataclass
class Beams:
    """The beams of one row.

    Args:
        width: Continuations kept at each step, and returned.
        alpha: Of the length penalty.
        stop: Tokens that end a continuation.
        longest: Most tokens of a continuation, its stop token counted.

    Attributes:
        alive: Continuations that have not ended, best first; at most ``width``.
        ended: The best that have, best first; at most ``width``.
        done: Whether no further step can change the result.
    """

    width: int
    alpha: float
    stop: Sequence[int]
    longest: int
    alive: list[_Beam] = field(default_factory=lambda: [_Beam((), 0.0)])
    ended: list[Hypothesis] = field(default_factory=list[Hypothesis])
    done: bool = False

    @property
    def considered(self) -> int:
        """Candidates of a step: enough that ``width`` of them do not end."""
        return self.width * (1 + len(set(self.stop)))

    def extend(self, log_probabilities: np.ndarray, tokens: np.ndarray) -> tuple[list, list]:
        """Goes on by one token.

        Args:
            log_probabilities: [beam, candidates] of the most probable next tokens of each beam, in
                falling order.
            tokens: [beam, candidates], which ones these are.

        Returns:
            (token, beam that it continues) of each beam that is alive now.
        """
        old = self.alive
        count = len(old)
        begun = np.array([b.log_probability for b in old])[:, None]
        total = (begun + log_probabilities[:count].astype(np.float64)).reshape(-1)
        best = np.argsort(-total, kind="stable")[: self.considered]
        self.alive, parents = [], []
        for place in best:
            parent, rank = divmod(int(place), log_probabilities.shape[1])
            token = int(tokens[parent, rank])
            if token in self.stop:
                self._end(old[parent].tokens, float(total[place]), len(old[parent].tokens) + 1)
            elif len(self.alive) < self.width:
                self.alive.append(_Beam((*old[parent].tokens, token), float(total[place])))
                parents.append(parent)
        length = len(old[0].tokens) + 1
        self._finish(length)
        return [b.tokens[-1] for b in self.alive], parents

    def _end(
        self, tokens: tuple[int, ...], log_probability: float, length: int, ended: bool = True
    ) -> None:
        score = log_probability / length_penalty(length, self.alpha)
        self.ended.append(Hypothesis(tokens, score, log_probability, ended))
        self.ended.sort(key=lambda h: -h.score)
        del self.ended[self.width :]

    def _finish(self, length: int) -> None:
        """At the greatest length what is alive is a result too, by the same score."""
        if length == self.longest:
            for beam in self.alive:
                self._end(beam.tokens, beam.log_probability, length, False)
            self.done = True
            return
        best = max((self._bound(b, length) for b in self.alive), default=-math.inf)
        self.done = not self.alive or (
            len(self.ended) == self.width and self.ended[-1].score >= best
        )

    def _bound(self, beam: _Beam, length: int) -> float:
        """No continuation of ``beam`` scores more: its log probability can only fall."""
        ends = (length + 1, self.longest)
        return max(beam.log_probability / length_penalty(n, self.alpha) for n in ends)
