"""Minimum cut of a directed network; nodes are any hashable names."""

from __future__ import annotations

from collections.abc import Hashable

UNLIMITED = 1 << 200
"""Far above the sum of all real capacities; Python integers have no overflow."""


class Network:
    """Edges with capacities.

    Attributes:
        visits: Edges looked at by `minimum_cut`, a measure of its work.
    """

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._same: list[int] = []  # node -> a node that it is one with, or itself
        self._edges: list[tuple[int, int, int, int]] = []
        self.visits = 0

    def edge(self, a: Hashable, b: Hashable, capacity: int, back: int = 0) -> None:
        """An edge from a to b, and one from b to a with capacity ``back``."""
        self._edges.append((self._node(a), self._node(b), capacity, back))

    def join(self, a: Hashable, b: Hashable) -> None:
        """Makes two nodes one: as edges without limit between them, both ways."""
        self._same[self._one(self._node(a))] = self._one(self._node(b))

    def _node(self, name: Hashable) -> int:
        if name not in self._number:
            self._number[name] = len(self._same)
            self._same.append(len(self._same))
        return self._number[name]

    def _one(self, node: int) -> int:
        same = self._same
        while same[node] != node:
            same[node] = node = same[same[node]]
        return node

    def minimum_cut(self, start: Hashable, end: Hashable) -> set[Hashable]:
        """The nodes on the start's side of the minimum cut nearest to the start.

        Blocking flows (Dinic 1970): one for every length that a shortest path comes to have.  All
        layers of a model are served by the same few, so the time grows with the network and not
        with the number of paths.  Capacities are integers, so the cut is exact.
        """
        source, sink = (self._one(self._node(x)) for x in (start, end))
        graph = _Residual(len(self._same))
        for a, b, capacity, back in self._edges:
            graph.add(self._one(a), self._one(b), capacity, back)
        while graph.measure(source, sink):
            graph.fill(source, sink)
        self.visits += graph.visits
        return {name for name, n in self._number.items() if graph.level[self._one(n)] >= 0}


class _Residual:
    """What is left of all capacities; edge ``e`` and its opposite ``e ^ 1`` are neighbours."""

    def __init__(self, nodes: int):
        self.leaving: list[list[int]] = [[] for _ in range(nodes)]
        self.to: list[int] = []
        self.left: list[int] = []
        self.level: list[int] = []
        self.visits = 0

    def add(self, a: int, b: int, capacity: int, back: int) -> None:
        if a != b:
            self.leaving[a].append(len(self.to))
            self.leaving[b].append(len(self.to) + 1)
            self.to += (b, a)
            self.left += (capacity, back)

    def measure(self, source: int, sink: int) -> bool:
        """Finds how far each node is from the source (-1: out of reach); whether the sink is reached."""
        level = self.level = [-1] * len(self.leaving)
        level[source] = 0
        queue = [source]
        for a in queue:
            self.visits += len(self.leaving[a])
            for e in self.leaving[a]:
                b = self.to[e]
                if level[b] < 0 and self.left[e]:
                    level[b] = level[a] + 1
                    queue.append(b)
        return level[sink] >= 0

    def fill(self, source: int, sink: int) -> None:
        """Sends what shortest paths can carry.

        A node's edges are tried in order, and one that leads nowhere is never tried again.
        """
        tried = [0] * len(self.leaving)
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
                self.visits += 1
                if self.left[e] and self.level[self.to[e]] == self.level[a] + 1:
                    path.append(e)
                    a = self.to[e]
                else:
                    tried[a] += 1
            elif path:
                a = self.to[path.pop() ^ 1]
                tried[a] += 1
            else:
                return
