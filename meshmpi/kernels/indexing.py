"""gather, scatter_add and put: rows addressed by an integer tensor.

The own block of the addressed dim begins somewhere in the global one: an index outside the block
reads zeros, and its update is dropped, so that the sum over all blocks is the whole result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshmpi.errors import RangeError
from meshmpi.ir.kinds import Lookup, Put
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, Scratch, named_view
from meshmpi.kernels.steps import Bound, quiet, run_all, zeroing
from meshmpi.kernels.views import accumulator_dtype, contiguous, strided

PIECE_ELEMENTS = 65536
"""Sorted updates summed at a time; the rate is flat from 16384 to 262144 (measured)."""
_INT64 = np.dtype(np.int64)
_BOOL = np.dtype(bool)


def batch_names(index: Operand, other: Operand, dim: str) -> tuple[str, ...]:
    """Dims that the index shares with the tensor it addresses, in the order of the index."""
    return tuple(n for n in index.names if n != dim and n in other.names)


class _Rows:
    """Row numbers of an index in the block [batch, dim], and which of them are in the block."""

    def __init__(self, call: Call, batch: Sequence[str], block: tuple[int, int], size: int, scratch: Scratch):
        self.call, index = call, call.inputs[1]
        self.index, (self.start, self.stop), self.size = index, block, size
        self.names = (*batch, *(n for n in index.names if n not in batch))
        self.batches = math.prod(index.extents()[n] for n in batch)
        self.row = scratch.reserve((index.elements,), _INT64)
        self.outside = scratch.reserve((index.elements,), _BOOL)
        self.below = scratch.reserve((index.elements,), _BOOL)

    def bind(self, index: np.ndarray, workspace: np.ndarray) -> tuple[Bound, np.ndarray, np.ndarray]:
        """(function that computes them, row numbers, mask of those outside)."""
        row, outside, below = (slot.array(workspace) for slot in (self.row, self.outside, self.below))
        ordered = named_view(index, self.index, self.names)
        start, count = np.array(self.start, _INT64), np.array(self.stop - self.start, _INT64)
        shaped, by_batch = row.reshape(ordered.shape), row.reshape(self.batches, -1)
        first = np.arange(self.batches, dtype=_INT64)[:, None] * count
        checked = bool(self.call.of(Lookup).checked)

        def run() -> None:
            if checked:
                self._check(ordered)
            np.subtract(ordered, start, out=shaped)
            np.less(row, 0, out=below)
            np.greater_equal(row, count, out=outside)
            np.logical_or(outside, below, out=outside)
            if len(first) > 1:
                np.add(by_batch, first, out=by_batch)

        return run, row, outside

    def _check(self, index: np.ndarray) -> None:
        """Raises RangeError where an index is outside the whole dimension."""
        wrong = np.argwhere((index < 0) | (index >= self.size))
        if not len(wrong):
            return
        at, attrs = tuple(int(k) for k in wrong[0]), self.call.of(Lookup)
        where = ", ".join(f"{n}={k + self.index.start(n)}" for n, k in zip(self.names, at, strict=True))
        others = f"; so are {len(wrong) - 1} more on this rank" if len(wrong) > 1 else ""
        raise RangeError(
            f"{self.call.instruction.kind}: index {int(index[at])} at [{where}] of"
            f" '{attrs.checked}' is outside dimension '{attrs.dim}' ({self.size}){others}.",
            f"Give 0 to {self.size - 1}, or may_miss=True where indices outside are meant.",
            str(self.call.instruction.source),
        )


def _reordered(array: np.ndarray, names: Sequence[str], sizes: Mapping[str, int], order: Sequence[str]) -> np.ndarray:
    """A contiguous array with dims ``names`` seen with its dims in ``order``."""
    steps = contiguous(names, sizes)
    return strided(array, [sizes[n] for n in order], [steps[n] for n in order])


def plan_gather(call: Call) -> Plan:
    """Inputs table[.., dim, ..] and index; output in any order of dims.

    Dims that both have are batch dims: row numbers then count the rows of all batches, one behind
    the other.
    """
    table, index = call.inputs
    y, dim = call.outputs[0], call.of(Lookup).dim
    axis = table.names.index(dim)
    batch = batch_names(index, table, dim)
    before, after = table.names[:axis], table.names[axis + 1 :]
    if batch:
        before, after = (), tuple(n for n in (*before, *after) if n not in batch)
    scratch, sizes = Scratch(), table.extents()
    rows = _Rows(call, batch, table.block[axis], table.type.shape[axis].size, scratch)
    natural, order = (*before, *rows.names, *after), (*before, *batch, dim, *after)
    if sorted(natural) != sorted(y.names):
        raise call.fail(f"rows {natural} do not fill the output {y.names}.")
    shape = (math.prod(sizes[n] for n in before), index.elements, math.prod(sizes[n] for n in after))
    ordered = scratch.reserve([sizes[n] for n in order], table.dtype) if order != table.names else None
    copied = scratch.reserve(shape, y.dtype) if natural != y.names else None

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        out = outputs[0]
        locate, row, outside = rows.bind(inputs[1], workspace)
        if not inputs[0].size:
            return run_all([locate, zeroing(out)])
        source = inputs[0] if ordered is None else ordered.array(workspace)
        given = named_view(inputs[0], table, order)
        by_row = source.reshape(shape[0], -1, shape[2])
        target = out.reshape(shape) if copied is None else copied.array(workspace)
        result = _reordered(target, natural, y.extents(), y.names)

        def run() -> None:
            if ordered is not None:
                np.copyto(source, given)
            locate()
            np.take(by_row, row, axis=1, out=target, mode="clip")
            if outside.any():
                target[:, outside] = 0
            if copied is not None:
                np.copyto(out, result)

        return run

    return Plan(bind, scratch.bytes)


def plan_scatter_add(call: Call) -> Plan:
    """Inputs updates[index dims and rest, in any order] and index; output [dim and rest].

    Index dims that the output has too are batch dims, as for `plan_gather`.
    Updates are sorted by row, stably, and runs of equal rows are summed in that order, so the
    result depends on nothing but the inputs.
    """
    updates, index = call.inputs
    y, dim = call.outputs[0], call.of(Lookup).dim
    batch, sizes = batch_names(index, y, dim), y.extents()
    rest = [n for n in y.names if n != dim and n not in batch]
    if sorted([*index.names, *rest]) != sorted(updates.names):
        raise call.fail(f"updates {updates.names} are not index {index.names} and {rest}.")
    count, width = index.elements, math.prod(sizes[n] for n in rest)
    wide, scratch = accumulator_dtype(y.dtype), Scratch()
    rows = _Rows(call, batch, y.block[y.names.index(dim)], y.type.shape.dim(dim).size, scratch)
    order, names = (*rows.names, *rest), (*batch, dim, *rest)
    step = max(1, min(count, PIECE_ELEMENTS // max(1, width)))
    copied = scratch.reserve((count, width), updates.dtype) if order != updates.names else None
    total_of = None
    if names != y.names or wide != y.dtype:
        total_of = scratch.reserve((rows.batches * sizes[dim], width), wide)
    taken = scratch.reserve((step, width), y.dtype)
    widened = scratch.reserve((step, width), wide) if wide != y.dtype else taken
    summed = scratch.reserve((step, width), wide)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        out = outputs[0]
        locate, row, outside = rows.bind(inputs[1], workspace)
        if not inputs[0].size:
            return run_all([locate, zeroing(out)])
        source = inputs[0].reshape(count, width) if copied is None else copied.array(workspace)
        canonical = named_view(inputs[0], updates, order)
        total = out.reshape(-1, width) if total_of is None else total_of.array(workspace)
        result = _reordered(total, names, sizes, y.names)
        add_rows = adding_rows(source, total, *(slot.array(workspace) for slot in (taken, widened, summed)))

        def run() -> None:
            if copied is not None:
                np.copyto(source.reshape(canonical.shape), canonical)
            locate()
            sorted_rows = np.argsort(row, kind="stable")
            if outside.any():
                sorted_rows = sorted_rows[~outside[sorted_rows]]
            total.fill(0)
            add_rows(sorted_rows, row[sorted_rows])
            if total_of is not None:
                np.copyto(out, result, casting="unsafe")

        return quiet(run)

    return Plan(bind, scratch.bytes)


def adding_rows(
    source: np.ndarray, total: np.ndarray, taken: np.ndarray, widened: np.ndarray, summed: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], None]:
    """A function that adds rows of ``source``, in a given order, to given rows of ``total``."""
    step = len(taken)

    def add_rows(order: np.ndarray, rows: np.ndarray) -> None:
        for start in range(0, len(order), step):
            here = rows[start : start + step]
            n = len(here)
            np.take(source, order[start : start + step], axis=0, out=taken[:n], mode="clip")
            if widened.dtype != taken.dtype:
                np.copyto(widened[:n], taken[:n])
            first = np.flatnonzero(np.diff(here, prepend=-1))
            sums = summed[: len(first)]
            np.add.reduceat(widened[:n], first, axis=0, out=sums)
            total[here[0]] += sums[0]  # may go on from the piece before
            total[here[first[1:]]] = sums[1:]

    return add_rows


def plan_put(call: Call) -> Plan:
    """Inputs x[.., dim, ..], updates[index dims and rest, in any order] and index; output as x.

    Where the output is x's own memory, only the rows that are hit are touched.
    """
    x, updates, index = call.inputs
    dim = call.of(Put).dim
    batch = batch_names(index, x, dim)
    others = [n for n in index.names if n not in batch]
    rest = [n for n in x.names if n != dim and n not in batch]
    if sorted([*index.names, *rest]) != sorted(updates.names):
        raise call.fail(f"updates {updates.names} are not index {index.names} and {rest}.")
    start, stop = x.block[x.names.index(dim)]

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        out = outputs[0]
        copies = inputs[0].ctypes.data != out.ctypes.data
        rows = named_view(out, call.outputs[0], (*batch, dim, *rest))
        given = named_view(inputs[1], updates, (*batch, *others, *rest))
        where = named_view(inputs[2], index, (*batch, *others))
        own = np.indices(where.shape, sparse=True)[: len(batch)]
        own = [np.broadcast_to(a, where.shape) for a in own]

        def run() -> None:
            if copies:
                np.copyto(out, inputs[0])
            inside = (where >= start) & (where < stop)
            if inside.all():
                rows[(*own, where - start)] = given
            elif inside.any():
                rows[(*(a[inside] for a in own), where[inside] - start)] = given[inside]

        return run

    return Plan(bind)
