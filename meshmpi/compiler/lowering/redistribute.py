"""Converts a value from any split to any other by a short sequence of instructions.

The order is that of the paper's section 6.1: first what shrinks at no cost (take_shard), then moves (all_to_all),
then what grows (all_gather).
"""

from __future__ import annotations

from meshmpi.dims import Axes, MeshShape
from meshmpi.ir.kinds import AllGather, AllToAll, LocalSlice, Redistribution, nests
from meshmpi.ir.program import LocalType


def moves(mesh: MeshShape, x: LocalType, target: tuple[Axes, ...]) -> list[Redistribution]:
    """Instructions that take a finished value of type ``x`` to the splits ``target``."""
    out: list[Redistribution] = []
    while x.splits != target:
        move = _take(mesh, x, target) or _exchange(mesh, x, target) or _gather(mesh, x, target)
        out.append(move)
        x = move.result(mesh, x)
    return out


def _take(mesh: MeshShape, x: LocalType, target: tuple[Axes, ...]) -> Redistribution | None:
    """Splits a dim further whose present split begins its target, over axes now unused."""
    for d, now, then in zip(x.shape, x.splits, target, strict=True):
        more = then[len(now) :]
        if then[: len(now)] != now or not more or set(more) & set(x.used_axes):
            continue
        if nests(mesh, d.size, now, more):
            return LocalSlice(d.name, more)
    return None


def _exchange(mesh: MeshShape, x: LocalType, target: tuple[Axes, ...]) -> Redistribution | None:
    """Moves the last axes of one dim to the end of another that wants exactly them next."""
    for d, now, then in zip(x.shape, x.splits, target, strict=True):
        keep = _common_prefix(now, then)
        tail = now[keep:]
        for start in range(len(tail)):
            axes = tail[start:]
            for e, now_e, then_e in zip(x.shape, x.splits, target, strict=True):
                wants = then_e[len(now_e) : len(now_e) + len(axes)] == axes
                if e == d or then_e[: len(now_e)] != now_e or not wants:
                    continue
                rest = now[: len(now) - len(axes)]
                if nests(mesh, d.size, rest, axes) and nests(mesh, e.size, now_e, axes):
                    return AllToAll(e.name, d.name, axes)
    return None


def _gather(mesh: MeshShape, x: LocalType, target: tuple[Axes, ...]) -> Redistribution:
    """Joins a dim as far as its split differs from its target; wholly where blocks do not nest."""
    for d, now, then in zip(x.shape, x.splits, target, strict=True):
        keep = _common_prefix(now, then)
        if now == then:
            continue
        if keep == len(now):
            # Begins its target, but the axes are in use elsewhere or the blocks do not nest.
            more = then[len(now) :]
            if set(more) & set(x.used_axes) or not now:
                continue
            keep = 0
        while keep and not nests(mesh, d.size, now[:keep], now[keep:]):
            keep -= 1
        return AllGather(d.name, now[keep:])
    raise AssertionError(f"no move takes {x} to {target}")


def _common_prefix(a: Axes, b: Axes) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
