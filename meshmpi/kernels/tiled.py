"""tiled: its body a block at a time, intermediate values in the workspace of one block.

Blocks of equal extents share their plans.  Of the arrays outside, contracts take the part that
belongs to a block where it lies, by strides; other kernels take it where it is contiguous and get a
copy where it is not.  Sums over a dim of the region are added up block by block.  In a tiled region with a
band nobody needs the pairs outside it, so that an operand of a product may be set to 0 there in
place.  This module knows nothing else of what the instructions of a body mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.dims import Ranges
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Contract, Random, Tiled, regions
from meshmpi.ir.kinds.regions import sizes_key
from meshmpi.ir.program import Instruction
from meshmpi.kernels import binding
from meshmpi.kernels.bands import fill_outside, guarded, masked_operand, without_band
from meshmpi.kernels.binding import Arrays, Bound, Call, Operand, Plan, Runtime, Scratch, Slot, run_all
from meshmpi.kernels.contraction import plan_contract
from meshmpi.kernels.fused import scratch_slots
from meshmpi.kernels.native import scratch_bytes

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
        bound: list[Bound] = []
        begun = _Begun(call, own)
        for ranges in regions.iterations(*place):
            bound += blocks[sizes_key(ranges)].bind(arrays, ranges, workspace, runtime, begun)
        # Where the rank holds nothing of a dim of the region, sums over it are 0.
        return run_all(bound or [binding.zeroing(y) for y in outputs])

    return Plan(bind, max((b.workspace_bytes for b in sized), default=0))


class _Begun:
    """Which parts of the sums over blocks hold something already."""

    def __init__(self, call: Call, own: Ranges):
        self.own, self.seen = own, set[tuple]()
        band = call.instruction.attrs.band
        self.columns = "" if band is None else band.columns

    def first(self, v: int, names: Sequence[str], ranges: Ranges) -> bool:
        """Whether nothing has been added to this part of v yet; says so once."""
        key = (v, *(ranges[n] for n in names if n != self.columns))
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

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
        self.dims = [dim for dim, _ in self.region.over]
        whole = {n: stop - start for n, (start, stop) in self.own.items()}
        self.outer = {v: binding.contiguous(self.types[v].shape.names, whole) for v in (*i.inputs, *i.outputs)}
        self.summed = [v for v in i.outputs if any(d not in self.types[v].shape.names for d in self.dims)]
        self._place(ranges)
        self.steps: list[tuple[Call, Plan]] = []
        self.banded: set[int] = set()  # results of products over the band of the region
        for one in self.region.body:
            planned = self._called(one, ranges, self.strided)
            if self._masks_in_place(planned):
                self.banded.add(one.outputs[0])
                planned = without_band(planned)
            self.steps.append((planned, plan_of(planned)))
        self._plan_sums()
        plans = [*(p for _, p in self.steps), *self.direct.values()]
        in_c = (scratch_bytes(one, self.types, call.program.mesh, call.coordinates, ranges) for one in self.region.body)
        rest = max((p.workspace_bytes for p in plans), default=0)
        self.workspace_bytes = self.own_bytes + max(rest, *in_c)

    def _operand(self, v: int, ranges: Ranges, strided: bool = False) -> Operand:
        t = self.types[v]
        return Operand(v, t, tuple(ranges[n] for n in t.shape.names), self.outer[v] if strided else None)

    def _place(self, ranges: Ranges) -> None:
        """Decides where each value is: in place, in place by strides, or in the workspace."""
        i, scratch = self.call.instruction, Scratch()
        others = {
            v for one in self.region.body if not isinstance(one.attrs, Contract) for v in (*one.inputs, *one.outputs)
        }
        in_place = [v for v in self.outer if v not in self.summed and self._contiguous(v, ranges)]
        self.strided = [v for v in self.outer if v not in others and v not in self.summed and v not in in_place]
        copied = [v for v in self.outer if v not in in_place and v not in self.strided]
        self.copied_in = [v for v in copied if v in i.inputs]
        self.copied_out = [v for v in copied if v in i.outputs]
        self.slots: dict[int, Slot] = {}
        known = {v: self._operand(v, ranges) for v in self.types}
        for v in copied:
            self.slots[v] = scratch.reserve(known[v].sizes, known[v].dtype)
        self.slots.update(scratch_slots(self.region.body, self.region.inner, known, scratch))
        self.own_bytes = scratch.bytes

    def _contiguous(self, v: int, ranges: Ranges) -> bool:
        """Whether the part of an array outside that belongs to a block is one run of memory."""
        t, step = self.types[v], 1
        for n in reversed(t.shape.names):
            size = ranges[n][1] - ranges[n][0]
            if size > 1 and self.outer[v][n] != step:
                return False
            step *= size
        return True

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
                self.direct[one.outputs[0]] = plan_contract(self._called(one, self.ranges, strided))

    def _called(self, one: Instruction, ranges: Ranges, strided: Sequence[int]) -> Call:
        ins, outs = (tuple(self._operand(v, ranges, v in strided) for v in vs) for vs in (one.inputs, one.outputs))
        return Call(one, ins, outs, self.inside, self.call.coordinates, ranges)

    # ---- binding ---------------------------------------------------------------------------------

    def bind(
        self, arrays: ByValue, ranges: Ranges, workspace: np.ndarray, runtime: Runtime, begun: _Begun
    ) -> Iterator[Bound]:
        """The functions that compute the block of ``ranges``, in order."""
        here = {v: slot.array(workspace) for v, slot in self.slots.items()}
        rest = workspace[self.own_bytes :]
        for v in self.outer:
            if v not in self.slots:
                here[v] = self._part(arrays[v], v, ranges)
        for v in self.copied_in:
            yield binding.copying(here[v], self._view(arrays[v], v, ranges))
        masked: set[int] = set()
        for call, plan in self.steps:
            one = call.instruction
            yield from self._mask(one, here, ranges, masked)
            if any(v in self.summed for v in one.outputs):
                yield from self._bind_sums(call, plan, arrays, here, ranges, rest, runtime, begun)
                continue
            yield self._bind_step(call, plan, here, ranges, rest, runtime)
        for v in self.copied_out:
            if v not in self.summed:
                yield binding.copying(self._view(arrays[v], v, ranges), here[v])

    def _bind_step(
        self, call: Call, plan: Plan, here: ByValue, ranges: Ranges, rest: np.ndarray, runtime: Runtime
    ) -> Bound:
        one = call.instruction
        if runtime.native is not None:
            bound = runtime.native.bind(one, self.call.program, self.call.coordinates, here, rest, runtime, ranges)
            if bound is not None:
                return bound
        if _is_positional(one):  # it was planned where the first block of this size begins
            plan = self.plan_of(self._called(one, ranges, self.strided))
        ins, outs = ([here[v] for v in vs] for vs in (one.inputs, one.outputs))
        product = plan.bind(ins, outs, rest, runtime)
        return self._guarded(one, ranges, ins, outs[0], product, self.strided)

    def _band_at(self, one: Instruction, ranges: Ranges) -> Band | None:
        """The band of a product where it leaves out pairs of the present block."""
        if not any(v in self.banded for v in one.outputs):
            return None
        band = self.region.band
        return None if band is None or band.covers(ranges[band.rows], ranges[band.columns]) else band

    def _mask(self, one: Instruction, here: ByValue, ranges: Ranges, masked: set[int]) -> Iterator[Bound]:
        """Sets the operand of a banded product to 0 outside the band, once in a block."""
        band = self._band_at(one, ranges)
        position = None if band is None else masked_operand(self._called(one, ranges, ()), band)
        if band is None or position is None or one.inputs[position] in masked:
            return
        v = one.inputs[position]
        masked.add(v)
        yield fill_outside(here[v], self._operand(v, ranges), band, 0.0)

    def _guarded(
        self,
        one: Instruction,
        ranges: Ranges,
        ins: Arrays,
        out: np.ndarray,
        product: Bound,
        strided: Sequence[int],
        adding: bool = False,
    ) -> Bound:
        """A product that leaves out pairs of the block, safe for operands that are not finite."""
        band = self._band_at(one, ranges)
        call = self._called(one, ranges, strided)
        if band is None or masked_operand(call, band) is None:
            return product
        return guarded(call, band, ins, out, product, adding)

    def _bind_sums(
        self,
        call: Call,
        plan: Plan,
        arrays: ByValue,
        here: Mapping[int, np.ndarray],
        ranges: Ranges,
        rest: np.ndarray,
        runtime: Runtime,
        begun: _Begun,
    ) -> Iterator[Bound]:
        """An instruction with sums over a dim of the region: the first block writes, others add."""
        one = call.instruction
        begin: dict[int, bool] = {}
        for v in (v for v in one.outputs if v in self.summed):
            names = self.types[v].shape.names
            begin[v] = begun.first(v, names, ranges)
            whole = begun.whole(names, ranges)
            if begin[v] and any(whole[n] != ranges[n] for n in names):
                yield binding.zeroing(self._view(arrays[v], v, whole))
                begin[v] = False
        bound = self._bind_added(call, arrays, here, ranges, rest, runtime, begin)
        if bound is not None:
            yield bound
            return
        yield self._bind_step(call, plan, here, ranges, rest, runtime)
        for v, first in begin.items():
            to = self._view(arrays[v], v, ranges)
            yield (binding.copying if first else binding.adding)(to, here[v])

    def _bind_added(
        self,
        call: Call,
        arrays: ByValue,
        here: ByValue,
        ranges: Ranges,
        rest: np.ndarray,
        runtime: Runtime,
        begin: Mapping[int, bool],
    ) -> Bound | None:
        """A product that BLAS adds to what its part of the result holds, where it lies."""
        one, v = call.instruction, call.instruction.outputs[0]
        plan = self.direct.get(v)
        make = None if plan is None else plan.make if begin[v] else plan.make_adding
        if make is None:
            return None
        ins, to = [here[x] for x in one.inputs], arrays[v].reshape(-1)[self._start(v, ranges) :]
        product = make(ins, [to], rest, runtime)
        if product is None:
            return None
        return self._guarded(one, ranges, ins, to, product, [*self.strided, v], not begin[v])

    def _part(self, array: np.ndarray, v: int, ranges: Ranges) -> np.ndarray:
        """The elements of a block: its array where it is contiguous, else all from its first."""
        t = self.types[v]
        extents = tuple(regions.extents_in(t.shape, ranges).values())
        start = self._start(v, ranges)
        if v in self.strided:
            return array.reshape(-1)[start:]
        return array.reshape(-1)[start : start + math.prod(extents)].reshape(extents)

    def _start(self, v: int, ranges: Ranges) -> int:
        return sum((ranges[n][0] - self.own[n][0]) * s for n, s in self.outer[v].items())

    def _view(self, array: np.ndarray, v: int, ranges: Ranges) -> np.ndarray:
        """The elements of a block where they lie in the array outside."""
        names = self.types[v].shape.names
        cuts = (slice(*(x - self.own[n][0] for x in ranges[n])) for n in names)
        return array[(*cuts, ...)]  # a view even where there are no dims


def _is_positional(one: Instruction) -> bool:
    """Whether what an instruction makes depends on where its block begins."""
    return any(isinstance(i.attrs, Random) or i.attrs.band for i in one.leaves())
