"""Which instructions become one tiled region: groups of what uses wide values.

Members of one group are instructions that use wide values, and maps of their results over rows, so
that none depends on another through an instruction outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshmpi.compiler.passes.wide import WideValues
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.types import LocalDim, held_differently


@dataclass
class Group:
    """Members of one tiled region, by their position in the program.

    Attributes:
        members: Position -> instruction.
        made: Values that members make.
        recipes: Wide values that members need.
        roots: Those of them that contracts make.
        used: All values that its region reads or makes.
        dims: Dims of its wide values, sorted.
        shared: Dims of all results that other members use; None before there are any.
        needs: Bits of the groups whose results its members need, without those in between.
        needed_by: Bits of the groups that need its results, directly or through others: a group
            runs as a whole, so each of its results waits for what any of its members needs.
    """

    bit: int
    dims: tuple[LocalDim, ...]
    members: dict[int, Instruction] = field(default_factory=dict[int, Instruction])
    made: dict[int, None] = field(default_factory=dict[int, None])
    recipes: dict[int, None] = field(default_factory=dict[int, None])
    roots: dict[int, None] = field(default_factory=dict[int, None])
    used: dict[int, None] = field(default_factory=dict[int, None])
    shared: tuple[LocalDim, ...] | None = None
    needs: int = 0
    needed_by: int = 0

    def with_leaves(self, program: Program, leaves: Iterable[int]) -> tuple[LocalDim, ...] | None:
        """`shared` when a member with these inputs joins."""
        shared = self.shared
        for v in leaves:
            if v in self.made:
                dims = program.types[v].local_dims
                shared = tuple(d for d in (self.dims if shared is None else shared) if d in dims)
        return shared


class Grouping:
    """Assigns what uses wide values to groups, in program order.

    Attributes:
        groups: In the order of their first members.
        attempts: Groups that an instruction was tried with, a measure of the work.
    """

    def __init__(self, program: Program, wide: WideValues):
        self.program, self.wide, self.attempts = program, wide, 0
        self.groups: list[Group] = []
        self._maker: dict[int, Group] = {}  # value -> the group that makes it
        self._takers: dict[int, dict[int, Group]] = {}  # wide value -> the groups that compute it
        self.after: dict[int, int] = {}  # value -> bits of the groups that it depends on
        for n, i in enumerate(program.instructions):
            if any(v in wide.makers for v in i.outputs):
                continue
            group = self._of_user(n, i) if any(v in wide.makers for v in i.inputs) else None
            group = group or self._of_row_map(n, i)
            bits = group.bit if group else 0
            bits |= self._groups_behind(self._leaves(i.inputs)[0])
            self.after.update((v, bits) for v in i.outputs)

    def _leaves(self, values: Iterable[int]) -> tuple[dict[int, None], dict[int, None]]:
        """The narrow values that these are made of, and the wide ones on the way."""
        narrow, wide = dict[int, None](), dict[int, None]()
        todo = list(values)
        while todo:
            v = todo.pop()
            if v in wide or v in narrow:
                continue
            if v in self.wide.makers:
                wide[v] = None
                todo.extend(self.wide.makers[v].inputs)
            else:
                narrow[v] = None
        return narrow, wide

    def _may_join(self, g: Group, used: Iterable[int], leaves: Iterable[int]) -> bool:
        """Whether the group can still run as one tiled region with these values.

        No leaf waits for it, directly or by a group; and all its values are in the same blocks.
        """
        leaves = list(leaves)
        self.attempts += 1
        if any(self.after.get(v, 0) & g.bit and v not in g.made for v in leaves):
            return False
        if self._groups_behind(leaves) & g.needed_by:
            return False
        if g.with_leaves(self.program, leaves) == ():
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
        dims = next(d for v in recipes for d in [self.wide.dims_of(v)] if d in self.wide.keys)
        # A mask may be that of all layers and says nothing of who belongs together.
        related = [h for v in recipes if v not in self.wide.masks for h in self._takers.get(v, {}).values()]
        for g in self._latest_first([*related, *self._makers(leaves)]):
            if g.dims == dims and self._may_join(g, used, leaves):
                break
        else:
            g = Group(1 << len(self.groups), dims)
            self.groups.append(g)
        g.recipes.update(recipes)
        for v in recipes:
            self._takers.setdefault(v, {})[g.bit] = g
        g.roots.update((v, None) for v in recipes if v in self.wide.roots)
        self._take(g, n, i, leaves)
        return g

    def _of_row_map(self, n: int, i: Instruction) -> Group | None:
        """Maps over rows of a group's results belong to it: later members may need them."""
        if i.kind != "map" or len(i.outputs) != 1:
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
        g.made.update((v, None) for v in i.outputs)
        self._maker.update((v, g) for v in i.outputs)
        g.used.update((v, None) for v in (*self._leaves(i.inputs)[1], *leaves, *i.outputs))

    def _need(self, g: Group, bits: int) -> None:
        """Notes that the group needs the groups of ``bits``, and so do all that need it."""
        if not (bits := bits & ~g.needs):
            return
        g.needs |= bits
        for h in self.groups:
            if (h.bit | h.needed_by) & bits:
                h.needed_by |= g.bit | g.needed_by
