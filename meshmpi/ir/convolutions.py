"""Dimension numbers of a convolution: which indices of three dimensions meet.

Integers and names only. Ranges are (start, stop) of global indices, so that blocks and halos are treated alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshmpi.dims import Range
from meshmpi.ir.halos import HaloRegion


class ConvDims(NamedTuple):
    """One dim of x, of w and of y that are convolved.

    Indices i of ``x``, k of ``w`` and o of ``y`` meet where
    ``base * i == stride * o + dilation * k - before``.  An ordinary convolution has base 1; the
    gradient of a strided one has the stride as its base, and so has a transposed convolution.

    Attributes:
        x, w, y: Names of the dims; those of x and y may be the same, with different sizes.
        stride: From one element of y to the next, in elements of x (times ``base``).
        dilation: From one element of w to the next, likewise.
        before: Elements of padding before the first of x, likewise.
        base: At least 1.
    """

    x: str
    w: str
    y: str
    stride: int = 1
    dilation: int = 1
    before: int = 0
    base: int = 1

    def normalized(self) -> ConvDims:
        """The same with a positive base."""
        if self.base > 0:
            return self
        return self._replace(stride=-self.stride, dilation=-self.dilation, before=-self.before, base=-self.base)

    def of_filter(self) -> ConvDims:
        """The dims of x and the gradient of y that makes the gradient of w."""
        return ConvDims(self.x, self.y, self.w, self.dilation, self.stride, self.before, self.base)

    def of_input(self) -> ConvDims:
        """The dims of the gradient of y and w that makes the gradient of x."""
        return ConvDims(self.y, self.w, self.x, self.base, -self.dilation, -self.before, self.stride).normalized()

    def swapped(self) -> ConvDims:
        """The same with x and w in each other's place."""
        return ConvDims(self.w, self.x, self.y, -self.stride, self.base, -self.before, self.dilation).normalized()

    def halo(self, of: int, taps: int) -> HaloRegion:
        """The elements of x that blocks of y (``of`` elements) need with ``taps`` elements of w."""
        reach = self.dilation * (taps - 1)
        low, high = min(0, reach) - self.before, max(0, reach) - self.before
        return HaloRegion(of, self.stride, low, high, self.base)

    def meetings(self, xs: Range, ws: Range, ys: Range) -> int:
        """How many triples of indices meet inside the three ranges."""
        sides = [(self.base, xs), (-self.dilation, ws), (-self.stride, ys)]
        sides.sort(key=lambda side: side[1][1] - side[1][0])
        (factor, taps), (a, ps), (b, qs) = sides
        return sum(_solutions(a, ps, b, qs, -self.before - factor * t) for t in range(*taps))

    def __str__(self) -> str:
        fields = zip(self._fields[3:], self[3:], (1, 1, 0, 1), strict=True)
        more = "".join(f",{name}={value}" for name, value, usual in fields if value != usual)
        return f"({self.x}*{self.w}->{self.y}{more})"


def _solutions(a: int, ps: Range, b: int, qs: Range, c: int) -> int:
    """How many (p, q) of the ranges solve ``a * p + b * q == c``; a and b are not 0."""
    g = math.gcd(a, b)
    if c % g or ps[0] >= ps[1] or qs[0] >= qs[1]:
        return 0
    a, b, c = a // g, b // g, c // g
    if b < 0:
        a, b, c = -a, -b, -c
    # q = (c - a p) / b lies in qs for p between two bounds, and is whole for one p in every b.
    first, last = _factors(a, *sorted((c - b * qs[0], c - b * (qs[1] - 1))))
    first, last = max(first, ps[0]), min(last, ps[1] - 1)
    first += (c * pow(a, -1, b) - first) % b
    return max(0, (last - first) // b + 1)


def _factors(a: int, low: int, high: int) -> tuple[int, int]:
    """The first and last p with ``low <= a * p <= high``; a is not 0."""
    return (-(-low // a), high // a) if a > 0 else (-(-high // a), low // a)


class Steps(NamedTuple):
    """``count`` indices from ``first`` on, every ``step``-th."""

    first: int
    step: int
    count: int


class Phase(NamedTuple):
    """Indices of y and w every two of which meet one index of x, perhaps outside of it.

    Attributes:
        y, w: The indices.
        first: Index of x that the first of both meet.
        per_y, per_w: How far it moves with the next index of y and of w.
    """

    y: Steps
    w: Steps
    first: int
    per_y: int
    per_w: int

    def reach(self) -> Range:
        """The range of x that is met."""
        ends = [self.per_y * (self.y.count - 1), self.per_w * (self.w.count - 1)]
        low, high = (sum(limit(0, e) for e in ends) for limit in (min, max))
        return self.first + low, self.first + high + 1


def phases(dims: ConvDims, xs: Range, ws: Range, ys: Range) -> list[Phase]:
    """All that meets inside the ranges, as few phases as there are remainders by the base.

    Indices of y that meet nothing are in no phase, and no index of y is in two.
    """
    base = dims.base
    y_step = base // math.gcd(base, dims.stride)
    w_step = base // math.gcd(base, dims.dilation)
    out: list[Phase] = []
    for o in range(ys[0], min(ys[0] + y_step, ys[1])):
        for k in range(ws[0], min(ws[0] + w_step, ws[1])):
            i, rest = divmod(dims.stride * o + dims.dilation * k - dims.before, base)
            if rest == 0:
                whole = Phase(
                    Steps(o, y_step, -(-(ys[1] - o) // y_step)),
                    Steps(k, w_step, -(-(ws[1] - k) // w_step)),
                    i,
                    dims.stride * y_step // base,
                    dims.dilation * w_step // base,
                )
                out += _trimmed(whole, xs)
    return out


def _trimmed(phase: Phase, xs: Range) -> list[Phase]:
    """The phase without the first and last indices of y and w that meet nothing inside xs."""
    y = _trim(phase.y, phase.per_y, phase.first, phase.per_w * (phase.w.count - 1), xs)
    first = phase.first + (y.first - phase.y.first) // y.step * phase.per_y
    w = _trim(phase.w, phase.per_w, first, phase.per_y * (y.count - 1), xs)
    first += (w.first - phase.w.first) // w.step * phase.per_w
    return [Phase(y, w, first, phase.per_y, phase.per_w)] if y.count > 0 < w.count else []


def _trim(steps: Steps, per: int, first: int, other: int, xs: Range) -> Steps:
    """The steps j of which ``first + per * j``, plus 0 to ``other``, comes inside xs."""
    low, high = xs[0] - max(0, other), xs[1] - 1 - min(0, other)
    begin, end = _factors(per, low - first, high - first)
    begin, end = max(0, begin), min(steps.count - 1, end)
    return Steps(steps.first + begin * steps.step, steps.step, max(0, end - begin + 1))
