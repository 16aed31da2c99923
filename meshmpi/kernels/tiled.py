"""tiled: its body a block at a time, intermediate values in the workspace of one block.

Blocks of equal extents share their plans.  Of the arrays outside, contracts take their part by strides, other
kernels where it is contiguous, else a copy.  Sums over a dim of the region are added up block by block.  With a
band nobody needs the pairs outside it, so an operand of a product may be set to 0 there in place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.dims import Ranges
from meshmpi.ir.kinds import Contract, Random, Tiled, regions
from meshmpi.ir.kinds.regions import sizes_key
from meshmpi.ir.program import Instruction
from meshmpi.kernels import threads
from meshmpi.kernels.bands import fill_outside, guarded, masked_operand, without_band
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, Scratch
from meshmpi.kernels.contraction import plan_contract
from meshmpi.kernels.fused import scratch_slots
from meshmpi.kernels.native import Site, scratch_bytes
from meshmpi.kernels.steps import Bound, adding, copying, run_all, zeroing
from meshmpi.kernels.views import aligned_empty, contiguous

SHARED_POINTS = 1 << 18
"""Threads share a region that has at least this many points.  Status: assumption; waking one takes some 50 us."""
ByValue = Mapping[int, np.ndarray]


def plan_tiled(call: Call, plan_of: Callable[[Call], Plan]) -> Plan:
    """Runs the body of a tiled region once for each of its blocks."""
    place = (call.instruction, call.program, call.coordinates)
    own = regions.own_ranges(*place)
    blocks = {sizes_key(r): _Block(call, own, r, plan_of) for _, r in regions.iteration_counts(*place)}
    sized = list(blocks.values())
    widest = regions.widest(*place)
    if widest is not None and sizes_key(widest) not in blocks:
        sized.append(_Block(call, own, widest, plan_of))

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        arrays = {x.value: a for x, a in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)}

        def one_after_the_other(iterations: Sequence[Ranges], space: np.ndarray) -> Bound:
            begun, bound = _Begun(call, own), list[Bound]()
            for ranges in iterations:
                bound += _Binder(blocks[sizes_key(ranges)], arrays, ranges, space, runtime, begun).steps()
            return run_all(bound)

        apart = _independent(_Begun(call, own), blocks, list(regions.iterations(*place)))
        if not apart:  # the rank holds nothing of a dim of the region: sums over it are 0
            return run_all([zeroing(y) for y in outputs])
        weights = [float(sum(_points(r) for r in some)) for some in apart]
        count = runtime.threads if sum(weights) >= SHARED_POINTS else 1
        parts = [list(itertools.chain(*apart[cut])) for cut in threads.shares(weights, count)]
        spaces = [workspace, *(aligned_empty(workspace_bytes) for _ in parts[1:])]
        return threads.together([one_after_the_other(some, space) for some, space in zip(parts, spaces, strict=True)])

    workspace_bytes = max((b.workspace_bytes for b in sized), default=0)
    return Plan(bind, workspace_bytes)


def _points(ranges: Ranges) -> int:
    return math.prod(stop - start for start, stop in ranges.values())


def _independent(
    begun: _Begun, blocks: Mapping[tuple[int, ...], _Block], iterations: Sequence[Ranges]
) -> list[list[Ranges]]:
    """The blocks of a region in lists of which no two add to the same sum, each in the order of blocks."""
    lists: list[list[Ranges]] = []
    list_of: dict[tuple, int] = {}  # part of a sum -> the list that adds to it
    for ranges in iterations:
        block = blocks[sizes_key(ranges)]
        keys = [begun.key(v, block.types[v].shape.names, ranges) for v in block.summed]
        known = sorted({list_of[k] for k in keys if k in list_of})
        if not known:
            known = [len(lists)]
            lists.append([])
        first, *more = known
        for other in more:  # they meet here
            lists[first] += lists[other]
            lists[other] = []
            list_of.update((k, first) for k, n in list_of.items() if n == other)
        lists[first].append(ranges)
        list_of.update(dict.fromkeys(keys, first))
    return [some for some in lists if some]


class _Begun:
    """Which parts of the sums over blocks hold something already."""

    def __init__(self, call: Call, own: Ranges):
        self.own, self.seen = own, set[tuple]()
        band = call.instruction.attrs.band
        self.columns = "" if band is None else band.columns

    def first(self, v: int, names: Sequence[str], ranges: Ranges) -> bool:
        """Whether nothing has been added to this part of v yet; says so once."""
        key = self.key(v, names, ranges)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def key(self, v: int, names: Sequence[str], ranges: Ranges) -> tuple:
        """Which part of v a block adds to."""
        return (v, *(ranges[n] for n in names if n != self.columns))

    def whole(self, names: Sequence[str], ranges: Ranges) -> dict[str, tuple[int, int]]:
        """The ranges with all columns, those that the block leaves out too."""
        return {n: self.own[n] if n == self.columns else ranges[n] for n in names}


class _Block:
    """The plans of all instructions for blocks of one size.

    Attributes:
        slots: Value -> its place in the workspace: values that are used inside only, and copies of
            parts of arrays outside.
    """

    def __init__(self, call: Call, own: Ranges, ranges: Ranges, plan_of: Callable[[Call], Plan]):
        self.call, self.own, self.ranges, self.plan_of = call, own, ranges, plan_of
        i = call.instruction
        self.region = call.of(Tiled)
        self.types = regions.region_types(i, call.program)
        self.inside = replace(call.program, types=self.types)
        whole = {n: stop - start for n, (start, stop) in self.own.items()}
        self.outer = {v: contiguous(self.types[v].shape.names, whole) for v in (*i.inputs, *i.outputs)}
        self.summed = [v for v in i.outputs if any(d not in self.types[v].shape.names for d, _ in self.region.over)]
        self._place(ranges)
        self.steps: list[tuple[Call, Plan]] = []
        self.banded: set[int] = set()  # results of products over the band of the region
        for one in self.region.body:
            planned = self.called(one, ranges, self.strided)
            if self._masks_in_place(planned):
                self.banded.add(one.outputs[0])
                planned = without_band(planned)
            self.steps.append((planned, plan_of(planned)))
        self._plan_sums()
        plans = [*(p for _, p in self.steps), *self.direct.values()]
        place = (self.types, call.program.mesh, call.coordinates, ranges)
        in_c = (scratch_bytes(Site(one, *place)) for one in self.region.body)
        rest = max((p.workspace_bytes for p in plans), default=0)
        self.workspace_bytes = self.own_bytes + max(rest, *in_c)

    def operand(self, v: int, ranges: Ranges, strided: bool = False) -> Operand:
        """A value as far as a block holds it."""
        t = self.types[v]
        return Operand(v, t, tuple(ranges[n] for n in t.shape.names), self.outer[v] if strided else None)

    def _place(self, ranges: Ranges) -> None:
        """Decides where each value is: in place, in place by strides, or in the workspace."""
        i, scratch = self.call.instruction, Scratch()
        other = [one for one in self.region.body if not isinstance(one.attrs, Contract)]
        others = {v for one in other for v in (*one.inputs, *one.outputs)}
        in_place = [v for v in self.outer if v not in self.summed and self._contiguous(v, ranges)]
        self.strided = [v for v in self.outer if v not in others and v not in self.summed and v not in in_place]
        copied = [v for v in self.outer if v not in in_place and v not in self.strided]
        self.copied_in = [v for v in copied if v in i.inputs]
        self.copied_out = [v for v in copied if v in i.outputs]
        known = {v: self.operand(v, ranges) for v in self.types}
        self.slots = {v: scratch.reserve(known[v].sizes, known[v].dtype) for v in copied}
        self.slots.update(scratch_slots(self.region.body, self.region.inner, known, scratch))
        self.own_bytes = scratch.bytes

    def _contiguous(self, v: int, ranges: Ranges) -> bool:
        """Whether the part of an array outside that belongs to a block is one run of memory."""
        part = self.operand(v, ranges)
        return all(n < 2 or self.outer[v][d] == part.strides()[d] for d, n in part.extents().items())

    def _masks_in_place(self, call: Call) -> bool:
        """Whether a product is over the band of the region, of a value that is used inside only."""
        band, attrs = self.region.band, call.instruction.attrs
        if not isinstance(attrs, Contract) or band is None or attrs.band != band:
            return False
        masked = masked_operand(call, band)
        return masked is None or call.inputs[masked].value in self.region.inner

    def _plan_sums(self) -> None:
        """Products that are summed over blocks, planned a second time with the result in place."""
        self.direct: dict[int, Plan] = {}
        for call, _ in self.steps:
            one = call.instruction
            is_product = isinstance(one.attrs, Contract) and one.attrs.band is None
            if is_product and one.outputs[0] in self.summed and all(x.elements for x in call.inputs):
                strided = [*self.strided, *one.outputs]
                self.direct[one.outputs[0]] = plan_contract(self.called(one, self.ranges, strided))

    def called(self, one: Instruction, ranges: Ranges, strided: Sequence[int]) -> Call:
        """An instruction of the body on a block."""
        ins, outs = (tuple(self.operand(v, ranges, v in strided) for v in vs) for vs in (one.inputs, one.outputs))
        return Call(one, ins, outs, self.inside, self.call.coordinates, ranges)


class _Binder:
    """Binds the instructions of the block of ``ranges`` to arrays."""

    def __init__(
        self, block: _Block, arrays: ByValue, ranges: Ranges, workspace: np.ndarray, runtime: Runtime, begun: _Begun
    ):
        self.block, self.arrays, self.ranges, self.runtime, self.begun = block, arrays, ranges, runtime, begun
        self.rest = workspace[block.own_bytes :]
        self.here = {v: slot.array(workspace) for v, slot in block.slots.items()}
        self.here.update((v, self._part(v)) for v in block.outer if v not in block.slots)
        self.masked: set[int] = set()
        self.band = block.region.band  # where it leaves out pairs of this block
        if self.band is not None and self.band.covers(ranges[self.band.rows], ranges[self.band.columns]):
            self.band = None

    def steps(self) -> Iterator[Bound]:
        """The functions that compute the block, in order."""
        block = self.block
        for v in block.copied_in:
            yield copying(self.here[v], self._view(v, self.ranges))
        for call, plan in block.steps:
            yield from self._mask(call.instruction)
            if any(v in block.summed for v in call.instruction.outputs):
                yield from self._sums(call.instruction, plan)
            else:
                yield self._step(call.instruction, plan)
        for v in block.copied_out:
            if v not in block.summed:
                yield copying(self._view(v, self.ranges), self.here[v])

    def _step(self, one: Instruction, plan: Plan) -> Bound:
        block, native = self.block, self.runtime.native
        if native is not None:
            place = (block.call.program, block.call.coordinates)
            bound = native.bind(one, *place, self.here, self.rest, self.runtime, self.ranges)
            if bound is not None:
                return bound
        if _is_positional(one):  # it was planned where the first block of this size begins
            plan = block.plan_of(block.called(one, self.ranges, block.strided))
        ins, outs = ([self.here[v] for v in vs] for vs in (one.inputs, one.outputs))
        return self._guarded(one, ins, outs[0], plan.bind(ins, outs, self.rest, self.runtime), block.strided, False)

    def _mask(self, one: Instruction) -> Iterator[Bound]:
        """Sets the operand of a banded product to 0 outside the band, once in a block."""
        if self.band is None or one.outputs[0] not in self.block.banded:
            return
        position = masked_operand(self.block.called(one, self.ranges, ()), self.band)
        if position is not None and one.inputs[position] not in self.masked:
            v = one.inputs[position]
            self.masked.add(v)
            yield fill_outside(self.here[v], self.block.operand(v, self.ranges), self.band, 0.0)

    def _guarded(
        self, one: Instruction, ins: Arrays, out: np.ndarray, product: Bound, strided: Sequence[int], adding: bool
    ) -> Bound:
        """A product that leaves out pairs of the block, safe for operands that are not finite."""
        if self.band is None or one.outputs[0] not in self.block.banded:
            return product
        call = self.block.called(one, self.ranges, strided)
        if masked_operand(call, self.band) is None:
            return product
        return guarded(call, self.band, ins, out, product, adding)

    def _sums(self, one: Instruction, plan: Plan) -> Iterator[Bound]:
        """An instruction with sums over a dim of the region: the first block writes, others add."""
        begin: dict[int, bool] = {}
        for v in (v for v in one.outputs if v in self.block.summed):
            names = self.block.types[v].shape.names
            begin[v] = self.begun.first(v, names, self.ranges)
            whole = self.begun.whole(names, self.ranges)
            if begin[v] and any(whole[n] != self.ranges[n] for n in names):
                yield zeroing(self._view(v, whole))
                begin[v] = False
        bound = self._added(one, begin)
        if bound is not None:
            yield bound
            return
        yield self._step(one, plan)
        for v, first in begin.items():
            yield (copying if first else adding)(self._view(v, self.ranges), self.here[v])

    def _added(self, one: Instruction, begin: Mapping[int, bool]) -> Bound | None:
        """A product that BLAS adds to what its part of the result holds, where it lies."""
        v = one.outputs[0]
        plan = self.block.direct.get(v)
        make = None if plan is None else plan.make if begin[v] else plan.make_adding
        if make is None:
            return None
        ins, to = [self.here[x] for x in one.inputs], self.arrays[v].reshape(-1)[self._start(v) :]
        product = make(ins, [to], self.rest, self.runtime)
        if product is None:
            return None
        return self._guarded(one, ins, to, product, [*self.block.strided, v], not begin[v])

    def _part(self, v: int) -> np.ndarray:
        """The elements of a block: its array where it is contiguous, else all from its first."""
        flat = self.arrays[v].reshape(-1)[self._start(v) :]
        if v in self.block.strided:
            return flat
        sizes = self.block.operand(v, self.ranges).sizes
        return flat[: math.prod(sizes)].reshape(sizes)

    def _start(self, v: int) -> int:
        return sum((self.ranges[n][0] - self.block.own[n][0]) * s for n, s in self.block.outer[v].items())

    def _view(self, v: int, ranges: Ranges) -> np.ndarray:
        """The elements of a block where they lie in the array outside."""
        names, own = self.block.types[v].shape.names, self.block.own
        cuts = (slice(*(x - own[n][0] for x in ranges[n])) for n in names)
        return self.arrays[v][(*cuts, ...)]  # a view even where there are no dims


def _is_positional(one: Instruction) -> bool:
    """Whether what an instruction makes depends on where its block begins."""
    return any(isinstance(i.attrs, Random) or i.attrs.band for i in one.leaves())
