"""Large values between matrix products, as the scores of an attention, live a block at a time.

A *wide* value has the dims of a contract whose result is larger than both its operands and cheap to
compute (few numbers are summed for each), or is a map of such.  Wide values are never stored.  What
uses one becomes a member of a group, and each group becomes a `tiled` region that computes the wide values
it needs itself, from the narrow values that wide ones are made of: operands of the contracts, row
maxima and row sums of a softmax, keys of random numbers.  So

- scores and weights stay in the cache, and memory grows with the length and not with its square;
- the backward pass computes scores again, since it is another region;
- nothing here knows attention: any chain of contracts, maps and reductions will do, in any layout.
  Where a sum over mesh axes is needed in between (memory positions that are split), a group ends,
  and the next one computes the scores again.

Who belongs to a group is decided in `groups`; which dims a tiled region walks along, and how far at a time,
in `blocks`.  Where all sums over pairs of rows and columns are over one
`Band`, blocks outside it are skipped, by their indices alone.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Sequence
from typing import cast

from meshmpi.compiler.passes.blocks import Blocks
from meshmpi.compiler.passes.fuse import MAX_INPUTS, fuse, merged_maps
from meshmpi.compiler.passes.fused_kernels import form_fused_kernels
from meshmpi.compiler.passes.groups import Group, Grouping
from meshmpi.compiler.passes.rewrite import fetched
from meshmpi.compiler.passes.wide import WideValues
from meshmpi.ir.kinds import Map, Tiled
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import Expr, Step

CACHE_BYTES = 1 << 20
"""Of intermediate values in one iteration, and wide values smaller than this are left alone.
Status: the second-level cache of one core of today's servers; see docs/performance.md."""


def form_tiled_regions(program: Program, cache_bytes: int = CACHE_BYTES) -> Program:
    """Replaces the instructions that make and use wide values by regions.

    Args:
        program: After `fuse` and before `form_fused_kernels`.
        cache_bytes: For the intermediate values of one iteration.
    """
    left_alone: dict[int, None] = {}  # values that no region can be formed for
    while True:
        wide = WideValues(program, cache_bytes, left_alone)
        if not wide.makers:
            return program
        groups = Grouping(program, wide).groups
        uses = _Uses(program, wide, groups)
        regions = [_Region(program, wide, g, uses, cache_bytes) for g in groups]
        failed = [region for region in regions if not region.blocks.over]
        if not failed:
            return _scheduled(program, wide, regions)
        for g in (region.group for region in failed):
            # A group may have maps only, of products that are small themselves.
            kept = g.roots or [v for v in g.recipes if v not in wide.masks]
            left_alone.update((v, None) for v in kept)


class _Uses:
    """Which values are needed outside the group that makes them."""

    def __init__(self, program: Program, wide: WideValues, groups: Sequence[Group]):
        member_of = {n: g.bit for g in groups for n in g.members}
        self._outside = fetched(program)
        self._bits: dict[int, int] = {}  # value -> the groups that use it
        for n, i in enumerate(program.instructions):
            if n in member_of:
                self._add(member_of[n], i.inputs)
            elif not any(v in wide.makers for v in i.outputs):
                self._outside.update(i.inputs)
        for g in groups:
            for v in g.recipes:
                self._add(g.bit, wide.makers[v].inputs)

    def _add(self, bit: int, values: Iterable[int]) -> None:
        for v in values:
            self._bits[v] = self._bits.get(v, 0) | bit

    def outputs(self, g: Group) -> tuple[int, ...]:
        """What others use of what the members of a group make."""
        return tuple(v for v in g.made if v in self._outside or self._bits.get(v, 0) & ~g.bit)


