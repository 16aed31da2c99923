"""Large values between matrix products, as the scores of an attention, live a block at a time.

A *wide* value has the dims of a contract whose result is larger than both its operands and cheap to
compute (few numbers are summed for each), or is a map of such.  Wide values are never stored.  What
uses one becomes a member of a group, and each group becomes a `loop` that computes the wide values
it needs itself, from the narrow values that wide ones are made of: operands of the contracts, row
maxima and row sums of a softmax, keys of random numbers.  So

- scores and weights stay in the cache, and memory grows with the length and not with its square;
- the backward pass computes scores again, since it is another loop;
- nothing here knows attention: any chain of contracts, maps and reductions will do, in any layout.
  Where a sum over mesh axes is needed in between (memory positions that are split), a group ends,
  and the next one computes the scores again.

Members of one group: instructions that use wide values, and maps of their results over rows, so
that none depends on another through an instruction outside.  Which dims a loop walks along, and how
far at a time, is decided in `blocks`; which part of a causal attention is skipped, in `causal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshmpi.passes.blocks import Blocks
from meshmpi.passes.fuse import MAX_INPUTS, fuse, merged_maps
from meshmpi.passes.segments import form_segments
from meshmpi.passes.wide import WideValues
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.scalar import Expr, Step

CACHE_BYTES = 1 << 20
"""Of intermediate values in one iteration, and wide values smaller than this are left alone.
Status: the second-level cache of one core of today's servers; see docs/performance.md."""


def form_loops(program: Program, cache_bytes: int = CACHE_BYTES) -> Program:
    """Replaces the instructions that make and use wide values by loops.

    Args:
        program: After `fuse` and before `form_segments`.
        cache_bytes: For the intermediate values of one iteration.
    """
    left_alone: dict[int, None] = {}  # values that no loop can be formed for
    while True:
        wide = WideValues(program, cache_bytes, left_alone)
        if not wide.makers:
            return program
        groups = _Grouping(program, wide).groups
        loops = [_Loop(program, wide, g, groups, cache_bytes) for g in groups]
        failed = [loop for loop in loops if not loop.blocks.over]
        if not failed:
            return _scheduled(program, wide, loops)
        for g in (loop.group for loop in failed):
            # A group may have maps only, of products that are small themselves.
            kept = g.roots or [v for v in g.recipes if v not in wide.masks]
            left_alone.update((v, None) for v in kept)


@dataclass
class Group:
    """Members of one loop, by their position in the program.

    Attributes:
        members: Position -> instruction.
        made: Values that members make.
        recipes: Wide values that members need.
        roots: Those of them that contracts make.
        dims: Dims of its wide values, sorted.
        shared: Dims of all results that other members use; None before there are any.
    """

    bit: int
    dims: tuple[str, ...]
    members: dict[int, Instruction] = field(default_factory=dict[int, Instruction])
    made: dict[int, None] = field(default_factory=dict[int, None])
    recipes: dict[int, None] = field(default_factory=dict[int, None])
    roots: dict[int, None] = field(default_factory=dict[int, None])
    shared: tuple[str, ...] | None = None

    def with_leaves(self, program: Program, leaves: Iterable[int]) -> tuple[str, ...] | None:
        """`shared` when a member with these inputs joins."""
        shared = self.shared
        for v in leaves:
            if v in self.made:
                names = program.types[v].shape.names
                shared = tuple(n for n in (self.dims if shared is None else shared) if n in names)
        return shared


class _Grouping:
    """Assigns what uses wide values to groups, in program order."""

    def __init__(self, program: Program, wide: WideValues):
        self.program, self.wide = program, wide
        self.groups: list[Group] = []
        self.after: dict[int, int] = {}  # value -> bits of the groups that it depends on
        for n, i in enumerate(program.instructions):
            if any(v in wide.makers for v in i.outputs):
                continue
            group = self._of_user(n, i) if any(v in wide.makers for v in i.inputs) else None
            group = group or self._of_row_map(n, i)
            bits = group.bit if group else 0
            for v in self._leaves(i.inputs)[0]:
                bits |= self.after.get(v, 0)
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

    def _may_join(self, g: Group, leaves: Iterable[int]) -> bool:
        """Whether no leaf depends on the group through an instruction outside."""
        leaves = list(leaves)
        if any(self.after.get(v, 0) & g.bit and v not in g.made for v in leaves):
            return False
        return g.with_leaves(self.program, leaves) != ()

    def _of_user(self, n: int, i: Instruction) -> Group:
        leaves, recipes = self._leaves(i.inputs)
        dims = next(
            d for v in recipes for d in [self.wide.dims_of(v)] if d in self.wide.keys
        )  # fmt: skip
        for g in reversed(self.groups):
            related = any(v in g.recipes for v in recipes) or any(v in g.made for v in leaves)
            if g.dims == dims and related and self._may_join(g, leaves):
                break
        else:
            g = Group(1 << len(self.groups), dims)
            self.groups.append(g)
        g.recipes.update(recipes)
        g.roots.update((v, None) for v in recipes if v in self.wide.roots)
        self._take(g, n, i, leaves)
        return g

    def _of_row_map(self, n: int, i: Instruction) -> Group | None:
        """Maps over rows of a group's results belong to it: later members may need them."""
        if i.kind != "map" or len(i.outputs) != 1:
            return None
        names = self.program.types[i.outputs[0]].shape.names
        for g in reversed(self.groups):
            rows = set(names) < set(g.dims) and any(v in g.made for v in i.inputs)
            aligned = all(self.program.types[v].shape.names == names or v not in g.made
                          for v in i.inputs)  # fmt: skip
            if rows and aligned and names and self._may_join(g, i.inputs):
                self._take(g, n, i, i.inputs)
                return g
        return None

    def _take(self, g: Group, n: int, i: Instruction, leaves: Iterable[int]) -> None:
        g.shared = g.with_leaves(self.program, leaves)
        g.members[n] = i
        g.made.update((v, None) for v in i.outputs)


