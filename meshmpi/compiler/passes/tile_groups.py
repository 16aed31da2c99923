"""Selects the rematerialised values and the groups of instructions for tiled regions.

A *rematerialised* value is never stored: it is the result of a cheap contract that is larger than both operands, or a
map of such values; every region that uses one computes it from stored values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from meshmpi.compiler.passes.rewrite import fetched, fresh
from meshmpi.ir.kinds import Contract, Map, Random, Read, Reduce
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.types import LocalDim, held_differently

MOST_SUMMED = 256
"""Numbers summed for each element of a rematerialised value: 2 * 256 FLOP at most to compute it again.
Status: assumption; storing and loading 4 bytes takes as long as some 50 FLOP, and memory counts."""
MASK_FLOPS = 8
"""FLOP of a map that is computed in every tiled region instead of being stored.  Status: assumption."""


class Rematerialised:
    """Which values of a program are computed where they are needed, and never stored.

    Args:
        program: After `fuse`.
        least_bytes: Results of contracts that are not larger are stored.
        left_alone: Values that shall be stored.
    """

    def __init__(self, program: Program, least_bytes: int, left_alone: Container[int]):
        self.program, self.left_alone = program, left_alone
        self.next_value = fresh(program)
        weights = _weights(program)
        self.roots = {  # values that contracts make
            i.outputs[0]: None
            for i in program.instructions
            if isinstance(i.attrs, Contract)
            and i.outputs[0] not in left_alone
            and not any(v in weights for v in i.inputs)
            and self._is_root(i, least_bytes)
        }
        self.keys: dict[tuple[LocalDim, ...], None] = {}  # sorted dims of rematerialised values
        self.makers: dict[int, Instruction] = {}  # of all values that are not stored
        self.masks: dict[int, None] = {}  # values with fewer dims: comparisons of indices, and the like
        while self.keys != (keys := {self.dims_of(v): None for v in self.roots}):
            self.keys = keys
            large = {i.outputs[0]: i for i in program.instructions if keys and self._is_large(i)}
            masks = {i.outputs[0]: i for i in program.instructions if keys and self._is_mask(i)}
            self.makers, self.masks = {**masks, **large}, dict.fromkeys(v for v in masks if v not in large)
            self._store_what_others_need()
            self.roots = {v: None for v in self.roots if v in self.makers}

    def new_value(self) -> int:
        self.next_value += 1
        return self.next_value - 1

    def dims_of(self, v: int) -> tuple[LocalDim, ...]:
        return tuple(sorted(self.program.types[v].local_dims))

    def _elements(self, v: int) -> int:
        return self.program.types[v].max_elements(self.program.mesh)

    def _grows(self, i: Instruction) -> bool:
        return self._elements(i.outputs[0]) > sum(map(self._elements, i.inputs))

    def _is_root(self, i: Instruction, least_bytes: int) -> bool:
        types, y = self.program.types, self.program.types[i.outputs[0]]
        if y.partial or y.max_bytes(self.program.mesh) <= least_bytes or any(types[v].halos for v in i.inputs):
            return False
        x = types[i.inputs[0]]
        sizes = zip(x.shape.names, x.max_sizes(self.program.mesh), strict=True)
        return self._grows(i) and math.prod(s for n, s in sizes if n not in y.shape.names) <= MOST_SUMMED

    def _is_large(self, i: Instruction) -> bool:
        """Whether a contract, map or uniform random numbers make a value of a root's dims, and it may be repeated."""
        if len(i.outputs) != 1 or self.dims_of(i.outputs[0]) not in self.keys or i.outputs[0] in self.left_alone:
            return False
        if isinstance(i.attrs, Contract):
            return i.outputs[0] in self.roots
        if isinstance(i.attrs, Random):
            return i.attrs.distribution == "uniform"
        return isinstance(i.attrs, Map) and bool(i.inputs) and not self.program.types[i.outputs[0]].partial

    def _is_mask(self, i: Instruction) -> bool:
        """A cheap map that is larger than its inputs, over some of the dims of rematerialised values."""
        if not isinstance(i.attrs, Map) or len(i.outputs) != 1 or not i.inputs:
            return False
        y = self.program.types[i.outputs[0]]
        part = any(set(y.local_dims) < set(key) for key in self.keys)
        return part and not y.partial and i.attrs.expr.flops <= MASK_FLOPS and self._grows(i)

    def _store_what_others_need(self) -> None:
        """Values used by what cannot be in a tiled region are stored, and so are those they need."""
        stored = fetched(self.program)
        useful: set[int] = set()  # masks that others need
        for i in reversed(self.program.instructions):
            makes = next((v for v in i.outputs if v in self.makers), None)
            kept = makes is not None and makes not in stored and (makes not in self.masks or makes in useful)
            if makes is not None and not kept:
                stored.add(makes)
            for v in i.inputs:
                if v in self.makers:
                    fits = kept or (v not in self.masks and self._can_be_member(i))
                    (useful if fits else stored).add(v)
        self.makers = {v: i for v, i in self.makers.items() if v not in stored}
        self.masks = {v: None for v in self.masks if v not in stored}

    def _can_be_member(self, i: Instruction) -> bool:
        types = self.program.types
        plain = not any(types[v].halos or types[v].partial for v in i.inputs)
        return isinstance(i.attrs, (Reduce, Contract)) and plain


