"""Tiled regions: large values between matrix products, such as attention scores, exist one tile at a time.

Each group of `tile_groups` becomes a `tiled` region, which recomputes such values in the backward pass. Any chain of
contracts, maps and reductions can be tiled, in any layout; a group ends where a sum over mesh axes is needed.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from meshmpi.compiler.passes.fusion import MAX_INPUTS, form_fused_kernels, fuse, merged_maps
from meshmpi.compiler.passes.rewrite import enclosed, writes_last
from meshmpi.compiler.passes.tile_groups import Group, Grouping, Rematerialised
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Contract, Map, Reduce, Tiled, TileDim
from meshmpi.ir.kinds.regions import leaves_out, walkable
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import ITEM_BYTES, Expr, Step
from meshmpi.ir.types import held_differently

CACHE_BYTES = 1 << 20
"""Tile size: the intermediate values of one tile must fit into this.  Smaller values are not tiled.
Status: the second-level cache of one core of today's servers; see docs/performance.md."""
LEAST_ROWS = 128
"""Least rows of a tile in a dim that is not a batch.  Measured (apps/bench/attention.py): products of 64
rows are a third slower, more rows leave the cache."""
BAND_PARTS = 4
"""Least number of tiles of rows in a band: of causal attention n of them skip (n - 1) / 2n."""
LEAST_BAND_ROWS, MOST_BAND_ROWS = 64, 256
"""Rows of such a tile.  Measured as above: 64 are best for 256 positions, 256 for 1024."""


def form_tiled_regions(program: Program, cache_bytes: int = CACHE_BYTES) -> Program:
    """Replaces the instructions that make and use large values by tiled regions.

    Args:
        program: After `fuse` and before `form_fused_kernels`.
        cache_bytes: Most bytes of intermediate values in one tile.
    """
    left_alone: dict[int, None] = {}  # values that no region can be formed for
    while True:
        again = Rematerialised(program, cache_bytes, left_alone)
        if not again.makers:
            return program
        grouping = Grouping(program, again)
        regions = [_Region(program, again, g, grouping.outputs(g), cache_bytes) for g in grouping.groups]
        failed = [region.group for region in regions if not region.over]
        if not failed:
            return _scheduled(program, again, regions)
        for g in failed:
            # A group may have maps only, of products that are small themselves.
            left_alone.update(dict.fromkeys(g.roots or [v for v in g.recipes if v not in again.masks]))


