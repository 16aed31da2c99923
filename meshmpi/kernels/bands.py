"""Sums and products over a band: pairs of indices outside it do not contribute, whatever their values.

A matrix product sets an operand to 0 outside the band. 0 * NaN and 0 * inf are not 0, so if the other operand is not
finite (checked in every step) the sum is formed row by row over the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from meshmpi.dims import Range, Ranges
from meshmpi.ir.bands import Band
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, Scratch, named_view
from meshmpi.kernels.steps import Bound, copying, nothing, quiet, run_all
from meshmpi.kernels.views import BFLOAT16, accumulator_dtype


def ranges_of(*operands: Operand) -> Ranges:
    """Dim -> the range of the blocks of ``operands``."""
    return {n: r for x in operands for n, r in zip(x.names, x.block, strict=True)}


def band_of(call: Call) -> Band | None:
    """The band of an instruction, unless all pairs of its blocks are in it.

    Within a tiled region blocks of one size share what is planned, wherever they begin.
    """
    band = call.instruction.attrs.band
    if band is None or call.ranges:
        return band
    here = ranges_of(*call.inputs, *call.outputs)
    return None if band.covers(here[band.rows], here[band.columns]) else band


def _band(call: Call) -> Band:
    band = call.instruction.attrs.band
    assert band is not None
    return band


def without_band(call: Call) -> Call:
    """The same instruction over all pairs."""
    return call._replace(instruction=call.instruction.replaced(band=None))


def fill_outside(array: np.ndarray, x: Operand, band: Band, value: float) -> Bound:
    """Writes ``value`` wherever the pair of indices is outside the band."""
    here = ranges_of(x)
    rows, columns = here[band.rows], here[band.columns]
    first, end = columns
    some, every = band.seen(rows, columns), band.seen_by_all(rows, columns)
    if every[0] >= every[1]:
        every = (some[1], some[1])
    number = np.asarray(value).astype(array.dtype)
    parts: list[tuple[np.ndarray, np.ndarray | bool]] = []
    for low, high in ((first, some[0]), (some[1], end)):
        if low < high:
            parts.append((_columns(array, x, band, low - first, high - first), True))
    for low, high in ((some[0], every[0]), (every[1], some[1])):
        if low < high:
            outside = _outside(band, rows, (low, high), x)
            parts.append((_columns(array, x, band, low - first, high - first), outside))

    def run() -> None:
        for part, where in parts:
            np.copyto(part, number, where=where)

    return run if parts else nothing


def _columns(array: np.ndarray, x: Operand, band: Band, low: int, high: int) -> np.ndarray:
    at = x.names.index(band.columns)
    return array[(slice(None),) * at + (slice(low, high),)]


def _outside(band: Band, rows: Range, columns: Range, x: Operand) -> np.ndarray:
    """bool over the dims of ``x`` (1 for all but those of the band), True for pairs outside."""
    far = np.arange(*rows)[:, None] - np.arange(*columns)
    outside = np.zeros(far.shape, bool)
    if band.least is not None:
        outside |= far < band.least
    if band.most is not None:
        outside |= far > band.most
    i, j = x.names.index(band.rows), x.names.index(band.columns)
    sizes = [1] * len(x.names)
    sizes[i], sizes[j] = far.shape
    return (outside if i < j else outside.T).reshape(sizes)


def plan_band_reduce(call: Call, plan_of: Callable[[Call], Plan], neutral: float) -> Plan:
    """A reduction of a copy whose elements outside the band are the neutral one."""
    band, x, scratch = _band(call), call.inputs[0], Scratch()
    slot = scratch.reserve(x.sizes, x.dtype)
    inner = plan_of(without_band(call))

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        copy = slot.array(workspace)
        reduce = inner.bind([copy], outputs, workspace[scratch.bytes :], runtime)
        return run_all([copying(copy, inputs[0]), fill_outside(copy, x, band, neutral), reduce])

    return Plan(bind, scratch.bytes + inner.workspace_bytes)


def plan_band_contract(call: Call, plan_of: Callable[[Call], Plan]) -> Plan:
    """A product of two operands over the pairs of a band."""
    band, scratch, y = _band(call), Scratch(), call.outputs[0]
    inner, masked = plan_of(without_band(call)), masked_operand(call, band)
    x = y if masked is None else call.inputs[masked]
    slot = None if masked is None else scratch.reserve(x.sizes, x.dtype)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        rest, ins = workspace[scratch.bytes :], list(inputs)
        if masked is None or slot is None:  # the result has both dims: every product stands alone
            product = inner.bind(ins, outputs, rest, runtime)
            return run_all([product, fill_outside(named_view(outputs[0], y, y.names), y, band, 0.0)])
        ins[masked] = copy = slot.array(workspace)
        before = copying(copy, named_view(inputs[masked], x, x.names))
        product = guarded(call, band, inputs, outputs[0], inner.bind(ins, outputs, rest, runtime))
        return run_all([before, fill_outside(copy, x, band, 0.0), product])

    return Plan(bind, scratch.bytes + inner.workspace_bytes)


def masked_operand(call: Call, band: Band) -> int | None:
    """Which operand is taken for 0 outside the band; None where only the result has both dims."""
    both = {band.rows, band.columns}
    return next((k for k, x in enumerate(call.inputs) if both <= set(x.names)), None)


def guarded(call: Call, band: Band, inputs: Arrays, output: np.ndarray, product: Bound, adding: bool = False) -> Bound:
    """``product`` where the operand that is not masked is finite, else the sum pair by pair.

    Args:
        call: The contract; its operands may be parts of larger arrays.
        inputs, output: Arrays that begin with the first element of each operand.
        product: Computes the sum from a masked operand that is 0 outside the band.
        adding: Whether the result is added to what ``output`` holds.
    """
    other = 1 if masked_operand(call, band) == 0 else 0
    views = [named_view(a, x, x.names) for a, x in zip((*inputs, output), (*call.inputs, *call.outputs), strict=True)]
    at_risk = _at_risk(views[other], call.inputs[other], band, ranges_of(*call.inputs))
    is_finite = _finite_check(at_risk)

    def exactly() -> None:
        if not adding:
            views[2].fill(0)
        for part, terms in _rows(call, band, views):
            part += terms().astype(part.dtype)

    exactly = quiet(exactly)

    def run() -> None:
        if is_finite():
            product()
        else:
            exactly()

    return run


def _at_risk(array: np.ndarray, x: Operand, band: Band, here: Ranges) -> np.ndarray:
    """The elements of an operand that some pair outside the band would multiply."""
    for one in (band, band.turned()):
        if one.columns in x.names:
            rows, columns = here[one.rows], here[one.columns]
            low, high = one.seen_by_all(rows, columns)
            if low >= high or (low > columns[0] and high < columns[1]):
                continue
            if low == columns[0]:
                low, high = high, columns[1]
            else:
                low, high = columns[0], low
            array = _columns(array, x, one, low - columns[0], high - columns[0])
    return array


def _finite_check(x: np.ndarray) -> Callable[[], bool]:
    """Whether all numbers are finite; a sum that overflows counts as not, which is only slower."""
    if x.dtype == BFLOAT16:  # as whole numbers, infinities and NaNs are the largest of either sign
        positive, negative = x.view(np.int16), x.view(np.uint16)
        return lambda: bool(positive.max() < 0x7F80 and negative.max() < 0xFF80) if x.size else True
    total = np.empty((), x.dtype)
    add = quiet(partial(np.add.reduce, x, axis=None, out=total))

    def is_finite() -> bool:
        add()
        return math.isfinite(total)

    return is_finite


def _rows(call: Call, band: Band, views: Arrays) -> Iterator[tuple[np.ndarray, Callable[[], np.ndarray]]]:
    """For each row the part of the result that it adds to, and the sum over its own columns."""
    operands = (*call.inputs, call.outputs[0])
    here = ranges_of(*operands)
    rows, columns = here[band.rows], here[band.columns]
    names = list(here)
    wide = accumulator_dtype(operands[2].dtype)
    for r in range(*rows):
        low, high = band.seen((r, r + 1), columns)
        if low >= high:
            continue
        cut = {band.rows: (r - rows[0], r - rows[0] + 1), band.columns: (low - columns[0], high - columns[0])}
        parts = [
            v[tuple(slice(*cut[n]) if n in cut else slice(None) for n in x.names)]
            for v, x in zip(views, operands, strict=True)
        ]
        axes = [[names.index(n) for n in x.names] for x in operands]
        a, b = (p.astype(wide) for p in parts[:2])
        yield parts[2], lambda a=a, b=b, axes=axes: np.einsum(a, axes[0], b, axes[1], axes[2])
