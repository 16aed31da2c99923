"""Minimum cut of a small directed network; nodes are any hashable names."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise


class Network:
    """Edges with capacities; None is without limit."""

    def __init__(self) -> None:
        self._next: dict[Hashable, dict[Hashable, float]] = {}

    def edge(self, a: Hashable, b: Hashable, capacity: int | None) -> None:
        forward = self._next.setdefault(a, {})
        forward[b] = forward.get(b, 0) + (_UNLIMITED if capacity is None else capacity)
        self._next.setdefault(b, {}).setdefault(a, 0)

    def minimum_cut(self, start: Hashable, end: Hashable) -> set[Hashable]:
        """The nodes on the start's side of the minimum cut nearest to the start.

        Shortest augmenting paths (Edmonds and Karp 1972); integers, so exact.
        """
        while True:
            before = self._reach(start, end)
            if end not in before:
                return set(before)
            path = [end]
            while path[-1] != start:
                path.append(before[path[-1]])
            path.reverse()
            flow = min(self._next[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                self._next[a][b] -= flow
                self._next[b][a] += flow

    def _reach(self, start: Hashable, end: Hashable) -> dict[Hashable, Hashable]:
        """Node -> the node before it, for all nodes reachable through spare capacity."""
        before: dict[Hashable, Hashable] = {start: start}
        queue = [start] if start in self._next else []
        for a in queue:
            for b, spare in self._next[a].items():
                if spare > 0 and b not in before:
                    before[b] = a
                    if b == end:
                        return before
                    queue.append(b)
        return before


_UNLIMITED = 1 << 200
"""Far above the sum of all real capacities; Python integers have no overflow."""