class _Region:
    """The region of a group: its instructions, what others use of their results, and its tiles."""

    def __init__(
        self, program: Program, again: Rematerialised, group: Group, outputs: tuple[int, ...], cache_bytes: int
    ):
        self.program, self.again, self.group, self.outputs = program, again, group, outputs
        self.own_types: dict[int, LocalType] = {}
        self.types = ChainMap(self.own_types, cast("dict[int, LocalType]", program.types))
        self.own: dict[int, int] = {}  # rematerialised value -> its number in this body
        self.body: list[Instruction] = []
        for i in group.members.values():
            self.body.append(i.replaced(inputs=tuple(map(self._needed, i.inputs))))
        self.last = max(group.members)
        self._fuse()
        tiles = _Tiles(program, self, cache_bytes)
        self.over, self.band = tiles.over, tiles.band

    def _needed(self, v: int) -> int:
        """The number in this body of an input of a member; rematerialised values are computed first."""
        if v in self.again.makers and v not in self.own:
            self._make(v, self._with_masks(self._on_own(self.again.makers[v])))
        return self.own.get(v, v)

    def _on_own(self, i: Instruction) -> Instruction:
        return i.replaced(inputs=tuple(x if x in self.again.masks else self._needed(x) for x in i.inputs))

    def _make(self, v: int, i: Instruction) -> None:
        self.own[v] = number = self.again.new_value()
        self.types[number] = self.program.types[v]
        self.body.append(i.replaced(outputs=(number,)))

    def _with_masks(self, i: Instruction) -> Instruction:
        """The map with the masks that it uses computed in it: one comparison a point."""
        for v in dict.fromkeys(x for x in i.inputs if x in self.again.masks):
            mask = self._with_masks(self._on_own(self.again.makers[v]))
            merged = merged_maps(mask, i, []) if isinstance(i.attrs, Map) else None
            if merged is not None and len(merged.inputs) <= MAX_INPUTS:
                i = merged
                continue
            if v not in self.own:
                self._make(v, mask)
            i = i.replaced(inputs=tuple(self.own[v] if x == v else x for x in i.inputs))
        return i

    def _fuse(self) -> None:
        """Maps of the body are fused, and its maps and reductions become fused kernels."""
        mesh, fetches = self.program.mesh, {str(v): v for v in self.outputs}
        for one in (fuse, form_fused_kernels):
            types = {v: self.types[v] for i in self.body for v in (*i.inputs, *i.outputs)}
            self.body = list(one(Program(mesh, types, tuple(self.body), {}, {}, fetches)).instructions)

    def instructions(self) -> list[Instruction]:
        """The region, and what follows it."""
        outputs, after = self._float32_sums()
        inputs, inner = enclosed(self.body, outputs, self.types)
        attrs = Tiled(self.over, self.band, tuple(self.body), inner)
        return [Instruction(attrs, inputs, outputs, self.group.members[self.last].source), *after]

    def _float32_sums(self) -> tuple[tuple[int, ...], list[Instruction]]:
        """Products of bfloat16 that are summed over tiles are summed in float32."""
        after, instead = list[Instruction](), dict[int, int]()
        for v in self.outputs:
            t = self.types[v]
            if t.dtype != "bfloat16" or all(d in t.shape.names for d, _ in self.over):
                continue
            instead[v] = w = self.again.new_value()
            self.types[w] = LocalType(t.shape, "float32", t.splits, t.partial, t.pending)
            expr = Expr((Step("cast", ("i0",), "bfloat16"),), ("t0",))
            after.append(Instruction(Map(expr), (w,), (v,)))
        self.body = [i.replaced(outputs=tuple(instead.get(v, v) for v in i.outputs)) for i in self.body]
        return tuple(instead.get(v, v) for v in self.outputs), after


