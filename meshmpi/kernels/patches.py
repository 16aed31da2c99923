"""How a convolution is cut into products of patches: which elements, in which order, how many.

In a `Phase` y[rows, n] is the sum over columns of P[rows, columns] * w[columns, n].  Rows are the indices of y
(and the dims that only x has), columns those of w (and the dims that x and w sum over), and the patch matrix P
holds for each the element of x.  Sizes, strides and global index ranges only; no arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshmpi.dims import Range
from meshmpi.ir.convolutions import ConvDims, Phase, phases
from meshmpi.kernels.binding import Operand
from meshmpi.kernels.contraction import Choice, Groups, choose
from meshmpi.kernels.views import accumulator_dtype, contiguous, strided

PATCH_ELEMENTS = 1 << 18
"""Size of one part of the patch matrix: 1 MB of float32, about a core's second cache.  Status:
assumption."""
FEW_CHANNELS = 8
"""Output channels below which a grouped convolution is not worth matrix products.  Status:
assumption."""
POINTS = 1 << 15
"""Elements per tile of the depthwise path, so that what one tap reads and writes stays in
the second cache.  Status: assumption."""
ONE = "?one"
"""A dim of one element, for products that sum over nothing."""

Strides = dict[str, int]
"""Dim -> distance between neighbours, in elements."""


def y_dim(position: int) -> str:
    """Index of y along a convolved dim; no user's dim has such a name."""
    return f"?y{position}"


def w_dim(position: int) -> str:
    """Index of w along a convolved dim."""
    return f"?w{position}"


