"""What all parts of the bench share: how long to measure, where to write, which peers there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from apps.bench.peers import Peers
from apps.bench.step.yardstick import TOY, Sizes, write_start


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        rounds: In which the systems take turns.
        steps: Timed ones of each system and round.
        seconds: Duration of each timing of a loop, a product or a collective.
        points: Sizes in each series of the scaling table, at most.
    """

    sizes: Sizes
    rounds: int
    steps: int
    seconds: float
    scale: float
    most_bytes: int
    points: int


FULL = Effort(Sizes(), 3, 10, 0.3, 1.0, 64 << 20, 4)
QUICK = Effort(Sizes(), 1, 3, 0.05, 0.5, 16 << 20, 2)
TINY = Effort(TOY, 1, 2, 0.001, 0.01, 4096, 1)
"""For tests: everything runs, no figure means anything."""


class Bench(NamedTuple):
    """One run of the bench.

    Attributes:
        folder: Takes tables, plot and first values.
        effort: How much is measured.
        peers: Which are there.
        say: Takes lines of progress.
    """

    folder: Path
    effort: Effort
    peers: Peers
    say: Callable[[str], None]

    def left_out(self, *names: str) -> list[str]:
        """A line for each of these peers that is not there."""
        missing = self.peers.missing
        return [f"Left out: {name}: {missing[name]}" for name in names if name in missing]

    def start(self, sizes: Sizes | None = None) -> Path:
        """The file of first values of a model, written if it is not there."""
        sizes = sizes or self.effort.sizes
        path = self.folder / f"start-{'-'.join(map(str, sizes))}.npz"
        if not path.exists():
            write_start(path, sizes)
        return path
