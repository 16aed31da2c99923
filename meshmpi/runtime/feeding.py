"""Feeds each rank the blocks that it holds, so that nobody reads data of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshmpi.dims import Range
from meshmpi.runtime.arrays import local
from meshmpi.runtime.compiled import CompiledStep

Held = Mapping[str, "tuple[Range, ...] | None"]
"""Feed -> (start, stop) along each dimension of the block that this rank holds; None: the whole."""


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
