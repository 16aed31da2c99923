"""Minimum cut of a directed network; nodes are any hashable names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

UNLIMITED = 1 << 200
"""Far above the sum of all real capacities; Python integers have no overflow."""

Edge = tuple[Hashable, Hashable, int, int]
"""From, to, capacity, and capacity of the way back."""


def minimum_cut(
    edges: Iterable[Edge], same: Iterable[tuple[Hashable, Hashable]], start: Hashable, end: Hashable
) -> set[Hashable]:
    """The nodes on the start's side of the minimum cut nearest to the start.

    Blocking flows (Dinic 1970): one for every length that a shortest path comes to have.  All layers of a model are
    served by the same few, so the time grows with the network and not with the number of paths.  Capacities are
    integers, so the cut is exact.  ``same``: pairs of nodes that are one.
    """
    parent: dict[Hashable, Hashable] = {}

    def one(node: Hashable) -> Hashable:
        """The node that stands for all that are one with it."""
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent[above]
        return node

    for a, b in same:
        parent[one(a)] = one(b)
    flow = _Flow()
    for a, b, capacity, back in edges:
        flow.add(one(a), one(b), capacity, back)
    while one(end) in flow.levels(one(start)):
        flow.fill(one(start), one(end))
    reached = flow.level
    return {node for node in list(parent) if one(node) in reached}


class _Flow:
    """What is left of all capacities; edge ``e`` and its opposite ``e ^ 1`` are neighbours."""

    def __init__(self) -> None:
        self.leaving: dict[Hashable, list[int]] = {}
        self.to: list[Hashable] = []
        self.left: list[int] = []
        self.level: dict[Hashable, int] = {}

    def add(self, a: Hashable, b: Hashable, capacity: int, back: int) -> None:
        if a != b:
            self.leaving.setdefault(a, []).append(len(self.to))
            self.leaving.setdefault(b, []).append(len(self.to) + 1)
            self.to += (b, a)
            self.left += (capacity, back)

    def levels(self, source: Hashable) -> dict[Hashable, int]:
        """How far each node is from the source; those out of reach are missing."""
        level = self.level = {source: 0}
        queue = [source]
        for a in queue:
            for e in self.leaving.get(a, ()):
                b = self.to[e]
                if b not in level and self.left[e]:
                    level[b] = level[a] + 1
                    queue.append(b)
        return level

    def fill(self, source: Hashable, sink: Hashable) -> None:
        """Sends what shortest paths can carry.

        A node's edges are tried in order, and one that leads nowhere is never tried again.
        """
        tried = dict.fromkeys(self.leaving, 0)
        path: list[int] = []
        a = source
        while True:
            if a == sink:
                flow = min(self.left[e] for e in path)
                for e in path:
                    self.left[e] -= flow
                    self.left[e ^ 1] += flow
                full = next(k for k, e in enumerate(path) if not self.left[e])
                a = self.to[path[full] ^ 1]
                del path[full:]
            elif tried[a] < len(self.leaving[a]):
                e = self.leaving[a][tried[a]]
                if self.left[e] and self.level.get(self.to[e]) == self.level[a] + 1:
                    path.append(e)
                    a = self.to[e]
                else:
                    tried[a] += 1
            elif path:
                a = self.to[path.pop() ^ 1]
                tried[a] += 1
            else:
                return