class View(NamedTuple):
    """Where elements lie in a flat array."""

    start: int
    strides: Strides

    def at(self, begin: Mapping[str, int]) -> View:
        """The part that begins at these indices."""
        moved = sum(step * begin.get(d, 0) for d, step in self.strides.items())
        return View(self.start + moved, self.strides)

    def array(self, flat: np.ndarray, order: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
        """The elements of ``flat`` with dims in ``order``; a dim without a stride repeats."""
        return strided(flat[self.start :], [sizes[d] for d in order], [self.strides.get(d, 0) for d in order])


class Padded(NamedTuple):
    """A copy of a part of x with zeros where there is no element.

    Attributes:
        source, to: The elements that exist: where they are in x, and where they go in the copy.
        order, sizes: Order and sizes of the dims of both.
        elements: Number of elements of the copy.
    """

    source: View
    to: View
    order: tuple[str, ...]
    sizes: dict[str, int]
    elements: int


class Part(NamedTuple):
    """One product: a part of a phase.

    Attributes:
        x, w, y: Where the elements are; x in the padded copy if there is one.
        padded: The copy, or None where x can be read as it is.
        patch: Order of the dims of P, or None where x is multiplied in place.
        choice: How P, w and y are multiplied by BLAS, or None where it is done point by point.
        accumulate: Whether the product is added to what y holds.
        taps: Point by point: dims of which one index is taken at a time.
    """

    sizes: dict[str, int]
    x: View
    w: View
    y: View
    padded: Padded | None
    patch: tuple[str, ...] | None
    choice: Choice | None
    accumulate: bool
    taps: tuple[str, ...] = ()


def renamed(strides: Mapping[str, int], dims: Mapping[str, tuple[int, Strides]]) -> View:
    """An array with some dims under other names: dim -> (its first index, name -> indices per index)."""
    out, start = dict(strides), 0
    for dim, (first, names) in dims.items():
        step = out.pop(dim)
        start += first * step
        out.update((name, per * step) for name, per in names.items())
    return View(start, out)


def patch_elements(x: Operand, w: Operand, y: Operand, conv_dims: Sequence[ConvDims]) -> int:
    """Elements of the whole patch matrix of x."""
    convolved = [s.x for s in conv_dims]
    n = math.prod(size for d, size in x.extents().items() if d not in convolved)
    for s in conv_dims:
        n *= max(1, y.extents()[s.y] * w.extents()[s.w] // s.base)
    return n


class Layout:
    """Roles, sizes and strides of all dims of one convolution, and its parts."""

    def __init__(self, x: Operand, w: Operand, y: Operand, conv_dims: Sequence[ConvDims]):
        self.x, self.w, self.y, self.conv_dims = x, w, y, conv_dims
        self.wide = accumulator_dtype(y.dtype)
        of_x = [d for d in x.names if d not in [s.x for s in conv_dims]]
        of_w = [d for d in w.names if d not in [s.w for s in conv_dims]]
        of_y = [d for d in y.names if d not in [s.y for s in conv_dims]]
        self.sizes = {d: n for d, n in {**x.extents(), **w.extents()}.items() if d in of_x + of_w}
        ys, ws = (tuple(name(k) for k in range(len(conv_dims))) for name in (y_dim, w_dim))
        self.batch = tuple(d for d in of_x if d in of_w and d in of_y)
        self.rows = (*(d for d in of_x if d not in of_w), *ys)
        self.columns = (*(d for d in of_x if d in of_w and d not in of_y), *ws)
        self.channels = tuple(d for d in of_w if d not in of_x)
        self.phases = [
            phases(s, *(_inside(operand, dim) for operand, dim in ((x, s.x), (w, s.w), (y, s.y)))) for s in conv_dims
        ]
        grouped = math.prod(self.sizes[d] for d in self.batch) > 1
        self.few = grouped and math.prod(self.sizes[d] for d in self.channels) < FEW_CHANNELS

    def covers_y(self) -> bool:
        """Whether every element of y is in a phase."""
        extents = self.y.extents()
        return all(
            sum(p.y.count for p in found) == extents[s.y] for s, found in zip(self.conv_dims, self.phases, strict=True)
        )

    def copies(self, which: str, part: Part) -> bool:
        """Whether w (or y) is multiplied as a copy in the workspace."""
        if part.choice is None:
            summed = part.accumulate or any(part.sizes[d] > 1 for d in part.taps if d in self.columns)
            return summed if which == "y" else self.w.dtype != self.wide
        if part.choice.packed[1 if which == "w" else 2] is not None:
            return True
        # Where BLAS cannot add to y, the product is made in memory of its own; libraries differ in that.
        return part.accumulate and which == "y"

    def elements(self, which: str, part: Part) -> int:
        """Elements of w (or of the product) in one part."""
        dims = (self.batch, self.columns if which == "w" else self.rows, self.channels)
        taps = part.taps if which == "y" else ()
        return math.prod(part.sizes[d] for group in dims for d in group if d not in taps)

    def parts(self, every: bool = True) -> Iterator[Part]:
        """All products, in order; else only some, but one of each kind and size."""
        if self.x.elements and self.w.elements and self.y.elements:
            for combination in itertools.product(*self.phases):
                yield from self._parts_of(combination, every)

    def _parts_of(self, found: Sequence[Phase], every: bool) -> Iterator[Part]:
        sizes = {**self.sizes, ONE: 1}
        for k, p in enumerate(found):
            sizes[y_dim(k)], sizes[w_dim(k)] = p.y.count, p.w.count
        of_w = {s.w: (p.w.first - self.w.start(s.w), {w_dim(k): p.w.step}) for k, (s, p) in self._slides(found)}
        of_y = {s.y: (p.y.first - self.y.start(s.y), {y_dim(k): p.y.step}) for k, (s, p) in self._slides(found)}
        w, y = renamed(self.w.strides(), of_w), renamed(self.y.strides(), of_y)
        direct = self._direct(found)
        # Few channels, or nothing is summed: products of matrices are not worth it.
        points = self.few or all(sizes[d] == 1 for d in (*self.columns, *self.channels))
        if direct is not None and self.x.dtype != self.wide and points:
            direct = None
        if direct is not None and self.x.dtype == self.wide and not points:
            choice = self._choice(sizes, direct.strides, w, y)
            if choice.packed[0] is None:
                yield Part(sizes, direct, w, y, None, None, choice, False)
                return
        pairs = [(w_dim(k), y_dim(k)) for k in range(len(found))] if points else []
        taps = tuple(min(pair, key=lambda d: sizes[d]) for pair in pairs)
        limit = POINTS * math.prod(sizes[d] for d in taps) if points else PATCH_ELEMENTS
        done: set[tuple[tuple[str, int], ...]] = set()  # rows of which a part has been summed
        known: dict[tuple[int, ...], tuple[tuple[str, ...], Choice]] = {}
        for begin, part_sizes in self._cuts(sizes, w, y, limit, every):
            own = tuple((d, begin.get(d, 0)) for d in (*self.batch, *self.rows))
            x, padded = (direct.at(begin), None) if direct is not None else self._padded(found, begin, part_sizes)
            at = (part_sizes, x, w.at(begin), y.at(begin), padded)
            if points:
                yield Part(*at, None, None, own in done, taps)
            else:
                yield self._product(*at, own in done, known)
            done.add(own)

    def _slides(self, found: Sequence[Phase]) -> Iterator[tuple[int, tuple[ConvDims, Phase]]]:
        return iter(enumerate(zip(self.conv_dims, found, strict=True)))

    def _direct(self, found: Sequence[Phase]) -> View | None:
        """x as patches, or None where some of them are not inside the block."""
        dims: dict[str, tuple[int, Strides]] = {}
        for k, (s, p) in self._slides(found):
            low, high = p.reach()
            start, stop = self.x.block[self.x.names.index(s.x)]
            if low < start or high > stop:
                return None
            dims[s.x] = p.first - start, {y_dim(k): p.per_y, w_dim(k): p.per_w}
        return renamed(self.x.strides(), dims)

    def _product(
        self,
        sizes: dict[str, int],
        x: View,
        w: View,
        y: View,
        padded: Padded | None,
        more: bool,
        known: dict[tuple[int, ...], tuple[tuple[str, ...], Choice]],
    ) -> Part:
        key = tuple(sizes.values())  # parts of one phase differ in nothing else that counts
        if key not in known:
            patch = self._patch_order(sizes, x, w, y)
            choice = self._choice(sizes, contiguous(patch, sizes), w, y)
            known[key] = patch if choice.packed[0] is None else choice.packed[0], choice
        return Part(sizes, x, w, y, padded, *known[key], more)

    def _patch_order(self, sizes: dict[str, int], x: View, w: View, y: View) -> tuple[str, ...]:
        """Rows as y and columns as w hold them; last whichever x holds in longer runs."""
        rows = sorted((d for d in self.rows if d in y.strides), key=lambda d: -y.strides[d])
        columns = sorted((d for d in self.columns if d in w.strides), key=lambda d: -w.strides[d])
        last = max((columns, rows), key=lambda dims: _run(dims, sizes, x.strides))
        first = rows if last is columns else columns
        return (*self.batch, *first, *last)

    def _choice(self, sizes: dict[str, int], x: Strides, w: View, y: View) -> Choice:
        groups, strides = [], [dict(x), dict(w.strides), dict(y.strides)]
        for dims in (self.batch, self.columns, self.rows, self.channels):
            groups.append(tuple(d for d in dims if sizes[d] > 1))
        if not groups[1]:
            groups[1] = (ONE,)
            strides[0][ONE] = strides[1][ONE] = 1
        used = [d for group in groups for d in group]
        kept = [{d: step for d, step in s.items() if d in used} for s in strides]
        must = [False, self.w.dtype != self.wide, False]
        return choose({d: sizes[d] for d in used}, Groups(*groups), kept, must)

    def _cuts(
        self, sizes: dict[str, int], w: View, y: View, limit: int, every: bool
    ) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
        """(begin, sizes) of parts of ``limit`` elements of P: cut along the longer side.

        Without ``every`` the first two and the last along each dim.
        """
        rows, columns, batch = (math.prod(sizes[d] for d in dims) for dims in (self.rows, self.columns, self.batch))
        side, held = (self.columns, w) if columns > rows else (self.rows, y)
        step, left = dict[str, int](), rows * columns * batch
        for d in (*sorted(side, key=lambda d: -held.strides.get(d, 0)), *self.batch):
            if left > limit and sizes[d] > 1:
                others = left // sizes[d]
                count = -(-sizes[d] // max(1, limit // others))
                step[d] = -(-sizes[d] // count)
                left = others * step[d]
        starts = [list(range(0, sizes[d], n)) for d, n in step.items()]
        if not every:
            starts = [list(dict.fromkeys([*some[:2], some[-1]])) for some in starts]
        for begins in itertools.product(*starts):
            begin = dict(zip(step, begins, strict=True))
            yield begin, {d: min(step.get(d, n), n - begin.get(d, 0)) for d, n in sizes.items()}

    def _padded(
        self, found: Sequence[Phase], begin: Mapping[str, int], sizes: Mapping[str, int]
    ) -> tuple[View, Padded]:
        """A copy of what a part of a phase reaches of x, with zeros outside of the block."""
        x, dims = self.x, dict[str, tuple[int, Strides]]()
        whole = {d: sizes.get(d, 0) for d in x.names}
        copied = dict(whole)
        source, to = {d: begin.get(d, 0) for d in x.names}, dict.fromkeys(x.names, 0)
        for k, (s, p) in self._slides(found):
            start, stop = x.block[x.names.index(s.x)]
            first = p.first + begin.get(y_dim(k), 0) * p.per_y + begin.get(w_dim(k), 0) * p.per_w - start
            y, w = p.y._replace(count=sizes[y_dim(k)]), p.w._replace(count=sizes[w_dim(k)])
            low, high = p._replace(y=y, w=w, first=first).reach()
            source[s.x] = max(low, 0)
            to[s.x] = source[s.x] - low
            whole[s.x], copied[s.x] = high - low, max(0, min(high, stop - start) - source[s.x])
            dims[s.x] = first - low, {y_dim(k): p.per_y, w_dim(k): p.per_w}
        steps = contiguous(x.names, whole)
        padded = Padded(
            View(0, x.strides()).at(source), View(0, steps).at(to), x.names, copied, math.prod(whole.values())
        )
        return renamed(steps, dims), padded


def _inside(operand: Operand, dim: str) -> Range:
    """The elements of a block that exist: a halo may reach beyond the dim."""
    position = operand.type.shape.position(dim)
    start, stop = operand.block[position]
    return max(0, start), min(stop, operand.type.shape[position].size)


def _run(dims: Sequence[str], sizes: Mapping[str, int], strides: Strides) -> int:
    """Neighbouring elements of x that are neighbours in an array that ends with these dims."""
    run = 1
    for d in reversed(dims):
        if sizes[d] > 1 and strides.get(d) != run:
            break
        run *= sizes[d]
    return run
