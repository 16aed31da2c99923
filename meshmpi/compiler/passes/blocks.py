"""Which dims a tiled region walks along, and how many elements at a time.

Blocks are as large as fit the cache.  Dims that are a batch to every product come first, and go
down to one element; then dims of rows, which stay long enough for matrix products.  Where sums are
over a band of rows and columns, the rows are cut even where they would fit, since columns that no
row of a block is paired with are skipped then.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

from meshmpi.compiler.passes.groups import Group
from meshmpi.compiler.passes.wide import WideValues
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds.regions import TileDim, leaves_out, walkable
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import ITEM_BYTES
from meshmpi.ir.types import held_differently

LEAST_ROWS = 128
"""Rows of a block in a dim that is no batch.  Measured (apps/bench/attention.py): products of 64
rows are a third slower, more rows leave the cache."""
BAND_PARTS = 4
"""Blocks of rows in a band, at least: of causal attention n of them skip (n - 1) / 2n."""
LEAST_BAND_ROWS, MOST_BAND_ROWS = 64, 256
"""Rows of such a block.  Measured as above: 64 are best for 256 positions, 256 for 1024."""


class Blocks:
    """The blocks of one tiled region.

    Args:
        program: The whole program.
        types: Of all values of the body.
        body, outputs: Of the region.
        group, wide: What it was formed from.
        cache_bytes: For intermediate values.

    Attributes:
        over: The dims, outermost first; empty where none can be walked along.
        band: What all sums over pairs of rows and columns have in common, else None.
    """

    def __init__(
        self,
        program: Program,
        types: MutableMapping[int, LocalType],
        body: Sequence[Instruction],
        outputs: Sequence[int],
        group: Group,
        wide: WideValues,
        cache_bytes: int,
    ):
        self.types, self.body, self.outputs = types, body, outputs
        self.leaves = [j for i in body for j in i.leaves()]
        self._made = {v for i in body for v in i.outputs}
        inner = {v: t for i in body for v, t in i.inner_types().items()}
        self.all_types = ChainMap(inner, types)
        self.extents: dict[str, int] = {}
        values = {v: None for i in self.leaves for v in (*i.inputs, *i.outputs)}
        used = [self.all_types[v] for v in values]
        for t in used:
            self.extents.update(zip(t.shape.names, t.max_sizes(program.mesh), strict=True))
        names = next(types[v].shape.names for v in (*group.roots, *group.recipes) if v not in wide.masks)
        names = names if held_differently(used) is None else ()
        ranked = [(self._rank(d), k, d) for k, d in enumerate(names) if self._can_walk(d)]
        dims = [d for _, _, d in sorted(ranked)]
        self.band = _band(group.members.values(), self.all_types, dims)
        sizes = self._sizes(dims, cache_bytes)
        cut = [d for d in dims if sizes[d] < self.extents[d]]
        if cut and self.band is not None:  # few rows on a rank, in one block, see few columns
            cut = [d for d in dims if d in cut or d == self.band.rows]
        self.over = tuple(TileDim(d, sizes[d]) for d in cut)

    def _products(self) -> list[Instruction]:
        return [i for i in self.leaves if i.kind == "contract"]

    def _can_walk(self, dim: str) -> bool:
        """Whether the dim may be cut; only products of bfloat16 can be summed in float32."""
        narrow = any(
            self.all_types[v].dtype == "bfloat16" and self.all_types[v].shape.find(dim) < 0
            for i in self.leaves
            if i.kind == "reduce"
            for v in i.outputs
            if v in self.outputs
        )
        return not narrow and walkable(self.leaves, self.all_types, self.outputs, dim)

    def _rank(self, dim: str) -> int:
        """0: results of blocks are apart; 1: they are summed; 2: the dim is a side of a product."""
        if not self._is_batch(dim):
            return 2
        return int(any(self.types[v].shape.find(dim) < 0 for v in self.outputs))

    def _is_batch(self, dim: str) -> bool:
        return all(all(self.types[v].shape.find(dim) >= 0 for v in (*i.inputs, *i.outputs)) for i in self._products())

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
    """The band whose pairs alone the members of a tiled region need, if there is one."""
    members = list(members)
    for band in dict.fromkeys(i.attrs.band for i in members):
        if band is None or band.rows not in dims or band.columns in dims:
            continue
        if all(leaves_out(i, types, band) for i in members):
            return band
    return None
