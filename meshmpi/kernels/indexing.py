"""gather, scatter_add and put: rows addressed by an integer tensor.

The own block of the addressed dim begins somewhere in the global one: an index outside the block
reads zeros, and its update is dropped, so that the sum over all blocks is the whole result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshmpi.errors import RangeError
from meshmpi.ir.kinds import Lookup, Put
from meshmpi.kernels.binding import (
    Arrays,
    Bound,
    Call,
    Operand,
    Plan,
    Runtime,
    Scratch,
    Slot,
    accumulator_dtype,
    named_view,
    nothing,
    quiet,
    run_all,
)

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

    def bind(self, index: np.ndarray, workspace: np.ndarray):
        """(function that computes them, row numbers, mask of those outside)."""
        row, outside = self.row.array(workspace), self.outside.array(workspace)
        below = self.below.array(workspace)
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


class GatherPlan(Plan):
    """Inputs table[.., dim, ..] and index; output in any order of dims.

    Dims that both have are batch dims: row numbers then count the rows of all batches, one behind
    the other.
    """

    def __init__(self, call: Call):
        self.call = call
        table, index = call.inputs
        y, dim = call.outputs[0], call.of(Lookup).dim
        axis = table.type.shape.position(dim)
        batch = batch_names(index, table, dim)
        before, after = list(table.names[:axis]), list(table.names[axis + 1 :])
        if batch:
            before, after = [], [n for n in (*before, *after) if n not in batch]
        scratch = Scratch()
        size = table.type.shape[axis].size
        self.rows = _Rows(call, batch, table.block[axis], size, scratch)
        self.natural = (*before, *self.rows.names, *after)
        if sorted(self.natural) != sorted(y.names):
            raise call.fail(f"rows {self.natural} do not fill the output {y.names}.")
        extents = table.extents()
        self.shape = (math.prod(extents[n] for n in before), index.elements, math.prod(extents[n] for n in after))
        self.order = (*before, *batch, dim, *after)
        self.table: Slot | None = None
        if self.order != table.names:
            self.table = scratch.reserve([extents[n] for n in self.order], table.dtype)
        self.copied: Slot | None = None
        if self.natural != y.names:
            self.copied = scratch.reserve(self.shape, y.dtype)
        self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        (table, index), y = inputs, outputs[0]
        if not y.size:
            return nothing
        locate, row, outside = self.rows.bind(index, workspace)
        if not table.size:
            return run_all([locate, lambda: y.fill(0)])
        ordered = named_view(table, self.call.inputs[0], self.order)
        source = table if self.table is None else self.table.array(workspace)
        by_row = source.reshape(self.shape[0], -1, self.shape[2])
        target = y.reshape(self.shape) if self.copied is None else self.copied.array(workspace)
        copies = None if self.copied is None else self._reordered(target, y)

        def run() -> None:
            if source is not table:
                np.copyto(source, ordered)
            locate()
            np.take(by_row, row, axis=1, out=target, mode="clip")
            if outside.any():
                target[:, outside] = 0
            if copies is not None:
                np.copyto(y, copies)

        return run

    def _reordered(self, target: np.ndarray, y: np.ndarray) -> np.ndarray:
        extents = self.call.outputs[0].extents()
        full = target.reshape([extents[n] for n in self.natural])
        return full.transpose([self.natural.index(n) for n in self.call.outputs[0].names])


class ScatterAddPlan(Plan):
    """Inputs updates[index dims and rest, in any order] and index; output [dim and rest].

    Index dims that the output has too are batch dims, as for `GatherPlan`.
    Updates are sorted by row, stably, and runs of equal rows are summed in that order, so the
    result depends on nothing but the inputs.
    """

    def __init__(self, call: Call):
        self.call = call
        updates, index = call.inputs
        y, dim = call.outputs[0], call.of(Lookup).dim
        batch = batch_names(index, y, dim)
        self.rest = [n for n in y.names if n != dim and n not in batch]
        if sorted([*index.names, *self.rest]) != sorted(updates.names):
            raise call.fail(f"updates {updates.names} are not index {index.names} and {self.rest}.")
        self.count = index.elements
        self.width = math.prod(y.extents()[n] for n in self.rest)
        self.block = y.block[y.type.shape.position(dim)]
        self.sum_dtype = accumulator_dtype(y.dtype)
        scratch = Scratch()
        self.rows = _Rows(call, batch, self.block, y.type.shape.dim(dim).size, scratch)
        self.order = (*self.rows.names, *self.rest)
        self.piece_rows = max(1, min(self.count, PIECE_ELEMENTS // max(1, self.width)))
        self.copied = self.total = None
        if self.order != updates.names:
            self.copied = scratch.reserve((self.count, self.width), updates.dtype)
        self.names = (*batch, dim, *self.rest)
        if self.names != y.names or self.sum_dtype != y.dtype:
            count = self.rows.batches * (self.block[1] - self.block[0])
            self.total = scratch.reserve((count, self.width), self.sum_dtype)
        self.taken = scratch.reserve((self.piece_rows, self.width), y.dtype)
        self.widened = self.taken
        if self.sum_dtype != y.dtype:
            self.widened = scratch.reserve((self.piece_rows, self.width), self.sum_dtype)
        self.summed = scratch.reserve((self.piece_rows, self.width), self.sum_dtype)
        self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        (updates, index), y = inputs, outputs[0]
        if not y.size:
            return nothing
        locate, row, outside = self.rows.bind(index, workspace)
        if not updates.size:
            return run_all([locate, lambda: y.fill(0)])
        canonical = named_view(updates, self.call.inputs[0], self.order)
        source = updates.reshape(self.count, self.width) if self.copied is None else self.copied.array(workspace)
        total = y.reshape(-1, self.width) if self.total is None else self.total.array(workspace)
        add_rows = self._bind_sum(source, total, workspace)

        def run() -> None:
            if self.copied is not None:
                np.copyto(source.reshape(canonical.shape), canonical)
            locate()
            order = np.argsort(row, kind="stable")
            if outside.any():
                order = order[~outside[order]]
            total.fill(0)
            add_rows(order, row[order])
            if self.total is not None:
                self._write(total, y)

        return quiet(run)

    def _bind_sum(self, source: np.ndarray, total: np.ndarray, workspace: np.ndarray):
        """A function that adds rows of ``source``, in a given order, to given rows of ``total``."""
        taken, summed = self.taken.array(workspace), self.summed.array(workspace)
        widened = self.widened.array(workspace)
        step = self.piece_rows

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

    def _write(self, total: np.ndarray, y: np.ndarray) -> None:
        out = self.call.outputs[0]
        extents = out.extents()
        full = total.reshape([extents[n] for n in self.names])
        np.copyto(y, full.transpose([self.names.index(n) for n in out.names]), casting="unsafe")


class PutPlan(Plan):
    """Inputs x[.., dim, ..], updates[index dims and rest, in any order] and index; output as x.

    Where the output is x's own memory, only the rows that are hit are touched.
    """

    def __init__(self, call: Call):
        self.call = call
        x, updates, index = call.inputs
        dim = call.of(Put).dim
        batch = batch_names(index, x, dim)
        others = [n for n in index.names if n not in batch]
        rest = [n for n in x.names if n != dim and n not in batch]
        if sorted([*index.names, *rest]) != sorted(updates.names):
            raise call.fail(f"updates {updates.names} are not index {index.names} and {rest}.")
        self.rows_order, self.index_order = (*batch, dim, *rest), (*batch, *others)
        self.updates_order = (*batch, *others, *rest)
        self.block = x.block[x.type.shape.position(dim)]
        self.batch_sizes = [x.extents()[n] for n in batch]

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        (x, updates, index), y = inputs, outputs[0]
        copies = x.ctypes.data != y.ctypes.data
        if not y.size or not updates.size:
            return (lambda: np.copyto(y, x)) if copies else nothing
        rows = named_view(y, self.call.outputs[0], self.rows_order)
        given = named_view(updates, self.call.inputs[1], self.updates_order)
        where = named_view(index, self.call.inputs[2], self.index_order)
        whole = np.ix_(*map(range, self.batch_sizes), *map(range, where.shape[self._batches :]))
        own = [np.broadcast_to(a, where.shape) for a in whole[: self._batches]]
        start, stop = self.block

        def run() -> None:
            if copies:
                np.copyto(y, x)
            inside = (where >= start) & (where < stop)
            if inside.all():
                rows[(*own, where - start)] = given
            elif inside.any():
                rows[(*(a[inside] for a in own), where[inside] - start)] = given[inside]

        return run

    @property
    def _batches(self) -> int:
        return len(self.batch_sizes)
