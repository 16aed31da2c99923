"""Meshes that fit a number of ranks, and the errors for those that do not.

Knows no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshmpi.dims import MeshShape
from meshmpi.errors import MeshError
from meshmpi.runtime.world import size_by_environment


def alternatives(shape: MeshShape, ranks: int) -> list[MeshShape]:
    """Meshes over the same axes with exactly ``ranks`` ranks, those most like ``shape`` first.

    Near means: few axes shrink to one rank, then small ratios of sizes.
    """

    def distance(sizes: tuple[int, ...]) -> tuple[int, float]:
        pairs = list(zip(sizes, shape.sizes, strict=True))
        lost = sum(size == 1 and wanted > 1 for size, wanted in pairs)
        return lost, round(sum(abs(math.log(size / wanted)) for size, wanted in pairs), 9)

    found = sorted(_factorisations(ranks, len(shape.sizes)), key=distance)
    return [MeshShape(list(zip(shape.names, sizes, strict=True))) for sizes in found]


def _factorisations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``n`` as an ordered product of ``parts`` factors."""
    if parts == 0:
        if n == 1:
            yield ()
        return
    for first in range(n, 0, -1):
        if n % first == 0 and (parts > 1 or first == n):
            for rest in _factorisations(n // first, parts - 1):
                yield (first, *rest)


def size_error(shape: MeshShape, ranks: int) -> MeshError:
    """The error for a communicator of ``ranks`` ranks, with meshes that would fit it."""
    legal = alternatives(shape, ranks)

    def lost(m: MeshShape) -> int:
        return sum(a == 1 < b for a, b in zip(m.sizes, shape.sizes, strict=True))

    near = [str(m) for m in legal if lost(m) == lost(legal[0])][:3]
    remedy = f"Run with mpirun -n {shape.size}"
    if near:
        remedy += f", or use {'one of ' if len(near) > 1 else ''}{', '.join(near)}"
    plural = "s" if shape.size > 1 else ""
    return MeshError(f"mesh {shape} needs {shape.size} rank{plural}, but the communicator has {ranks}.", f"{remedy}.")


def refuse_singletons(ranks: int) -> None:
    """N processes that are each rank 0 of 1 would do the same work, over each other's files."""
    started = size_by_environment()
    if ranks == 1 < started:
        raise MeshError(
            f"the launcher started {started} processes, but each of them is rank 0 of 1: launcher"
            " and MPI library do not fit together.",
            "Run meshmpi doctor: it names both and says what to do.",
        )
