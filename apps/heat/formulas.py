"""How many temperatures a rank sends to others in one time step, by hand.

Only sizes, a layout and a mesh shape enter; no program.  By shifts, every cell that some other rank
reads at distance k is sent once for that k.  Along a dim split into blocks of at least k cells, a
rank with neighbours on both sides sends k faces of its block each way, so 2 faces per split dim and
step at order 2, and 2 (1 + 2) at order 4.  By a convolution every neighbour gets the cells it needs
in one message, 2 faces per split dim at order 2 and 2 x 2 at order 4; the dims are exchanged one
after another, each with the halos of those before it, so that corners come along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from apps.heat.model import DIMS, Problem
from meshmpi.dims import Axes, Layout, MeshShape, block_range


def default_layout(problem: Problem, mesh: MeshShape) -> str:
    """Each dim over one mesh axis in order; axes that are left go to the last dim."""
    dims = DIMS[: len(problem.sizes)]
    axes = [[a] for a in mesh.names[: len(dims)]]
    if axes:
        axes[-1] += mesh.names[len(dims) :]
    return ";".join(f"{d}:{'+'.join(a)}" for d, a in zip(dims, axes, strict=False))


def halo_elements(problem: Problem, layout: Layout, mesh: MeshShape, coordinates: Mapping[str, int]) -> dict[str, int]:
    """Mesh axes, joined by + -> temperatures that the rank at ``coordinates`` sends over them."""
    axes = [layout.axes(d) for d in DIMS[: len(problem.sizes)]]
    blocks = [_block(n, mesh, a, coordinates) for n, a in zip(problem.sizes, axes, strict=True)]
    held = [stop - start for start, stop in blocks]
    sent: dict[str, int] = {}
    for k, (n, split) in enumerate(zip(problem.sizes, axes, strict=True)):
        if not split:
            continue
        face = math.prod(held[:k] + held[k + 1 :])
        if problem.method == "shift":
            rows = sum(_rows_shifted(n, blocks[k], o, problem) for o in _distinct(n, problem))
        else:
            rows = _rows_of_windows(n, blocks[k], mesh.count(split), problem.reach)
            held[k] += 2 * problem.reach * bool(held[k])
        key = "+".join(split)
        sent[key] = sent.get(key, 0) + rows * face
    return sent


def _block(n: int, mesh: MeshShape, axes: Axes, coordinates: Mapping[str, int]) -> tuple[int, int]:
    return block_range(n, mesh.count(axes), mesh.block_index(axes, coordinates))


def _distinct(n: int, problem: Problem) -> list[int]:
    """Distances along a dim of ``n`` cells; on a ring of 4 two to the left is two to the right."""
    if problem.boundary == "fixed":
        return problem.offsets
    return list(dict.fromkeys(o % n for o in problem.offsets))


def _rows_shifted(n: int, block: tuple[int, int], offset: int, problem: Problem) -> int:
    """Cells of a block, along a dim of ``n`` cells, that are moved to another block."""
    targets = [i + offset for i in range(*block)]
    if problem.boundary == "periodic":
        targets = [i % n for i in targets]
    inside = range(*block)
    return sum(0 <= i < n and i not in inside for i in targets)


def _rows_of_windows(n: int, block: tuple[int, int], blocks: int, reach: int) -> int:
    """Cells of a block within reach of other blocks, once for each of them."""
    rows = 0
    for b in range(blocks):
        start, stop = block_range(n, blocks, b)
        if start < stop and (start, stop) != block:
            rows += max(0, min(block[1], stop + reach) - max(block[0], start - reach))
    return rows
