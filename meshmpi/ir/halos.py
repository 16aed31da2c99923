"""Halos: which elements of a split dimension another rank needs, and which rank sends them.

Integers only. A block is a range of indices; blocks of a dimension are numbered as in `dims.block_range`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from meshmpi.dims import block_range


class HaloRegion(NamedTuple):
    """The elements i of a dimension that a block of another, of ``of`` elements, needs.

    The block [first, last] of the other dimension needs every i with
    ``stride * o + low <= base * i <= stride * o' + high`` for some o, o' of the block: what a
    convolution over taps low..high reads.  Indices outside the dimension count too; what is held
    for them is a fill value, or with a ring the element at the other end.

    The number of elements depends on the length of the block only, so that the first block, which
    is the longest, has the largest halo.
    """

    of: int
    stride: int
    low: int
    high: int
    base: int = 1

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """First and end index of the halo of block [start, stop); empty for an empty block."""
        if start >= stop:
            return 0, 0
        first = self.stride * (start if self.stride >= 0 else stop - 1) + self.low
        span = abs(self.stride) * (stop - 1 - start) + self.high - self.low
        begin = -(-first // self.base)
        return begin, begin + span // self.base + 1

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """The part of `range` that the block really meets; the rest only makes lengths equal."""
        begin, end = self.range(start, stop)
        last = self.stride * (stop - 1 if self.stride >= 0 else start) + self.high
        return begin, max(begin, min(end, last // self.base + 1))

    def __str__(self) -> str:
        base = f"{self.base}i in " if self.base != 1 else ""
        return f"~{self.of}({base}{self.stride}o{self.low:+d}..{self.high:+d})"


class Piece(NamedTuple):
    """A run of elements that one block gives to another.

    ``count`` elements, the first at index ``start`` of input ``operand`` and every ``step``-th
    after it, go to positions ``to``, ``to + 1``, ... of the output; all indices are global.
    """

    source: int
    target: int
    operand: int
    start: int
    to: int
    count: int
    step: int


class HaloExchange(NamedTuple):
    """y[o] = x_j[stride * o + offset_j] along one dimension that is split into ``blocks`` blocks.

    Attributes:
        blocks: Number of blocks of every x_j and of y.
        sizes: Elements of each x_j.
        offsets: One for each x_j.  No two may claim the same element of y.
        size: Elements of y.
        stride: At least 1.
        wrap: Whether indices beyond the (only) x count on from its other end.
        halo: What each rank receives instead of its block of y; then stride 1, offset 0.

    Elements of y that no x_j has are filled by the caller.
    """

    blocks: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    stride: int = 1
    wrap: bool = False
    halo: HaloRegion | None = None

    def target(self, block: int) -> tuple[int, int]:
        """Positions that block ``block`` receives: its block of y, or its halo."""
        if self.halo is None:
            return block_range(self.size, self.blocks, block)
        return self.halo.range(*block_range(self.halo.of, self.blocks, block))

    def needed(self, block: int) -> tuple[int, int]:
        """The part of `target` that is sent; the rest of a halo is never read."""
        if self.halo is None:
            return self.target(block)
        return self.halo.needed(*block_range(self.halo.of, self.blocks, block))

    def rows_sent(self, source: int) -> int:
        """Elements along the dimension that block ``source`` sends to others."""
        return sum(p.count for p in _by_source(self)[source])

    def most_rows_sent(self) -> int:
        """`rows_sent` of the block that sends most: one inside, where the first has no border."""
        return max((sum(p.count for p in row) for row in _by_source(self)), default=0)

    def most_rows_received(self) -> int:
        """Elements along the dimension that one block receives from others, at most."""
        return max(sum(p.count for p in row if p.source != p.target) for row in _by_target(self))


@functools.lru_cache(maxsize=4096)
def _by_target(exchange: HaloExchange) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(_pieces_to(exchange, b)) for b in range(exchange.blocks))


def pieces_to(exchange: HaloExchange, target: int) -> tuple[Piece, ...]:
    """The pieces that block ``target`` receives, those from itself included, by source."""
    return _by_target(exchange)[target]


@functools.lru_cache(maxsize=4096)
def _by_source(exchange: HaloExchange) -> tuple[tuple[Piece, ...], ...]:
    """For each block the pieces that it sends to others, in order of targets."""
    out: list[list[Piece]] = [[] for _ in range(exchange.blocks)]
    for row in _by_target(exchange):
        for p in row:
            if p.source != p.target:
                out[p.source].append(p)
    return tuple(map(tuple, out))


def sent_by(exchange: HaloExchange, source: int) -> tuple[Piece, ...]:
    """The pieces that block ``source`` sends to others, in order of targets."""
    return _by_source(exchange)[source]


def unfilled_positions(exchange: HaloExchange, target: int) -> list[tuple[int, int]]:
    """Ranges of positions, counted within what block ``target`` receives, that no input has."""
    first, end = exchange.target(target)
    out, at = list[tuple[int, int]](), first
    for p in sorted(pieces_to(exchange, target), key=lambda p: p.to):
        if p.to > at:
            out.append((at - first, p.to - first))
        at = p.to + p.count
    if at < end:
        out.append((at - first, end - first))
    return out


def _pieces_to(e: HaloExchange, target: int) -> list[Piece]:
    first, end = e.needed(target)
    out: list[Piece] = []
    if first == end:
        return out
    for operand, (n, offset) in enumerate(zip(e.sizes, e.offsets, strict=True)):
        if n == 0:
            continue
        low, high = e.stride * first + offset, e.stride * (end - 1) + offset
        turns = range(low // n, high // n + 1) if e.wrap else range(1)
        for turn in turns:
            out += _pieces_of_run(e, target, operand, offset - turn * n)
    return sorted(out, key=lambda p: (p.source, p.operand, p.to))


def _pieces_of_run(e: HaloExchange, target: int, operand: int, offset: int) -> list[Piece]:
    """The pieces of y[o] = x[stride * o + offset] without wrapping."""
    first, end = e.needed(target)
    n, out = e.sizes[operand], list[Piece]()
    o = max(first, -(offset // e.stride))
    while o < end:
        i = e.stride * o + offset
        if i >= n:
            break
        source = block_of(n, e.blocks, i)
        stop = block_range(n, e.blocks, source)[1]
        count = min(end - o, -(-(stop - i) // e.stride))
        out.append(Piece(source, target, operand, i, o, count, e.stride))
        o += count
    return out


def block_of(n: int, blocks: int, index: int) -> int:
    """The block of ``n`` elements cut into ``blocks`` that holds element ``index``."""
    base, extra = divmod(n, blocks)
    long = extra * (base + 1)
    return index // (base + 1) if index < long else extra + (index - long) // base
