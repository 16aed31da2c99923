"""Wide values: large, cheap to compute again, and needed between matrix products only.

Types and instructions only; `tiled regions` forms the tiled regions.
"""

from __future__ import annotations

import math
from collections.abc import Container

from meshmpi.compiler.passes.rewrite import fetched, fresh
from meshmpi.ir.kinds import Map, Random
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.types import LocalDim

MOST_SUMMED = 256
"""Numbers summed for each element of a wide value: 2 * 256 FLOP at most to compute it again.
Status: assumption; storing and loading 4 bytes takes as long as some 50 FLOP, and memory counts."""
MASK_FLOPS = 8
"""Of a map that is computed in every tiled region instead of being stored.  Status: assumption."""


class WideValues:
    """Which values of a program are computed where they are needed, and never stored.

    Args:
        program: After `fuse`.
        least_bytes: Of the contracts' results that start it.
        left_alone: Values that shall be stored.

    Attributes:
        makers: Value -> the instruction that makes it, for all values that are not stored.
        roots: Those that contracts make.
        masks: Those with fewer dims: comparisons of indices, and the like.
        keys: Sorted dims of wide values, as ranks hold them.
    """

    def __init__(self, program: Program, least_bytes: int, left_alone: Container[int]):
        self.program, self.left_alone = program, left_alone
        self.next_value = fresh(program)
        self.roots = {
            i.outputs[0]: None for i in program.instructions if i.kind == "contract" and i.outputs[0] not in left_alone
        }
        weights = _weights(program)
        self.roots = {
            i.outputs[0]: None
            for i in program.instructions
            if i.kind == "contract"
            and i.outputs[0] in self.roots
            and not any(v in weights for v in i.inputs)
            and self._is_root(i, least_bytes)
        }
        self.keys: dict[tuple[LocalDim, ...], None] = {}
        self.makers: dict[int, Instruction] = {}
        self.masks: dict[int, None] = {}
        while self.keys != (keys := {self.dims_of(v): None for v in self.roots}):
            self.keys = keys
            self._find_makers()
            self._store_what_others_need()
            self.roots = {v: None for v in self.roots if v in self.makers}

    def _find_makers(self) -> None:
        self.makers, self.masks = {}, {}
        for i in self.program.instructions if self.keys else ():
            if self._is_wide(i):
                self.makers[i.outputs[0]] = i
            elif self._is_mask(i):
                self.makers[i.outputs[0]] = i
                self.masks[i.outputs[0]] = None

    def new_value(self) -> int:
        self.next_value += 1
        return self.next_value - 1

    def dims_of(self, v: int) -> tuple[LocalDim, ...]:
        return tuple(sorted(self.program.types[v].local_dims))

    def _elements(self, v: int) -> int:
        return self.program.types[v].max_elements(self.program.mesh)

    def _is_root(self, i: Instruction, least_bytes: int) -> bool:
        types, (y,) = self.program.types, i.outputs
        if types[y].partial or types[y].max_bytes(self.program.mesh) <= least_bytes:
            return False
        summed = self._extents(i.inputs[0])
        summed = {n: s for n, s in summed.items() if n not in types[y].shape.names}
        grows = self._elements(y) > sum(self._elements(v) for v in i.inputs)
        plain = not any(types[v].halos for v in i.inputs)
        return grows and plain and math.prod(summed.values()) <= MOST_SUMMED

    def _extents(self, v: int) -> dict[str, int]:
        t = self.program.types[v]
        return dict(zip(t.shape.names, t.max_sizes(self.program.mesh), strict=True))

    def _is_wide(self, i: Instruction) -> bool:
        if len(i.outputs) != 1 or self.dims_of(i.outputs[0]) not in self.keys:
            return False
        if i.outputs[0] in self.left_alone:
            return False
        if i.kind == "contract":
            return i.outputs[0] in self.roots
        random = isinstance(i.attrs, Random) and i.attrs.distribution == "uniform"
        finished = not self.program.types[i.outputs[0]].partial
        return random or (i.kind == "map" and bool(i.inputs) and finished)

    def _is_mask(self, i: Instruction) -> bool:
        """A cheap map that is larger than its inputs, over some of the dims of wide values."""
        if i.kind != "map" or len(i.outputs) != 1 or not i.inputs:
            return False
        dims = set(self.program.types[i.outputs[0]].local_dims)
        grows = self._elements(i.outputs[0]) > sum(self._elements(v) for v in i.inputs)
        cheap = i.of(Map).expr.flops <= MASK_FLOPS
        finished = not self.program.types[i.outputs[0]].partial
        return grows and cheap and finished and any(dims < set(key) for key in self.keys)

    def _store_what_others_need(self) -> None:
        """Values used by what cannot be in a tiled region are stored, and so are those they need."""
        stored = fetched(self.program)
        useful: set[int] = set()  # masks that wide values need
        for i in reversed(self.program.instructions):
            makes = next((v for v in i.outputs if v in self.makers), None)
            kept = makes is not None and makes not in stored
            if kept and makes in self.masks and makes not in useful:
                kept = False
            if makes is not None and not kept:
                stored.add(makes)
            for v in i.inputs:
                if v not in self.makers:
                    continue
                if kept or (v not in self.masks and self._can_be_member(i)):
                    useful.add(v)
                else:
                    stored.add(v)
        self.makers = {v: i for v, i in self.makers.items() if v not in stored}
        self.masks = {v: None for v in self.masks if v not in stored}

    def _can_be_member(self, i: Instruction) -> bool:
        types = self.program.types
        plain = not any(types[v].halos or types[v].partial for v in i.inputs)
        return i.kind in ("reduce", "contract") and plain


def _weights(program: Program) -> set[int]:
    """Values that depend on variables only; for membership tests."""
    out: set[int] = set()
    for i in program.instructions:
        if i.kind == "read" or (i.inputs and all(v in out for v in i.inputs)):
            out.update(i.outputs)
    return out
