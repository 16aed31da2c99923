"""A tensor in a layout against what it must be: block by block, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshmpi.checking.bounds import distance
from meshmpi.checking.observe import Blocks
from meshmpi.checking.report import Difference
from meshmpi.dims import MeshShape
from meshmpi.graph import Tensor
from meshmpi.ir.program import LocalType, Source


class Shown(NamedTuple):
    """A value of a program, or what a step left in a variable.

    Attributes:
        name: Name of the tensor, or ``variable NAME``.
        type: How it is split.
        blocks: Rank -> its block.
    """

    name: str
    type: LocalType
    blocks: Blocks


def compared(
    tensor: Tensor, shown: Shown, want: np.ndarray, bound: np.ndarray | None, alone: np.ndarray, mesh: MeshShape
) -> Difference:
    """Every rank's block against the same block of ``want``.

    Args:
        tensor: Tensor of the graph; its dims are those of the arrays.
        shown: What a layout made of it, perhaps in another order of dims.
        want: What it must be.
        bound: By how much each element may differ; None: not at all.
        alone: What one rank computes from the start.
        mesh: The mesh shape.
    """
    t = shown.type
    order = [tensor.shape.position(n) for n in t.shape.names]
    want, alone = want.transpose(order), alone.transpose(order)
    bound = np.zeros(want.shape) if bound is None else bound.transpose(order)
    source = Source(shown.name, *tensor.source[1:]) if " " in shown.name else tensor.source
    ratio, at_bound, place = 0.0, float(bound.max(initial=0.0)), ""
    apart, from_one, wrong, elements, undecided = 0.0, 0.0, 0, 0, 0
    for rank, block in shown.blocks.items():
        ranges = t.block(mesh, mesh.coordinates(rank))
        here = (*(slice(a, b) for a, b in ranges), ...)
        part = _Part(block, want[here], bound[here])
        wrong, elements = wrong + part.wrong, elements + block.size
        undecided, apart = undecided + part.undecided, max(apart, part.apart)
        from_one = max(from_one, float(distance(block, alone[here]).max(initial=0.0)))
        if part.ratio > ratio:
            ratio, at_bound = part.ratio, part.at_bound
            place = part.where(t, [a for a, _ in ranges], rank)
    return Difference(shown.name, source, apart, at_bound, ratio, from_one, wrong, elements, undecided, place)


def worse(a: Difference, b: Difference) -> Difference:
    """The one nearer to, or farther beyond, its bound."""
    return b if b.ratio >= a.ratio else a


class _Part:
    """The comparison of one block."""

    def __init__(self, got: np.ndarray, want: np.ndarray, bound: np.ndarray):
        self.got, self.want = got, want
        if got.shape != want.shape:
            raise ValueError(f"a block of shape {got.shape} where {want.shape} belongs")
        d = distance(got, want)
        known = np.isfinite(bound)
        self.undecided = int((~known).sum())
        self.apart = float(np.max(d, initial=0.0, where=known))
        self.wrong = int((known & (d > bound)).sum())
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.where(d == 0.0, 0.0, d / bound)
        ratio = np.where(known, ratio, 0.0)
        self.ratio, self.at_bound, self._at = 0.0, 0.0, ()
        if ratio.size:
            self._at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
            self.ratio, self.at_bound = float(ratio[self._at]), float(bound[self._at])

    def where(self, t: LocalType, starts: Sequence[int], rank: int) -> str:
        """The element nearest to, or farthest beyond, its bound."""
        index = ", ".join(f"{n}={int(k) + s}" for n, k, s in zip(t.shape.names, self._at, starts, strict=True))
        got, want = (a[self._at].item() for a in (self.got, self.want))
        return f"[{index}] on rank {rank}: {got!r}, not {want!r}"
