"""Selects the continuations that beam search keeps, row by row; every rank computes this from the same numbers."""

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
        log_probability: Log-probability of the tokens, a stop token included; nats.
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
        alpha: Exponent of the length penalty.
        stop: Tokens that end a continuation.
        longest: Most tokens of a continuation, its stop token counted.
        power: Not None: the rules of `transformers` instead.  A score is the log probability over
            length**power; only the best ``width`` candidates of a step may end; and the search
            ends as ``early`` says.
        early: True: as soon as ``width`` have ended.  False: when the best beam, scored at its
            present length, is no better than the worst of them.  "never": scored at the length, up
            to the longest, that is best for it.

    Attributes:
        alive: Continuations that have not ended, best first; at most ``width``.
        ended: The best that have, best first; at most ``width``.
        done: Whether no further step can change the result.
    """

    width: int
    alpha: float
    stop: Sequence[int]
    longest: int
    power: float | None = None
    early: bool | str = False
    alive: list[_Beam] = field(default_factory=lambda: [_Beam((), 0.0)])
    ended: list[Hypothesis] = field(default_factory=list[Hypothesis])
    done: bool = False

    @property
    def considered(self) -> int:
        """Candidates of a step: enough that ``width`` of them do not end."""
        return self.width * max(1 + len(set(self.stop)), 2 if self.power is not None else 1)

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
        first = 0  # of those that go on, how many are among the best `width` candidates
        for order, place in enumerate(best):
            parent, rank = divmod(int(place), log_probabilities.shape[1])
            token = int(tokens[parent, rank])
            if token in self.stop:
                if self.power is not None and order >= self.width:
                    continue  # a spare candidate, there only so that enough go on
                self._end(old[parent].tokens, float(total[place]), len(old[parent].tokens) + 1)
            elif len(self.alive) < self.width:
                self.alive.append(_Beam((*old[parent].tokens, token), float(total[place])))
                parents.append(parent)
                first += order < self.width
        self._finish(len(old[0].tokens) + 1, first)
        return [b.tokens[-1] for b in self.alive], parents

    def _end(self, tokens: tuple[int, ...], log_probability: float, length: int, ended: bool = True) -> None:
        score = log_probability / self._penalty(length)
        self.ended.append(Hypothesis(tokens, score, log_probability, ended))
        self.ended.sort(key=lambda h: -h.score)
        del self.ended[self.width :]

    def _penalty(self, length: int) -> float:
        if self.power is not None:
            return length**self.power
        return length_penalty(length, self.alpha)

    def _finish(self, length: int, first: int) -> None:
        """At the greatest length what is alive is a result too, by the same score."""
        if length == self.longest:
            for beam in self.alive if self.power is None else self.alive[:first]:
                self._end(beam.tokens, beam.log_probability, length, False)
            self.done = True
            return
        best = max((self._bound(b, length) for b in self.alive), default=-math.inf)
        full = len(self.ended) == self.width
        at_once = self.power is not None and self.early is True
        self.done = not self.alive or (full and (at_once or self.ended[-1].score >= best))

    def _bound(self, beam: _Beam, length: int) -> float:
        """No continuation of ``beam`` scores more: its log probability can only fall.

        With ``power`` it is what `transformers` takes for that.
        """
        ends = (length + 1, self.longest)
        if self.power is not None:
            far = self.early == "never" and self.power > 0
            return beam.log_probability / self._penalty(self.longest if far else length)
        return max(beam.log_probability / self._penalty(n) for n in ends)