class _Tiles:
    """Tiles of a region, as large as fit the cache: the dims ``over`` that it is cut along, outermost first.

    Dims that are a batch to every product are cut first, down to one element; then dims of rows, which stay long
    enough for matrix products.  Where all sums over pairs of rows and columns are over one ``band``, the rows are cut
    even where they would fit, since columns that no row of a tile is paired with are skipped then.
    """

    def __init__(self, program: Program, region: _Region, cache_bytes: int):
        self.types, self.body, self.outputs = region.types, region.body, region.outputs
        self.leaves = [j for i in self.body for j in i.leaves()]
        self._products = [i for i in self.leaves if isinstance(i.attrs, Contract)]
        self._made = {v for i in self.body for v in i.outputs}
        inner = {v: t for i in self.body for v, t in i.inner_types().items()}
        self.all_types = ChainMap(inner, self.types)
        used = [self.all_types[v] for v in dict.fromkeys(v for i in self.leaves for v in (*i.inputs, *i.outputs))]
        self.extents: dict[str, int] = {}
        for t in used:
            self.extents.update(zip(t.shape.names, t.max_sizes(program.mesh), strict=True))
        group, masks = region.group, region.again.masks
        names = next(self.types[v].shape.names for v in (*group.roots, *group.recipes) if v not in masks)
        names = names if held_differently(used) is None else ()
        dims = sorted((d for d in names if self._can_walk(d)), key=self._rank)
        self.band = _band(group.members.values(), self.all_types, dims)
        sizes = self._sizes(dims, cache_bytes)
        cut = [d for d in dims if sizes[d] < self.extents[d]]
        if cut and self.band is not None:  # few rows on a rank, in one tile, see few columns
            cut = [d for d in dims if d in cut or d == self.band.rows]
        self.over = tuple(TileDim(d, sizes[d]) for d in cut)

    def _can_walk(self, dim: str) -> bool:
        """Whether the dim may be cut; only products of bfloat16 can be summed in float32."""
        narrow = any(
            self.all_types[v].dtype == "bfloat16" and self.all_types[v].shape.find(dim) < 0
            for i in self.leaves
            if isinstance(i.attrs, Reduce)
            for v in i.outputs
            if v in self.outputs
        )
        return not narrow and walkable(self.leaves, self.all_types, self.outputs, dim)

    def _rank(self, dim: str) -> int:
        """0: results of tiles are apart; 1: they are summed; 2: the dim is a side of a product."""
        if not self._is_batch(dim):
            return 2
        return int(any(self.types[v].shape.find(dim) < 0 for v in self.outputs))

    def _is_batch(self, dim: str) -> bool:
        return all(self.types[v].shape.find(dim) >= 0 for i in self._products for v in (*i.inputs, *i.outputs))

    def _sizes(self, dims: Sequence[str], cache_bytes: int) -> dict[str, int]:
        sizes = dict(self.extents)
        if self.band is not None:
            whole = sizes[self.band.rows]
            rows = max(LEAST_BAND_ROWS, -(-whole // BAND_PARTS))
            sizes[self.band.rows] = min(whole, rows, MOST_BAND_ROWS)
        for d in dims:
            needed = self._bytes(sizes)
            if needed <= cache_bytes:
                break
            least = 1 if self._is_batch(d) else min(LEAST_ROWS, sizes[d])
            most = max(least, sizes[d] * cache_bytes // needed)
            count = -(-sizes[d] // most)
            sizes[d] = -(-sizes[d] // count)
        return sizes

    def _bytes(self, sizes: Mapping[str, int]) -> int:
        """Most bytes of intermediate values at once."""
        last = {v: n for n, i in enumerate(self.body) for v in (*i.outputs, *i.inputs)}
        live, most = 0, 0
        for n, i in enumerate(self.body):
            live += sum(self._size(v, sizes) for v in self._inner(i.outputs))
            most = max(most, live)
            live -= sum(self._size(v, sizes) for v in self._inner((*i.inputs, *i.outputs)) if last[v] == n)
        return most

    def _inner(self, values: Sequence[int]) -> Iterator[int]:
        return (v for v in dict.fromkeys(values) if v in self._made and v not in self.outputs)

    def _size(self, v: int, sizes: Mapping[str, int]) -> int:
        t = self.types[v]
        return math.prod(sizes[n] for n in t.shape.names) * ITEM_BYTES[t.dtype]


def _band(members: Iterable[Instruction], types: Mapping[int, LocalType], dims: Sequence[str]) -> Band | None:
    """The band whose pairs alone the members of a region need, if there is one."""
    members = list(members)
    for band in dict.fromkeys(i.attrs.band for i in members):
        if band is None or band.rows not in dims or band.columns in dims:
            continue
        if all(leaves_out(i, types, band) for i in members):
            return band
    return None


def _scheduled(program: Program, again: Rematerialised, regions: Sequence[_Region]) -> Program:
    """Regions where their last member was; what needs their results earlier waits behind them."""
    members = {n for region in regions for n in region.group.members}
    ends = {region.last: region for region in regions}
    types = dict(program.types)
    out: list[Instruction] = []
    known: set[int] = set()
    waiting: list[list[Instruction]] = []
    for n, i in enumerate(program.instructions):
        if n in ends:
            waiting.append(ends[n].instructions())
            types.update(ends[n].own_types)
        elif n not in members and not any(v in again.makers for v in i.outputs):
            waiting.append([i])
        waiting = _emit_ready(waiting, known, out)
    if waiting:
        raise AssertionError("groups that wait for each other")
    return program.with_instructions(writes_last(out), types)


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