class _Loop:
    """The loop of a group: its body, and the blocks it runs over."""

    def __init__(
        self, program: Program, wide: WideValues, group: Group, groups: Sequence[Group],
        cache_bytes: int,
    ):  # fmt: skip
        self.program, self.wide, self.group = program, wide, group
        self.types: dict[int, LocalType] = dict(program.types)
        self.next = wide.next_value
        self.own: dict[int, int] = {}  # wide value -> its number in this body
        self.body: list[Instruction] = []
        for i in group.members.values():
            self.body.append(i.replaced(inputs=tuple(self._needed(v) for v in i.inputs)))
        wide.next_value = self.next
        self.last = max(group.members)
        self.outputs = self._outputs([g for g in groups if g is not group])
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

    def _outputs(self, others: Iterable[Group]) -> tuple[int, ...]:
        """What others use of what the members make."""
        used = set(self.program.fetches.values())
        for n, i in enumerate(self.program.instructions):
            wide = any(v in self.wide.makers for v in i.outputs)
            if n not in self.group.members and not wide:
                used.update(i.inputs)
        for g in others:
            used.update(x for v in g.recipes for x in self.wide.makers[v].inputs)
        return tuple(v for v in self.group.made if v in used)

    def _fuse(self) -> None:
        """Maps of the body are fused, and its maps and reductions become segments."""
        for one in (fuse, form_segments):
            p = self.program
            fetches = {str(v): v for v in self.outputs}
            inside = Program(p.mesh, self.types, tuple(self.body), {}, {}, fetches, p.seed)
            self.body = list(one(inside).instructions)

    def instructions(self) -> list[Instruction]:
        """The loop, and what follows it."""
        outputs, after = self._wide_sums()
        inner = {v: self.types[v] for i in self.body for v in i.outputs if v not in outputs}
        inputs = dict.fromkeys(v for i in self.body for v in i.inputs
                               if v not in inner and v not in outputs)  # fmt: skip
        attrs: dict[str, object] = {"over": self.blocks.over}
        if self.blocks.causal:
            attrs["causal"] = self.blocks.causal
        attrs |= {"body": tuple(self.body), "inner": inner}
        source = self.group.members[self.last].source
        return [Instruction("loop", tuple(inputs), outputs, attrs, source), *after]

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
            after.append(Instruction("map", (w,), (v,), {"expr": expr}))
            instead[v] = w
        self.body = [i.replaced(outputs=tuple(instead.get(v, v) for v in i.outputs))
                     for i in self.body]  # fmt: skip
        return tuple(instead.get(v, v) for v in self.outputs), after


def _scheduled(program: Program, wide: WideValues, loops: Sequence[_Loop]) -> Program:
    """Loops where their last member was; what needs their results earlier waits behind them."""
    members = {n for loop in loops for n in loop.group.members}
    ends = {loop.last: loop for loop in loops}
    types = dict(program.types)
    out: list[Instruction] = []
    writes: list[Instruction] = []
    known: set[int] = set()
    waiting: list[list[Instruction]] = []
    for n, i in enumerate(program.instructions):
        if n in ends:
            waiting.append(ends[n].instructions())
            types.update(ends[n].types)
        elif i.kind == "write":
            writes.append(i)
        elif n not in members and not any(v in wide.makers for v in i.outputs):
            waiting.append([i])
        waiting = _emit_ready(waiting, known, out)
    if waiting:
        raise AssertionError("groups that wait for each other")
    return program.with_instructions([*out, *writes], types)


def _emit_ready(
    waiting: list[list[Instruction]], known: set[int], out: list[Instruction]
) -> list[list[Instruction]]:
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
