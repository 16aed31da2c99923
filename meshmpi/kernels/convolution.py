"""conv: sums of products of what meets, as products of parts of the patch matrix (see `patches`) by BLAS.

With few output channels (depthwise) views of x are multiplied and added, tap by tap.  The operand whose
patches are smaller is the one called x here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from meshmpi.ir.kinds import Conv
from meshmpi.kernels import blas
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch, Slot
from meshmpi.kernels.contraction import Choice, multiplying
from meshmpi.kernels.patches import Layout, Part, View, patch_elements
from meshmpi.kernels.steps import Bound, adding, copying, quiet, run_all, zeroing
from meshmpi.kernels.views import contiguous, strided


def plan_conv(call: Call) -> Plan:
    """y = sum of a * b over what meets; see the module."""
    (a, b), y, dims = call.inputs, call.outputs[0], call.of(Conv).dims
    turned = tuple(s.swapped() for s in dims)
    straight = patch_elements(a, b, y, dims) <= patch_elements(b, a, y, turned)
    layout = Layout(a, b, y, dims) if straight else Layout(b, a, y, turned)
    parts = list(layout.parts(every=False))
    scratch = Scratch()

    def slot(sizes: list[int]) -> Slot | None:
        """As large as the largest part needs."""
        return scratch.reserve((max(sizes),), layout.wide) if sizes else None

    slots = [
        slot([p.padded.elements for p in parts if p.padded is not None]),
        slot([math.prod(p.sizes[d] for d in p.patch) for p in parts if p.patch is not None]),
        slot([layout.elements("w", p) for p in parts if layout.copies("w", p)]),
        slot([layout.elements("y", p) for p in parts if layout.copies("y", p)]),
    ]
    wide = slot([y.elements] if y.dtype != layout.wide and y.elements else [])
    fills = not (parts and layout.covers_y())

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x, w = (array.reshape(-1) for array in (inputs if straight else inputs[::-1]))
        result = outputs[0].reshape(-1)
        sums = result if wide is None else wide.array(workspace)  # not formed in a narrow type
        here = [None if s is None else s.array(workspace) for s in slots]
        binder = _Binder(layout, (x, w, sums), here, blas.find(runtime.blas))
        steps = [zeroing(sums)] if fills else []
        for part in layout.parts():
            steps += binder.steps(part)
        return run_all(steps if wide is None else [*steps, copying(result, sums)])

    return Plan(bind, scratch.bytes)


class _Binder:
    """Binds parts to the arrays of one convolution."""

    def __init__(self, layout: Layout, arrays: Arrays, slots: Sequence[np.ndarray | None], library: blas.Blas):
        self.layout, self.library = layout, library
        self.x, self.w, self.y = arrays
        self.padded, self.patch, self.w_copy, self.y_copy = slots
        self._held: tuple[object, ...] = ()

    def steps(self, part: Part) -> list[Bound]:
        """What makes one part of y."""
        out: list[Bound] = []
        x = self.x
        if part.padded is not None:
            padded, x = part.padded, _slot(self.padded, part.padded.elements)
            source = padded.source.array(self.x, padded.order, padded.sizes)
            out += [zeroing(x), copying(padded.to.array(x, padded.order, padded.sizes), source)]
        if part.choice is None:
            return out + self._points(part, x)
        patches = x[part.x.start :]
        if part.patch is not None:
            patches = _slot(self.patch, math.prod(part.sizes[d] for d in part.patch))
            to = patches.reshape([part.sizes[d] for d in part.patch])
            out.append(copying(to, part.x.array(x, part.patch, part.sizes)))
        return out + self._product(part, part.choice, patches)

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
        loops, m, k, n = choice.shape
        a = strided(patches, (*loops, m, k), choice.steps[0])
        w, before = self.w[part.w.start :], list[Bound]()
        if choice.packed[1] is not None:
            w, before = self._w_packed(part, choice.packed[1])
        b = strided(w, (*loops, k, n), choice.steps[1])
        if choice.packed[2] is None:
            y = strided(self.y[part.y.start :], (*loops, m, n), choice.steps[2])
            bound = self.library.gemm(a, b, y, part.accumulate)
            if bound is not None or not part.accumulate:
                return [*before, bound or multiplying(a, b, y)]
            beside = _slot(self.y_copy, y.size).reshape(y.shape)
            return [*before, multiplying(a, b, beside), adding(y, beside)]
        own = part.y.array(self.y, choice.packed[2], part.sizes)
        copy = _slot(self.y_copy, own.size)
        y = strided(copy, (*loops, m, n), choice.steps[2])
        after = (adding if part.accumulate else copying)(own, copy.reshape(own.shape))
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

        letters = list(range(len(order)))
        product = partial(np.multiply, a, b, out=out)
        if summed:
            product = partial(np.einsum, a, letters, b, letters, letters[: len(of_y)], out=out)
        return [quiet(product), adding(result, out)] if more else [quiet(product)]


def _slot(array: np.ndarray | None, elements: int) -> np.ndarray:
    """The first elements of a slot that planning has reserved."""
    assert array is not None
    return array[:elements]
