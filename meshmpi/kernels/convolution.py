"""conv: sums of products of what meets, as matrix products of patches.

A part of the patch matrix (see `patches`) is made in the workspace, small enough for the cache, and
multiplied by BLAS; where x itself can be read as patches there is nothing to make.  With few output
channels (depthwise) views of x are multiplied and added, tap by tap.  The operand whose patches are
smaller is the one called x here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from meshmpi.ir.kinds import Conv
from meshmpi.kernels import blas
from meshmpi.kernels.binding import (
    Arrays,
    Bound,
    Call,
    Plan,
    Runtime,
    Scratch,
    Slot,
    contiguous,
    nothing,
    quiet,
    run_all,
    strided,
)
from meshmpi.kernels.contraction import Choice, copying, multiplying
from meshmpi.kernels.patches import Layout, Padded, Part, View, patch_elements


class ConvPlan(Plan):
    """y = sum of a * b over what meets; see the module."""

    def __init__(self, call: Call):
        a, b = call.inputs
        dims = call.of(Conv).dims
        turned = tuple(s.swapped() for s in dims)
        y = call.outputs[0]
        straight = patch_elements(a, b, y, dims) <= patch_elements(b, a, y, turned)
        self.order = (0, 1) if straight else (1, 0)
        x, w = (call.inputs[k] for k in self.order)
        self.layout = Layout(x, w, y, dims if straight else turned)
        parts = list(self.layout.parts(every=False))
        self.fill = bool(y.elements) and not (parts and self.layout.covers_y())
        self._reserve(parts)

    def _reserve(self, parts: Sequence[Part]) -> None:
        """Slots of the workspace, each as large as the largest part needs."""
        scratch, layout = Scratch(), self.layout

        def slot(sizes: list[int]) -> Slot | None:
            return scratch.reserve((max(sizes),), layout.wide) if sizes else None

        narrow = layout.y.dtype != layout.wide and layout.y.elements
        self.slots = [
            slot([p.padded.elements for p in parts if p.padded is not None]),
            slot([math.prod(p.sizes[d] for d in p.patch) for p in parts if p.patch is not None]),
            slot([layout.elements("w", p) for p in parts if layout.copies("w", p)]),
            slot([layout.elements("y", p) for p in parts if layout.copies("y", p)]),
            slot([layout.y.elements] if narrow else []),
        ]
        self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x, w = (inputs[k].reshape(-1) for k in self.order)
        *slots, wide = (None if s is None else s.array(workspace) for s in self.slots)
        result = outputs[0].reshape(-1)
        y = result if wide is None else wide  # sums are not formed in a narrow type
        steps: list[Bound] = [lambda: y.fill(0)] if self.fill else []
        binder = _Binder(self.layout, x, w, y, slots, blas.find(runtime.blas))
        for part in self.layout.parts():
            steps += binder.steps(part)
        if wide is not None:
            steps.append(copying(result, wide))
        return run_all(steps) if steps else nothing


class _Binder:
    """Binds parts to the arrays of one convolution."""

    def __init__(
        self,
        layout: Layout,
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        slots: Sequence[np.ndarray | None],
        library: blas.Blas,
    ):
        self.layout, self.x, self.w, self.y, self.library = layout, x, w, y, library
        self.padded, self.patch, self.w_copy, self.y_copy = slots
        self._held: tuple[object, ...] = ()

    def steps(self, part: Part) -> list[Bound]:
        """What makes one part of y."""
        out: list[Bound] = []
        x = self.x
        if part.padded is not None:
            x = _slot(self.padded, part.padded.elements)
            out += self._pad(part.padded, x)
        if part.choice is None:
            return out + self._points(part, x)
        patches = x[part.x.start :]
        if part.patch is not None:
            patches = _slot(self.patch, math.prod(part.sizes[d] for d in part.patch))
            to = patches.reshape([part.sizes[d] for d in part.patch])
            out.append(copying(to, part.x.array(x, part.patch, part.sizes)))
        return out + self._product(part, part.choice, patches)

    def _pad(self, padded: Padded, to: np.ndarray) -> list[Bound]:
        source = padded.source.array(self.x, padded.order, padded.sizes)
        copy = copying(padded.to.array(to, padded.order, padded.sizes), source)
        return [lambda: to.fill(0), copy]

    def _w_packed(self, part: Part, order: Sequence[str]) -> tuple[np.ndarray, list[Bound]]:
        """w in the workspace with its dims in ``order``, unless the part before left it there."""
        sizes = [part.sizes[d] for d in order]
        copy = _slot(self.w_copy, math.prod(sizes))
        key = (part.w.start, tuple((d, part.sizes[d], part.w.strides.get(d)) for d in order))
        if key == self._held:
            return copy, []
        self._held = key
        return copy, [copying(copy.reshape(sizes), part.w.array(self.w, order, part.sizes))]

    def _product(self, part: Part, choice: Choice, patches: np.ndarray) -> list[Bound]:
        """The product by BLAS, or np.matmul where it cannot."""
        before: list[Bound] = []
        loops, m, k, n = choice.shape
        a = strided(patches, (*loops, m, k), choice.steps[0])
        if choice.packed[1] is None:
            w = self.w[part.w.start :]
        else:
            w, before = self._w_packed(part, choice.packed[1])
        b = strided(w, (*loops, k, n), choice.steps[1])
        order = choice.packed[2]
        if order is None:
            y = strided(self.y[part.y.start :], (*loops, m, n), choice.steps[2])
            bound = self.library.gemm(a, b, y, part.accumulate)
            if bound is not None or not part.accumulate:
                return [*before, bound or multiplying(a, b, y)]
            beside = _slot(self.y_copy, y.size).reshape(y.shape)
            return [*before, multiplying(a, b, beside), _add(y, beside)]
        copy = _slot(self.y_copy, math.prod(part.sizes[d] for d in order))
        y = strided(copy, (*loops, m, n), choice.steps[2])
        own = part.y.array(self.y, order, part.sizes)
        after = (_add if part.accumulate else copying)(own, copy.reshape(own.shape))
        return [*before, self.library.gemm(a, b, y) or multiplying(a, b, y), after]

    def _points(self, part: Part, x: np.ndarray) -> list[Bound]:
        """Products on views, one tap after the other."""
        layout, out, w, at = self.layout, list[Bound](), self.w, part.w
        if layout.copies("w", part):
            order = (*layout.batch, *layout.columns, *layout.channels)
            w, out = self._w_packed(part, order)
            at = View(0, contiguous(order, part.sizes))
        sizes = {**part.sizes, **dict.fromkeys(part.taps, 1)}
        done: set[int] = set()  # where parts of y begin that have been summed
        for tap in itertools.product(*(range(part.sizes[d]) for d in part.taps)):
            begin = dict(zip(part.taps, tap, strict=True))
            y = part.y.at(begin)
            more = part.accumulate or y.start in done
            out += self._tap(sizes, (part.x.at(begin), x), (at.at(begin), w), y, more)
            done.add(y.start)
        return out

    def _tap(
        self, sizes: dict[str, int], x: tuple[View, np.ndarray], w: tuple[View, np.ndarray], y: View, more: bool
    ) -> list[Bound]:
        """y = x * w summed over the columns, or with ``more`` added to y."""
        layout = self.layout
        of_y = [d for d in (*layout.batch, *layout.rows, *layout.channels) if sizes[d] > 1]
        of_y.sort(key=lambda d: -y.strides[d])
        summed = [d for d in layout.columns if sizes[d] > 1]
        result = y.array(self.y, of_y, sizes)
        out = _slot(self.y_copy, result.size).reshape(result.shape) if more else result
        order = [*of_y, *summed]
        a, b = (
            view.array(array, order, {d: sizes[d] if d in view.strides else 1 for d in order}) for view, array in (x, w)
        )

        def multiply() -> None:
            np.multiply(a, b, out=out)

        def add_products() -> None:
            np.einsum(a, letters, b, letters, letters[: len(of_y)], out=out)

        letters = list(range(len(order)))
        bound = quiet(add_products if summed else multiply)
        return [bound, _add(result, out)] if more else [bound]


def _slot(array: np.ndarray | None, elements: int) -> np.ndarray:
    """The first elements of a slot that planning has reserved."""
    assert array is not None
    return array[:elements]


def _add(to: np.ndarray, summand: np.ndarray) -> Bound:
    def run() -> None:
        np.add(to, summand, out=to)

    return quiet(run)