def _weights(program: Program) -> set[int]:
    """Values that depend on variables only; for membership tests."""
    out: set[int] = set()
    for i in program.instructions:
        if isinstance(i.attrs, Read) or (i.inputs and all(v in out for v in i.inputs)):
            out.update(i.outputs)
    return out


@dataclass
class Group:
    """Members of one tiled region, by their position in the program: none depends on another through one outside.

    A group runs as a whole, so each of its results waits for what any of its members needs.
    """

    bit: int
    dims: tuple[LocalDim, ...]  # of its rematerialised values, sorted
    members: dict[int, Instruction] = field(default_factory=dict[int, Instruction])
    made: dict[int, None] = field(default_factory=dict[int, None])  # by members
    recipes: dict[int, None] = field(default_factory=dict[int, None])  # rematerialised values that members need
    roots: dict[int, None] = field(default_factory=dict[int, None])  # those of them that contracts make
    used: dict[int, None] = field(default_factory=dict[int, None])  # all values that its region reads or makes
    shared: tuple[LocalDim, ...] | None = None  # dims of all results that other members use
    needs: int = 0  # bits of the groups whose results its members need, without those in between
    needed_by: int = 0  # bits of the groups that need its results, directly or through others

    def with_leaves(self, program: Program, leaves: Iterable[int]) -> tuple[LocalDim, ...] | None:
        """`shared` when a member with these inputs joins."""
        shared = self.shared
        for v in leaves:
            if v in self.made:
                dims = program.types[v].local_dims
                shared = tuple(d for d in (self.dims if shared is None else shared) if d in dims)
        return shared


