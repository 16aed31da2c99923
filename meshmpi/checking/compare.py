"""Compares a tensor in a layout with its expected value, block by block and element by element."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshmpi.checking.bounds import distance
from meshmpi.checking.observe import Blocks
from meshmpi.checking.report import Difference
from meshmpi.dims import MeshShape
from meshmpi.graph import Tensor
from meshmpi.ir.program import Instruction, LocalType, Source


class Shown(NamedTuple):
    """A value of a program, or what a step left in a variable."""

    name: str  # of the tensor, or ``variable NAME``
    type: LocalType  # how it is split
    blocks: Blocks  # rank -> its block
    made_by: Instruction | None = None  # the instruction that made it; None for what a step returned or left


def compared(
    tensor: Tensor, shown: Shown, want: np.ndarray, bound: np.ndarray, alone: np.ndarray, mesh: MeshShape
) -> Difference:
    """Every rank's block of ``shown``, perhaps in another order of dims, against the same block of ``want``.

    ``bound`` says by how much each element may differ, ``alone`` is what one rank
    computes from the start.
    """
    t = shown.type
    order = [tensor.shape.position(n) for n in t.shape.names]
    want, alone, bound = (x.transpose(order) for x in (want, alone, np.broadcast_to(bound, want.shape)))
    source = Source(shown.name, *tensor.source[1:]) if " " in shown.name else tensor.source
    ratio, at_bound, place = 0.0, float(bound.max(initial=0.0)), ""
    apart, from_one, wrong, elements, undecided = 0.0, 0.0, 0, 0, 0
    for rank, got in shown.blocks.items():
        ranges = t.block(mesh, mesh.coordinates(rank))
        here = (*(slice(a, b) for a, b in ranges), ...)
        right, most = want[here], bound[here]
        if got.shape != right.shape:
            raise ValueError(f"a block of shape {got.shape} where {right.shape} belongs")
        d, known = distance(got, right), np.isfinite(most)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = np.where(known & (d != 0.0), d / most, 0.0)
        wrong, elements = wrong + int((known & (d > most)).sum()), elements + got.size
        undecided, apart = undecided + int((~known).sum()), max(apart, float(d.max(initial=0.0, where=known)))
        from_one = max(from_one, float(distance(got, alone[here]).max(initial=0.0)))
        if ratios.max(initial=0.0) > ratio:
            at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
            ratio, at_bound = float(ratios[at]), float(most[at])
            index = ", ".join(f"{n}={int(k) + a}" for n, k, (a, _) in zip(t.shape.names, at, ranges, strict=True))
            place = f"[{index}] on rank {rank}: {got[at].item()!r}, not {right[at].item()!r}"
    return Difference(shown.name, source, apart, at_bound, ratio, from_one, wrong, elements, undecided, place)
