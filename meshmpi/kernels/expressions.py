"""map: a scalar expression at every point, evaluated in pieces that stay in the cache.

The whole expression runs over one piece before the next.  A value that does not vary along an inner dim
is computed once for it.  Arrays and memory, but not what a step computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from meshmpi.ir.kinds import Map
from meshmpi.ir.program import LocalType
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch, Slot
from meshmpi.kernels.steps import Bound, nothing, quiet, run_all
from meshmpi.kernels.ufunc_steps import BITS, MicroOp, UfuncSteps
from meshmpi.kernels.views import collapse, strided

PIECE_ELEMENTS = 65536
"""Elements of a piece: 256 KB per float32 value.  Measured (layer norm, ns per element): 2.5 with 4096, 1.2
with 16384, 0.8 with 65536, 0.7 with 131072; a call costs 0.4 us, so smaller pieces lose."""
PREBUILT_CALLS = 128
"""Up to this many calls are prepared at binding; beyond, pieces are cut while running."""

Support = tuple[bool, ...]
"""For each dim of the iteration whether a value varies along it."""


class Space(NamedTuple):
    """The points of an output, cut into pieces along one dim.

    Attributes:
        sizes: Extents of the merged dims.
        axis: Dim that is cut; the dims before it are walked one index at a time.
        chunk: Extent of a piece along ``axis`` (the last may be shorter).
    """

    sizes: tuple[int, ...]
    axis: int
    chunk: int

    def piece_shape(self, extent: int, support: Support) -> tuple[int, ...]:
        """Shape of a value on a piece of ``extent`` along the axis; 1 where it does not vary."""
        walked = [extent, *self.sizes[self.axis + 1 :]]
        return tuple(n if s else 1 for n, s in zip(walked, support[self.axis :], strict=True))

    def pieces(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """(indices of the leading dims, start, stop along the axis) of every piece."""
        for index in np.ndindex(*self.sizes[: self.axis]):
            for start in range(0, self.sizes[self.axis], self.chunk):
                yield index, start, min(start + self.chunk, self.sizes[self.axis])


def cut(sizes: Sequence[int], limit: int) -> Space:
    """Cuts a space into near-equal pieces of at most ``limit`` elements."""
    sizes = tuple(sizes) or (1,)
    axis = 0
    while axis < len(sizes) - 1 and math.prod(sizes[axis + 1 :]) > limit:
        axis += 1
    inner = math.prod(sizes[axis + 1 :])
    most = max(1, limit // inner)
    count = -(-sizes[axis] // most)
    return Space(sizes, axis, -(-sizes[axis] // count))


class _Layout:
    """Where every value of an expression lives: an input, an output, or a slot of the workspace.

    Args:
        supports: What each input varies along.
        aliases: (input, output) pairs that may share memory.
    """

    def __init__(self, code: UfuncSteps, supports: Sequence[Support], space: Space, aliases: Sequence[tuple[int, int]]):
        self.ops = list(code.ops)
        self.dtypes = list(code.dtypes)
        self.space = space
        self.supports = list(supports)
        for op in self.ops:
            held = [self.supports[a] for a in op.args if isinstance(a, int)]
            self.supports.append(tuple(any(s[k] for s in held) for k in range(len(space.sizes))))
        self.n_inputs = code.n_inputs
        self.output_of: dict[int, int] = {}
        self._place_outputs(code, aliases)
        self.scratch = Scratch()
        self.slots: dict[int, Slot] = {}
        self._allocate()

    def _place_outputs(self, code: UfuncSteps, aliases: Sequence[tuple[int, int]]) -> None:
        """Results are written straight to their output, or copied there when that is not safe."""
        full = tuple(n > 1 for n in self.space.sizes)
        for output, v in enumerate(code.results):
            aliased = [i for i, o in aliases if o == output]
            if self.supports[v] == full and self._safe(v, aliased):
                self.output_of[v] = output
                continue
            self.dtypes.append(self.dtypes[v])
            self.supports.append(full)
            copy = MicroOp(_copy_same, (v,), len(self.dtypes) - 1, in_place=())
            self.ops.append(copy)
            self.output_of[copy.result] = output

    def _safe(self, v: int, aliased: Sequence[int]) -> bool:
        """Whether no aliased input is read after value v is written.

        The op that makes v may read them: it goes through equal memory point by point.
        """
        later = self.ops[v - self.n_inputs + 1 :]
        return not any(isinstance(a, int) and a in aliased for op in later for a in op.args)

    def _allocate(self) -> None:
        """Slots for values between steps, taken again once their last reader has run."""
        last = {a: k for k, op in enumerate(self.ops) for a in op.args if isinstance(a, int)}
        free: dict[int, list[Slot]] = {}
        for k, op in enumerate(self.ops):
            read = dict.fromkeys(a for a in op.args if isinstance(a, int))
            dying = [a for a in read if a in self.slots and last[a] == k]
            taken = -1
            if op.result not in self.output_of:
                self.slots[op.result] = self._slot(op, dying, free)
                taken = self.slots[op.result].offset
                if op.result not in last:  # a step that nobody reads
                    dying.append(op.result)
                    taken = -1
            # A step that nobody reads may lie where one of its arguments does: freed only once.
            for offset, a in {self.slots[a].offset: a for a in dying}.items():
                if offset != taken:
                    free.setdefault(self._bytes(a), []).append(self.slots[a])

    def _slot(self, op: MicroOp, dying: Sequence[int], free: dict[int, list[Slot]]) -> Slot:
        shape = self.space.piece_shape(self.space.chunk, self.supports[op.result])
        dtype = self.dtypes[op.result]
        for a in dying:
            positions = [p for p, b in enumerate(op.args) if isinstance(b, int) and b == a]
            same = self.supports[a] == self.supports[op.result]
            if same and self._bytes(a) == self._bytes(op.result) and set(positions) <= set(op.in_place):
                return Slot(self.slots[a].offset, shape, dtype)
        unused = free.get(self._bytes(op.result))
        if unused:
            return Slot(unused.pop().offset, shape, dtype)
        return self.scratch.reserve(shape, dtype)

    def _bytes(self, v: int) -> int:
        shape = self.space.piece_shape(self.space.chunk, self.supports[v])
        return math.prod(shape) * self.dtypes[v].itemsize


def _same_block(a: LocalType, b: LocalType) -> bool:
    """Whether blocks of the two types are laid out alike; what is pending may differ."""
    return (a.local_dims, a.dtype) == (b.local_dims, b.dtype)


def _copy_same(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x)


def plan_map(call: Call) -> Plan:
    """Evaluates the expression; outputs may have the memory of inputs with equal blocks."""
    types = [x.type for x in call.inputs], [y.type for y in call.outputs]
    code = UfuncSteps(call.of(Map).expr, *([t.dtype for t in side] for side in types))
    first, operands = call.outputs[0], (*call.inputs, *call.outputs)
    if first.elements == 0:
        return Plan(lambda ins, outs, workspace, runtime: nothing)
    for x in operands:
        if any(first.extents().get(n) != size for n, size in x.extents().items()):
            raise call.fail(f"block {x.extents()} does not fit into {first.extents()}.")
    sizes, strides = collapse(first.sizes, [[x.strides().get(n, 0) for n in first.names] for x in operands])
    space = cut(sizes, PIECE_ELEMENTS if len(code.ops) > 1 else math.prod(sizes))
    strides = [s or (0,) for s in strides]
    supports = [tuple(step != 0 for step in s) for s in strides[: len(call.inputs)]]
    alike = {(i, o) for i, x in enumerate(types[0]) for o, y in enumerate(types[1]) if _same_block(x, y)}

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        shared = [(i, o) for i, x in enumerate(inputs) for o, y in enumerate(outputs) if np.may_share_memory(x, y)]
        for i, o in shared:
            if (i, o) not in alike or inputs[i].ctypes.data != outputs[o].ctypes.data:
                raise call.fail(f"output {o} overlaps input {i}, which has another type or place.")
        layout = _Layout(code, supports, space, shared)
        arrays = [
            strided(a, [n if s else 1 for n, s in zip(space.sizes, steps, strict=True)], steps)
            for a, steps in zip([*inputs, *outputs], strides, strict=True)
        ]
        cutter = _Cutter(layout, arrays, workspace)
        count = math.prod(space.sizes[: space.axis]) * -(-space.sizes[space.axis] // space.chunk)
        if count * len(layout.ops) > PREBUILT_CALLS:
            return quiet(cutter.run)
        return quiet(run_all([partial(f, *args, out=out) for p in space.pieces() for f, args, out in cutter.calls(*p)]))

    return Plan(bind, _Layout(code, supports, space, sorted(alike)).scratch.bytes)


class _Cutter:
    """The calls of an expression on one piece of its arrays."""

    def __init__(self, layout: _Layout, arrays: Arrays, workspace: np.ndarray):
        self.space = layout.space
        self.code: list[tuple[Any, tuple[int, ...], int]] = []
        self._entries: dict[tuple[int, bool, bool], int] = {}
        self._whole: list[tuple[int, np.ndarray, Support]] = []
        self._fixed: list[np.ndarray | None] = []
        self._slots: list[tuple[int, int, bool]] = []
        self._layout, self._arrays, self._workspace = layout, arrays, workspace
        for op in layout.ops:
            args = tuple(self._entry(a, op.bits) for a in op.args)
            self.code.append((op.function, args, self._entry(op.result, op.bits)))
        self._tables: dict[int, list[np.ndarray | None]] = {}

    def _entry(self, a: int | np.ndarray, bits: bool) -> int:
        """Position of an argument in the table of a piece."""
        literal = isinstance(a, np.ndarray)
        key = (id(a) if literal else a, bits, literal)
        if key in self._entries:
            return self._entries[key]
        n = self._entries[key] = len(self._fixed)
        self._fixed.append(None)
        layout = self._layout
        if isinstance(a, np.ndarray):
            self._fixed[n] = a.view(BITS[a.itemsize]) if bits else a
        elif a in layout.slots:
            self._slots.append((n, a, bits))
        else:
            array = self._arrays[a if a < layout.n_inputs else layout.n_inputs + layout.output_of[a]]
            array = array.view(BITS[array.itemsize]) if bits else array
            self._whole.append((n, array, layout.supports[a]))
        return n

    def _table(self, extent: int) -> list[np.ndarray | None]:
        """The table with literals and slots of the workspace for pieces of ``extent``."""
        if extent not in self._tables:
            table = list(self._fixed)
            for n, v, bits in self._slots:
                shape = self.space.piece_shape(extent, self._layout.supports[v])
                array = self._layout.slots[v]._replace(shape=shape).array(self._workspace)
                table[n] = array.view(BITS[array.itemsize]) if bits else array
            self._tables[extent] = table
        return self._tables[extent]

    def _cut(self, index: tuple[int, ...], start: int, stop: int) -> list[np.ndarray | None]:
        table = self._table(stop - start)
        axis = self.space.axis
        for n, array, support in self._whole:
            key = tuple(i if s else 0 for i, s in zip(index, support, strict=False)) if axis else ()
            table[n] = array[(*key, slice(start, stop) if support[axis] else slice(None))]
        return table

    def calls(self, index: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Any, list, Any]]:
        """(function, arguments, out) of every op on one piece."""
        table = self._cut(index, start, stop)
        for f, args, out in self.code:
            yield f, [table[a] for a in args], table[out]

    def run(self) -> None:
        for piece in self.space.pieces():
            for f, args, out in self.calls(*piece):
                f(*args, out=out)