class Grouping:
    """Assigns what uses rematerialised values to groups, in program order."""

    def __init__(self, program: Program, again: Rematerialised):
        self.program, self.again = program, again
        self.groups: list[Group] = []
        self._maker: dict[int, Group] = {}  # value -> the group that makes it
        self._takers: dict[int, dict[int, Group]] = {}  # rematerialised value -> the groups that compute it
        self.after: dict[int, int] = {}  # value -> bits of the groups that it depends on
        for n, i in enumerate(program.instructions):
            if any(v in again.makers for v in i.outputs):
                continue
            group = self._of_user(n, i) if any(v in again.makers for v in i.inputs) else None
            group = group or self._of_row_map(n, i)
            bits = group.bit if group else 0
            bits |= self._groups_behind(self._leaves(i.inputs)[0])
            self.after.update((v, bits) for v in i.outputs)
        self._outside = fetched(program)  # needed by what is in no group
        self._users: dict[int, int] = {}  # value -> bits of the groups that use it
        grouped = {n for g in self.groups for n in g.members}
        for n, i in enumerate(program.instructions):
            if n not in grouped and not any(v in again.makers for v in i.outputs):
                self._outside.update(i.inputs)
        for g in self.groups:
            for i in (*g.members.values(), *(again.makers[v] for v in g.recipes)):
                for v in i.inputs:
                    self._users[v] = self._users.get(v, 0) | g.bit

    def outputs(self, g: Group) -> tuple[int, ...]:
        """What others use of what the members of a group make."""
        return tuple(v for v in g.made if v in self._outside or self._users.get(v, 0) & ~g.bit)

    def _leaves(self, values: Iterable[int]) -> tuple[dict[int, None], dict[int, None]]:
        """The stored values that these are made of, and the rematerialised ones on the way."""
        stored, passed = dict[int, None](), dict[int, None]()
        todo = list(values)
        while todo:
            v = todo.pop()
            if v in passed or v in stored:
                continue
            if v in self.again.makers:
                passed[v] = None
                todo.extend(self.again.makers[v].inputs)
            else:
                stored[v] = None
        return stored, passed

    def _may_join(self, g: Group, used: Iterable[int], leaves: Iterable[int]) -> bool:
        """Whether no leaf waits for the group, directly or by another, and all its values are in the same blocks."""
        leaves = list(leaves)
        if any(self.after.get(v, 0) & g.bit and v not in g.made for v in leaves):
            return False
        if self._groups_behind(leaves) & g.needed_by or g.with_leaves(self.program, leaves) == ():
            return False
        return held_differently(self.program.types[v] for v in (*g.used, *used)) is None

    def _groups_behind(self, leaves: Iterable[int]) -> int:
        """Bits of the groups that make these values, or what these values are made of."""
        bits = 0
        for v in leaves:
            bits |= self.after.get(v, 0)
        return bits

    def _of_user(self, n: int, i: Instruction) -> Group:
        leaves, recipes = self._leaves(i.inputs)
        used = (*leaves, *recipes, *i.outputs)
        dims = next(d for v in recipes for d in [self.again.dims_of(v)] if d in self.again.keys)
        # A mask may be that of all layers and says nothing of who belongs together.
        related = [h for v in recipes if v not in self.again.masks for h in self._takers.get(v, {}).values()]
        for g in self._latest_first([*related, *self._makers(leaves)]):
            if g.dims == dims and self._may_join(g, used, leaves):
                break
        else:
            g = Group(1 << len(self.groups), dims)
            self.groups.append(g)
        g.recipes.update(recipes)
        for v in recipes:
            self._takers.setdefault(v, {})[g.bit] = g
        g.roots.update((v, None) for v in recipes if v in self.again.roots)
        self._take(g, n, i, leaves)
        return g

    def _of_row_map(self, n: int, i: Instruction) -> Group | None:
        """Maps over rows of a group's results belong to it: later members may need them."""
        if not isinstance(i.attrs, Map) or len(i.outputs) != 1:
            return None
        dims = self.program.types[i.outputs[0]].local_dims
        for g in self._latest_first(self._makers(i.inputs)):
            rows = set(dims) < set(g.dims)
            aligned = all(self.program.types[v].local_dims == dims or v not in g.made for v in i.inputs)
            if rows and aligned and dims and self._may_join(g, i.inputs, i.inputs):
                self._take(g, n, i, i.inputs)
                return g
        return None

    def _makers(self, values: Iterable[int]) -> list[Group]:
        return [self._maker[v] for v in values if v in self._maker]

    @staticmethod
    def _latest_first(groups: Iterable[Group]) -> list[Group]:
        return sorted({g.bit: g for g in groups}.values(), key=lambda g: -g.bit)

    def _take(self, g: Group, n: int, i: Instruction, leaves: Iterable[int]) -> None:
        leaves = list(leaves)
        g.shared = g.with_leaves(self.program, leaves)
        self._need(g, self._groups_behind(leaves) & ~g.bit)
        g.members[n] = i
        g.made.update(dict.fromkeys(i.outputs))
        self._maker.update(dict.fromkeys(i.outputs, g))
        g.used.update(dict.fromkeys((*self._leaves(i.inputs)[1], *leaves, *i.outputs)))

    def _need(self, g: Group, bits: int) -> None:
        """Notes that the group needs the groups of ``bits``, and so do all that need it."""
        if not (bits := bits & ~g.needs):
            return
        g.needs |= bits
        for h in self.groups:
            if (h.bit | h.needed_by) & bits:
                h.needed_by |= g.bit | g.needed_by