class _Region:
    """The region of a group: its body, and the blocks it runs over."""

    def __init__(self, program: Program, wide: WideValues, group: Group, uses: _Uses, cache_bytes: int):
        self.program, self.wide, self.group = program, wide, group
        self.own_types: dict[int, LocalType] = {}
        self.types = ChainMap(self.own_types, cast("dict[int, LocalType]", program.types))
        self.next = wide.next_value
        self.own: dict[int, int] = {}  # wide value -> its number in this body
        self.body: list[Instruction] = []
        for i in group.members.values():
            self.body.append(i.replaced(inputs=tuple(self._needed(v) for v in i.inputs)))
        wide.next_value = self.next
        self.last = max(group.members)
        self.outputs = uses.outputs(group)
        self._fuse()
        self.blocks = Blocks(program, self.types, self.body, self.outputs, group, wide, cache_bytes)

    def _needed(self, v: int) -> int:
        """The number in this body of an input of a member; wide values are computed first."""
        if v not in self.wide.makers:
            return v
        if v not in self.own:
            i = self.wide.makers[v]
            inputs = tuple(x if x in self.wide.masks else self._needed(x) for x in i.inputs)
            i = self._with_masks(i.replaced(inputs=inputs))
            self.own[v] = self.next
            self.types[self.next] = self.program.types[v]
            self.body.append(i.replaced(outputs=(self.next,)))
            self.next += 1
        return self.own[v]

    def _with_masks(self, i: Instruction) -> Instruction:
        """The map with the masks that it uses computed in it: one comparison a point."""
        for v in dict.fromkeys(x for x in i.inputs if x in self.wide.masks):
            mask = self.wide.makers[v]
            inputs = tuple(x if x in self.wide.masks else self._needed(x) for x in mask.inputs)
            mask = self._with_masks(mask.replaced(inputs=inputs))
            merged = merged_maps(mask, i, []) if i.kind == "map" else None
            if merged is not None and len(merged.inputs) <= MAX_INPUTS:
                i = merged
                continue
            if v not in self.own:
                self.own[v] = self.next
                self.types[self.next] = self.program.types[v]
                self.body.append(mask.replaced(outputs=(self.next,)))
                self.next += 1
            i = i.replaced(inputs=tuple(self.own[v] if x == v else x for x in i.inputs))
        return i

    def _fuse(self) -> None:
        """Maps of the body are fused, and its maps and reductions become fused kernels."""
        for one in (fuse, form_fused_kernels):
            p = self.program
            fetches = {str(v): v for v in self.outputs}
            types = {v: self.types[v] for i in self.body for v in (*i.inputs, *i.outputs)}
            inside = Program(p.mesh, types, tuple(self.body), {}, {}, fetches, p.seed)
            self.body = list(one(inside).instructions)

    def instructions(self) -> list[Instruction]:
        """The region, and what follows it."""
        outputs, after = self._wide_sums()
        inner = {v: self.types[v] for i in self.body for v in i.outputs if v not in outputs}
        inputs = dict.fromkeys(v for i in self.body for v in i.inputs if v not in inner and v not in outputs)
        attrs = Tiled(self.blocks.over, self.blocks.band, tuple(self.body), inner)
        source = self.group.members[self.last].source
        return [Instruction(attrs, tuple(inputs), outputs, source), *after]

    def _wide_sums(self) -> tuple[tuple[int, ...], list[Instruction]]:
        """Products of bfloat16 that are summed over blocks are summed in float32."""
        after, instead = list[Instruction](), dict[int, int]()
        for v in self.outputs:
            t = self.types[v]
            if t.dtype != "bfloat16" or all(d in t.shape.names for d, _ in self.blocks.over):
                continue
            w = self.wide.new_value()
            self.types[w] = LocalType(t.shape, "float32", t.splits, t.partial, t.pending)
            expr = Expr((Step("cast", ("i0",), "bfloat16"),), ("t0",))
            after.append(Instruction(Map(expr), (w,), (v,)))
            instead[v] = w
        self.body = [i.replaced(outputs=tuple(instead.get(v, v) for v in i.outputs)) for i in self.body]
        return tuple(instead.get(v, v) for v in self.outputs), after


def _scheduled(program: Program, wide: WideValues, regions: Sequence[_Region]) -> Program:
    """Tiled regions where their last member was; what needs their results earlier waits behind them."""
    members = {n for region in regions for n in region.group.members}
    ends = {region.last: region for region in regions}
    types = dict(program.types)
    out: list[Instruction] = []
    writes: list[Instruction] = []
    known: set[int] = set()
    waiting: list[list[Instruction]] = []
    for n, i in enumerate(program.instructions):
        if n in ends:
            waiting.append(ends[n].instructions())
            types.update(ends[n].own_types)
        elif i.kind == "write":
            writes.append(i)
        elif n not in members and not any(v in wide.makers for v in i.outputs):
            waiting.append([i])
        waiting = _emit_ready(waiting, known, out)
    if waiting:
        raise AssertionError("groups that wait for each other")
    return program.with_instructions([*out, *writes], types)


def _emit_ready(waiting: list[list[Instruction]], known: set[int], out: list[Instruction]) -> list[list[Instruction]]:
    """Emits what has all its inputs, in order, again and again; returns what still waits."""
    again = True
    while again:
        again, still = False, list[list[Instruction]]()
        for unit in waiting:
            if not all(v in known for v in unit[0].inputs):
                still.append(unit)
                continue
            out.extend(unit)
            known.update(v for i in unit for v in i.outputs)
            again = bool(still)
        waiting = still
    return waiting
