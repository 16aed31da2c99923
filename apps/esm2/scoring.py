"""Scores of proteins: how well a model guesses each residue when it is hidden.

The sum over residues of log p(residue | the others) is the pseudo-log-likelihood of a sequence
(Salazar et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apps.esm2.alphabet import MASK, PAD
from apps.esm2.fasta import Record
from apps.esm2.inference import Inference
from apps.esm2.rows import Window, batches
from meshmpi.errors import ConfigError


class Score(NamedTuple):
    """A scored protein.

    Attributes:
        name: Of its record.
        residues: log p of each residue, nats.
    """

    name: str
    residues: np.ndarray

    @property
    def total(self) -> float:
        """Pseudo-log-likelihood, nats."""
        return float(self.residues.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: 1 where the model is sure and right, 20 where it knows nothing."""
        return math.exp(-self.total / len(self.residues))


def rounds(share: float | None) -> int | None:
    """Rows into which a sequence is written so that each residue is hidden once.

    Args:
        share: Of the residues hidden at once; None: one at a time.

    Returns:
        Their number, None for as many as there are residues.

    Raises:
        ConfigError: The share is none.
    """
    if share is None:
        return None
    if not 0 < share <= 1:
        raise ConfigError(f"--masked-share is {share}.", "Give a number in (0, 1].")
    return math.ceil(1 / share - 1e-9)


def score(
    records: Sequence[Record],
    parts: Sequence[Window],
    run: Inference,
    tokens: int,
    share: float | None = None,
    multiple: int = 1,
) -> list[Score]:
    """Scores of all records.  Collective.

    Args:
        records: The proteins.
        parts: Their windows.
        run: Computes `residue_losses`.
        tokens: Of a batch, about.
        share: Of the residues that is hidden at once, evenly spread; None: one residue at a time,
            the exact score, at the cost of a row for each.
        multiple: See `batches`.
    """
    hidden = [h for k in range(len(parts)) for h in _hidden(parts, k, share)]
    lengths = [len(parts[k].tokens) for k, _ in hidden]

    def row(index: int) -> np.ndarray:
        k, columns = hidden[index]
        seen = parts[k].tokens.copy()
        seen[columns] = MASK
        return seen

    found = [Score(r.name, np.full(len(r.sequence), np.nan)) for r in records]
    for batch in batches(lengths, row, tokens, multiple):
        targets = np.full(batch.tokens.shape, PAD, np.int32)
        for line, index in zip(targets, batch.rows, strict=False):
            k, columns = hidden[index]
            line[columns] = parts[k].tokens[columns]
        losses = run(batch, targets=targets)
        for line, index in zip(losses, batch.rows, strict=False):
            k, columns = hidden[index]
            found[parts[k].sequence].residues[columns + parts[k].first] = -line[columns]
    return found


def _hidden(parts: Sequence[Window], k: int, share: float | None) -> list[tuple[int, np.ndarray]]:
    """(Window, columns hidden in it) of every row of a window: each kept residue in one of them."""
    columns = np.arange(len(parts[k].tokens))[parts[k].columns()]
    count = rounds(share) or len(columns)
    return [(k, columns[j::count]) for j in range(min(count, len(columns)))]
