"""Where the boxes of a directed graph go: layers from top to bottom, few crossings.

The method of Sugiyama, Tagawa and Toda (1981): longest-path layers, chains of small boxes for edges
that pass layers, orders by barycentres, then places as near to the neighbours as there is room.
Numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SWEEPS = 6
CHAIN_WIDTH = 10.0
"""Of an edge that passes a layer."""


@dataclass
class Placed:
    """The drawing of a graph.

    Attributes:
        centres: Box -> (x, y) of its middle.
        routes: (from, to) -> points from box to box.
        width, height: Of everything.
    """

    centres: list[tuple[float, float]]
    routes: dict[tuple[int, int], list[tuple[float, float]]]
    width: float
    height: float


@dataclass
class _Node:
    width: float
    height: float
    layer: int
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    x: float = 0.0


def place(
    sizes: Sequence[tuple[float, float]], before: Sequence[Sequence[int]],
    gap: float = 18.0, rise: float = 30.0,
) -> Placed:  # fmt: skip
    """Places boxes.

    Args:
        sizes: (width, height) of each box.
        before: For each box those with an edge to it; all have smaller numbers.
        gap: Room between boxes of a layer.
        rise: Room between layers.
    """
    layers_of: list[int] = []
    for b in before:
        layers_of.append(1 + max((layers_of[p] for p in b), default=-1))
    layers_of = _lowered(layers_of, before)
    nodes = [_Node(w, h, n) for (w, h), n in zip(sizes, layers_of, strict=True)]
    chains = _chains(nodes, before)
    layers: list[list[int]] = [[] for _ in range(max(layers_of, default=-1) + 1)]
    for k, node in enumerate(nodes):
        layers[node.layer].append(k)
    for sweep in range(SWEEPS):
        _order(nodes, layers, downwards=sweep % 2 == 0)
    _coordinates(nodes, layers, gap)
    heights = [max((nodes[k].height for k in layer), default=0.0) for layer in layers]
    tops = [sum(heights[:n]) + n * rise for n in range(len(layers))]
    middles = [t + h / 2 for t, h in zip(tops, heights, strict=True)]
    left = min((n.x - n.width / 2 for n in nodes), default=0.0)
    for n in nodes:
        n.x -= left
    centres = [(nodes[k].x, middles[nodes[k].layer]) for k in range(len(sizes))]
    routes = {
        edge: _route(nodes, middles, heights, [edge[0], *chain, edge[1]])
        for edge, chain in chains.items()
    }
    width = max((n.x + n.width / 2 for n in nodes), default=0.0)
    return Placed(centres, routes, width, tops[-1] + heights[-1] if layers else 0.0)


def _lowered(layers: list[int], before: Sequence[Sequence[int]]) -> list[int]:
    """Boxes without anything before them stand right above the first that uses them."""
    users: dict[int, int] = {}
    for k, ps in enumerate(before):
        for p in ps:
            users[p] = min(users.get(p, layers[k]), layers[k])
    return [
        users[k] - 1 if not before[k] and k in users else layer for k, layer in enumerate(layers)
    ]


def _chains(nodes: list[_Node], before: Sequence[Sequence[int]]) -> dict[tuple[int, int], list]:
    """Edge -> the small boxes on its way; edges of one box share them."""
    chains: dict[tuple[int, int], list[int]] = {}
    trunks: dict[int, list[int]] = {}
    for k, ps in enumerate(before):
        for p in ps:
            trunk = trunks.setdefault(p, [])
            needed = nodes[k].layer - nodes[p].layer - 1
            while len(trunk) < needed:
                above = trunk[-1] if trunk else p
                nodes.append(_Node(CHAIN_WIDTH, 0.0, nodes[p].layer + len(trunk) + 1))
                _join(nodes, above, len(nodes) - 1)
                trunk.append(len(nodes) - 1)
            chains[p, k] = trunk[:needed]
            _join(nodes, trunk[needed - 1] if needed else p, k)
    return chains


def _join(nodes: list[_Node], above: int, below: int) -> None:
    nodes[above].down.append(below)
    nodes[below].up.append(above)


def _order(nodes: list[_Node], layers: list[list[int]], downwards: bool) -> None:
    """Sorts each layer by the mean position of its neighbours in the layer done before."""
    steps = range(1, len(layers)) if downwards else range(len(layers) - 2, -1, -1)
    for n in steps:
        other = layers[n - 1 if downwards else n + 1]
        position = {k: place for place, k in enumerate(other)}
        own = {k: place for place, k in enumerate(layers[n])}

        def mean(k: int, position=position, own=own) -> float:
            near = [position[m] for m in (nodes[k].up if downwards else nodes[k].down)
                    if m in position]  # fmt: skip
            return sum(near) / len(near) if near else float(own[k])

        layers[n].sort(key=mean)


def _coordinates(nodes: list[_Node], layers: list[list[int]], gap: float) -> None:
    for layer in layers:
        _pack(nodes, layer, [0.0] * len(layer), gap)
    for sweep in range(2 * SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            wanted = []
            for k in layer:
                near = nodes[k].up if downwards else nodes[k].down
                near = near or (nodes[k].down if downwards else nodes[k].up)
                xs = sorted(nodes[m].x for m in near)
                middle = len(xs) // 2
                wanted.append(
                    nodes[k].x if not xs
                    else xs[middle] if len(xs) % 2 else (xs[middle - 1] + xs[middle]) / 2
                )  # fmt: skip
            _pack(nodes, layer, wanted, gap)


def _pack(nodes: list[_Node], layer: list[int], wanted: Sequence[float], gap: float) -> None:
    """Puts a layer, in its order, as near to the wanted places as the widths allow.

    Blocks that would overlap are joined and centred on the mean of what their boxes want.
    """
    blocks: list[list] = []  # [sum of wanted starts, count, width, boxes]
    for k, x in zip(layer, wanted, strict=True):
        w = nodes[k].width + (gap if nodes[k].height else 4.0)
        blocks.append([x - w / 2, 1, w, [(k, w)]])
        while len(blocks) > 1:
            a, b = blocks[-2], blocks[-1]
            if a[0] / a[1] + a[2] <= b[0] / b[1]:
                break
            blocks[-2:] = [[a[0] + b[0] - b[1] * a[2], a[1] + b[1], a[2] + b[2], a[3] + b[3]]]
    for total, count, _, boxes in blocks:
        at = total / count
        for k, w in boxes:
            nodes[k].x = at + w / 2
            at += w


def _route(
    nodes: list[_Node], middles: list[float], heights: list[float], path: list[int]
) -> list[tuple[float, float]]:
    """From the bottom of the first box through the layers to the top of the last."""
    first, last = nodes[path[0]], nodes[path[-1]]
    points = [(first.x, middles[first.layer] + first.height / 2)]
    for k in path[1:-1]:
        half = heights[nodes[k].layer] / 2
        points.append((nodes[k].x, middles[nodes[k].layer] - half))
        points.append((nodes[k].x, middles[nodes[k].layer] + half))
    points.append((last.x, middles[last.layer] - last.height / 2))
    return points
