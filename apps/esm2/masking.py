"""Masked tokens: which are hidden from a model, and what it sees in their place.

What happens to a token depends on (seed, step, row, position) only, so it is the same in every
layout.  Source: Devlin et al. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apps.esm2.sequences import below, row_numbers
from meshmpi.dims import Range
from meshmpi.errors import ConfigError

_STREAM = 0x6D61736B
"""Added to the seed, so that masks and crops draw different numbers."""


@dataclass(frozen=True)
class Masking:
    """The rule by which tokens are hidden.

    Attributes:
        mask_id: Token that stands for a hidden one.
        special: Tokens that are never hidden, such as padding and marks.
        first: First of the tokens that may stand in the place of a hidden one.
        count: How many follow each other from ``first`` on.
        padding_id: Target where nothing is hidden.
        share: Share of the tokens that are to be predicted.
        masked: Share of these that ``mask_id`` replaces.
        replaced: Share of these that a random token replaces; the rest is unchanged.
    """

    mask_id: int
    special: tuple[int, ...]
    first: int
    count: int
    padding_id: int
    share: float = 0.15
    masked: float = 0.8
    replaced: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or min(self.masked, self.replaced) < 0:
            raise ConfigError(
                f"masking: share is {self.share}, masked {self.masked}, replaced {self.replaced}.",
                "Give a share in (0, 1] and no negative numbers.",
            )
        if self.masked + self.replaced > 1 + 1e-9 or self.count < 1:
            raise ConfigError(
                f"masking: {self.masked} are masked and {self.replaced} replaced by {self.count} tokens.",
                "Give shares of at most 1 in all, and a token to replace others.",
            )

    def apply(
        self, tokens: np.ndarray, seed: int, step: int, rows: Range | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a model sees and what it shall predict.

        Args:
            tokens: int32 [rows, length].
            seed: Any integer.
            step: Number of the step.
            rows: Numbers of the rows in the batch; None: from 0 on.

        Returns:
            Both int32 [rows, length]; targets are ``padding_id`` where nothing is hidden.
        """
        first, last = rows or (0, len(tokens))
        n = tokens.shape[1]
        chance = np.zeros((last - first, n, 3), np.uint64)
        for k in range(first, last):
            chance[k - first] = row_numbers(seed + _STREAM, step, k, 3 * n).reshape(n, 3)
        uniform = (chance >> np.uint64(11)) * 2.0**-53
        chosen = (uniform[..., 0] < self.share) & ~np.isin(tokens, self.special)
        hide = chosen & (uniform[..., 1] < self.masked)
        replace = chosen & ~hide & (uniform[..., 1] < self.masked + self.replaced)
        other = self.first + below(chance[..., 2], self.count)
        seen = np.where(hide, self.mask_id, np.where(replace, other, tokens))
        return seen.astype(np.int32), np.where(chosen, tokens, self.padding_id).astype(np.int32)
