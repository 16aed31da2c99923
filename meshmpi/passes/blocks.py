"""Which dims a loop walks along, and how many elements at a time.

Blocks are as large as fit the cache.  Dims that are a batch to every product come first, and go
down to one element; then dims of rows, which stay long enough for matrix products.  Of a causal
attention the rows are cut even where they would fit, since half of the columns is skipped then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from meshmpi.loops import LoopDim, walkable
from meshmpi.passes.causal import causal_dims
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.scalar import ITEM_BYTES

if TYPE_CHECKING:
    from meshmpi.passes.loops import Group
    from meshmpi.passes.wide import WideValues

LEAST_ROWS = 128
"""Rows of a block in a dim that is no batch.  Measured (apps/bench/attention.py): products of 64
rows are a third slower, more rows leave the cache."""
CAUSAL_PARTS = 4
"""Blocks of rows of a causal attention, at least: n of them skip (n - 1) / 2n of it."""
LEAST_CAUSAL_ROWS, MOST_CAUSAL_ROWS = 64, 256
"""Rows of such a block.  Measured as above: 64 are best for 256 positions, 256 for 1024."""


class Blocks:
    """The blocks of one loop.

    Args:
        program: The whole program.
        types: Of all values of the body.
        body, outputs: Of the loop.
        group, wide: What it was formed from.
        cache_bytes: For intermediate values.

    Attributes:
        over: The dims, outermost first; empty where none can be walked along.
        causal: (rows, columns) where columns behind the rows are skipped, else empty.
    """

    def __init__(
        self, program: Program, types: Mapping[int, LocalType], body: Sequence[Instruction],
        outputs: Sequence[int], group: Group, wide: WideValues, cache_bytes: int,
    ):  # fmt: skip
        self.types, self.body, self.outputs = types, body, outputs
        self.leaves = [j for i in body for j in i.leaves()]
        self.all_types = dict(types)
        for i in body:
            self.all_types.update(i.inner_types())
        self.extents: dict[str, int] = {}
        for v in {v: None for i in self.leaves for v in (*i.inputs, *i.outputs)}:
            t = self.all_types[v]
            self.extents.update(zip(t.shape.names, t.max_sizes(program.mesh), strict=True))
        names = next(types[v].shape.names for v in (*group.roots, *group.recipes)
                     if v not in wide.masks)  # fmt: skip
        ranked = [(self._rank(d), k, d) for k, d in enumerate(names) if self._can_walk(d)]
        dims = [d for _, _, d in sorted(ranked)]
        self.causal = causal_dims(program, group, wide, self._products(), dims)
        sizes = self._sizes(dims, cache_bytes)
        self.over = tuple(LoopDim(d, sizes[d]) for d in dims if sizes[d] < self.extents[d])
        if not self.causal or self.causal[0] not in [d for d, _ in self.over]:
            self.causal = ()

    def _products(self) -> list[Instruction]:
        return [i for i in self.leaves if i.kind == "contract"]

    def _can_walk(self, dim: str) -> bool:
        """Whether the dim may be cut; only products of bfloat16 can be summed in float32."""
        narrow = any(
            self.all_types[v].dtype == "bfloat16" and self.all_types[v].shape.find(dim) < 0
            for i in self.leaves if i.kind == "reduce" for v in i.outputs if v in self.outputs
        )  # fmt: skip
        return not narrow and walkable(self.leaves, self.all_types, self.outputs, dim)

    def _rank(self, dim: str) -> int:
        """0: results of blocks are apart; 1: they are summed; 2: the dim is a side of a product."""
        if not self._is_batch(dim):
            return 2
        return int(any(self.types[v].shape.find(dim) < 0 for v in self.outputs))

    def _is_batch(self, dim: str) -> bool:
        return all(
            all(self.types[v].shape.find(dim) >= 0 for v in (*i.inputs, *i.outputs))
            for i in self._products()
        )

    def _sizes(self, dims: Sequence[str], cache_bytes: int) -> dict[str, int]:
        sizes = dict(self.extents)
        if self.causal:
            rows = max(LEAST_CAUSAL_ROWS, -(-sizes[self.causal[0]] // CAUSAL_PARTS))
            sizes[self.causal[0]] = min(sizes[self.causal[0]], rows, MOST_CAUSAL_ROWS)
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
            live -= sum(self._size(v, sizes) for v in self._inner((*i.inputs, *i.outputs))
                        if last[v] == n)  # fmt: skip
        return most

    def _inner(self, values: Sequence[int]) -> Iterator[int]:
        made = {v for i in self.body for v in i.outputs}
        return (v for v in dict.fromkeys(values) if v in made and v not in self.outputs)

    def _size(self, v: int, sizes: Mapping[str, int]) -> int:
        t = self.types[v]
        return math.prod(sizes[n] for n in t.shape.names) * ITEM_BYTES[t.dtype]
