"""Where a pending sum is finished: the placement that moves the fewest bytes.

A sum may stay pending through everything linear.  For each set of axes, the values that can stay
pending form a network from where sums arise to where finished values are needed; finishing a value
costs its bytes; the cheapest set of values to finish is a minimum cut.  It is therefore never worse
than finishing at once or as late as possible, and reductions that meet in a sum become one.
Source: max-flow/min-cut (Ford and Fulkerson 1956); the formulation is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.compiler.passes.maxflow import UNLIMITED, Network
from meshmpi.compiler.passes.rewrite import fetched, fresh, producers, substituted, users
from meshmpi.dims import Axes
from meshmpi.ir.kinds import AllReduce, LocalSlice
from meshmpi.ir.program import Instruction, LocalType, Program


def place_reductions(program: Program) -> Program:
    """Moves and merges all_reduces of sums so that the fewest bytes are reduced."""
    for axes in _axes_sets(program):
        program = _place(program, axes)
    return _merge_chains(program)


def _axes_sets(program: Program) -> list[Axes]:
    found = [i.of(AllReduce).axes for i in program.instructions if _is_sum(i)]
    return list(dict.fromkeys(found))


def _is_sum(i: Instruction) -> bool:
    return isinstance(i.attrs, AllReduce) and i.attrs.op == "sum" and len(i.inputs) == 1


def _place(program: Program, axes: Axes) -> Program:
    region = _Region(program, axes)
    if not region.values:
        return program
    return _rewrite(program, axes, region, region.cut())


class _Region:
    """The values that could stay pending over ``axes``."""

    def __init__(self, program: Program, axes: Axes):
        self.program, self.axes = program, axes
        self.values: dict[int, None] = {}
        self.sources: list[int] = []
        self.joint: dict[int, tuple[int, ...]] = {}  # value -> pending inputs of what makes it
        for i in program.instructions:
            if _is_sum(i) and i.of(AllReduce).axes == axes and self._arises(i):
                self.sources.append(i.outputs[0])
                self.values[i.outputs[0]] = None
                continue
            pending = tuple(dict.fromkeys(v for v in i.inputs if v in self.values))
            if pending and passes_through(program, i, pending, axes):
                for v in i.outputs:
                    self.values[v] = None
                    self.joint[v] = pending

    def _arises(self, i: Instruction) -> bool:
        return self.program.types[i.inputs[0]].partial == self.axes

    def cut(self) -> set[int]:
        """Values to finish; for membership tests only.

        A value is an edge from where it arises to where it is used, which costs what finishing it
        does; nothing becomes pending again.  What makes a value takes all of its inputs pending or
        none, and the value arises as they leave: these nodes are one.
        """
        net = Network()
        used, kept = users(self.program), fetched(self.program)
        for v in self.values:
            net.edge(("in", v), ("out", v), self._cost(v, used[v], v in kept), UNLIMITED)
            needs_finished = v in kept or any(
                u.kind == "write" or not any(w in self.joint for w in u.outputs) for u in used[v]
            )
            if needs_finished:
                net.edge(("out", v), "end", UNLIMITED)
        for v in self.sources:
            net.edge("start", ("in", v), UNLIMITED)
        for v, pending in self.joint.items():
            for x in pending:
                net.join(("out", x), ("in", v))
        side = net.minimum_cut("start", "end")
        return {v for v in self.values if ("in", v) in side and ("out", v) not in side}

    def _cost(self, v: int, uses: Sequence[Instruction], is_fetched: bool) -> int:
        """Bytes to finish v (half where a reduce_scatter will do), then, far smaller, a message."""
        n = self.program.types[v].max_bytes(self.program.mesh)
        use = uses[0].attrs if len(uses) == 1 and not is_fetched else None
        halves = 1 if isinstance(use, LocalSlice) and set(use.axes) <= set(self.axes) else 2
        return halves * n * _MESSAGES + 1


_MESSAGES = 1 << 20
"""More than the messages of any program: bytes decide, the number of messages breaks ties."""


def passes_through(program: Program, i: Instruction, pending: Sequence[int], axes: Axes) -> bool:
    """Whether i is linear in the pending inputs, so that its result can be pending instead."""
    types = program.types
    marks = [v in pending for v in i.inputs]
    if not i.outputs or any(set(types[v].used_axes) & set(axes) for v in i.outputs):
        return False
    if any(set(types[v].partial) & set(axes) for v in (*i.inputs, *i.outputs)):
        return False
    others = [types[v] for v, m in zip(i.inputs, marks, strict=True) if not m]
    if any(set(t.used_axes) & set(axes) or t.partial for t in others):
        return False
    if any(types[v].dtype not in ("float32", "float64") for v in (*pending, *i.outputs)):
        return False  # rounding each rank's part to a narrow type would lose what a sum keeps
    return i.attrs.linear_in(marks, axes)


def _rewrite(program: Program, axes: Axes, region: _Region, cut: set[int]) -> Program:
    types, number = dict(program.types), fresh(program)
    pending_now: dict[int, int] = {}  # region value left pending -> its pending value
    out: list[Instruction] = []
    sources = set(region.sources)
    for i in program.instructions:
        is_source = bool(i.outputs) and i.outputs[0] in sources
        if is_source and i.outputs[0] not in cut:
            pending_now[i.outputs[0]] = i.inputs[0]
            continue
        if not is_source and any(v in pending_now for v in i.inputs):
            renamed: list[int] = []
            for v in i.outputs:
                types[number] = _pending(program, types[v], axes)
                renamed.append(number)
                number += 1
            out.append(substituted(i, pending_now).replaced(outputs=tuple(renamed)))
            for v, p in zip(i.outputs, renamed, strict=True):
                if v in cut:
                    out.append(Instruction(AllReduce(axes, "sum"), (p,), (v,), i.source))
                else:
                    pending_now[v] = p
            continue
        out.append(i)
    return program.with_instructions(out, types)


def _pending(program: Program, t: LocalType, axes: Axes) -> LocalType:
    partial = program.mesh.in_mesh_order((*t.partial, *axes))
    return LocalType(t.shape, t.dtype, t.splits, partial, "sum")


def _merge_chains(program: Program) -> Program:
    """all_reduce of an all_reduce over other axes, used by nothing else -> one over both."""
    used, made, kept = users(program), producers(program), fetched(program)
    merged: dict[int, tuple[int, Axes]] = {}
    out: list[Instruction] = []
    dropped: set[int] = set()
    for i in program.instructions:
        if not _is_sum(i):
            continue
        x, axes = i.inputs[0], i.of(AllReduce).axes
        if x in merged:
            x, inner = merged[x]
            axes = program.mesh.in_mesh_order((*inner, *axes))
        elif x in made and _is_sum(made[x]):
            axes = program.mesh.in_mesh_order((*made[x].of(AllReduce).axes, *axes))
            x = made[x].inputs[0]
        if x != i.inputs[0] and len(used[i.inputs[0]]) == 1 and i.inputs[0] not in kept:
            merged[i.outputs[0]] = (x, axes)
            dropped.add(i.inputs[0])
    for i in program.instructions:
        if i.outputs and i.outputs[0] in dropped:
            continue
        if i.outputs and i.outputs[0] in merged:
            x, axes = merged[i.outputs[0]]
            i = i.replaced(inputs=(x,), attrs=AllReduce(axes, "sum"))
        out.append(i)
    return program.with_instructions(out)
