"""Chooses where a pending sum is completed: the placement that moves the fewest bytes.

A sum may stay pending through every linear operation, and completing a value costs its bytes, so the cheapest set of
values to complete is a minimum cut. Source: max-flow/min-cut (Ford and Fulkerson 1956); the formulation is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshmpi.compiler.passes.maxflow import UNLIMITED, Edge, minimum_cut
from meshmpi.compiler.passes.rewrite import fetched, fresh, only_user, producers, substituted, users
from meshmpi.dims import Axes
from meshmpi.ir.kinds import AllReduce, LocalSlice, Map, ReduceScatter
from meshmpi.ir.program import Instruction, Program


def place_reductions(program: Program) -> Program:
    """Moves and merges all_reduces of sums so that the fewest bytes are reduced."""
    for axes in dict.fromkeys(map(_sum_over, program.instructions)):
        if axes and (region := _Region(program, axes)).values:
            program = _rewrite(program, axes, region, region.cut())
    return _merge_chains(program)


def _sum_over(i: Instruction) -> Axes:
    """The axes over which the instruction finishes a sum; none where it does not."""
    return i.attrs.axes if isinstance(i.attrs, AllReduce) and i.attrs.op == "sum" and len(i.inputs) == 1 else ()


class _Region:
    """The values that could stay pending over ``axes``."""

    def __init__(self, program: Program, axes: Axes):
        self.program, self.axes = program, axes
        self.values: dict[int, None] = {}
        self.sources: list[int] = []
        self.joint: dict[int, tuple[int, ...]] = {}  # value -> pending inputs of what makes it
        for i in program.instructions:
            if _sum_over(i) == axes and program.types[i.inputs[0]].partial == axes:
                self.sources.append(i.outputs[0])
                self.values[i.outputs[0]] = None
                continue
            pending = tuple(dict.fromkeys(v for v in i.inputs if v in self.values))
            if pending and passes_through(program, i, pending, axes):
                for v in i.outputs:
                    self.values[v] = None
                    self.joint[v] = pending

    def cut(self) -> set[int]:
        """Values to finish; for membership tests only.

        A value is an edge from where it arises to where it is used, which costs what finishing it
        does; nothing becomes pending again.  What makes a value takes all of its inputs pending or
        none, and the value arises as they leave: these nodes are one.
        """
        start, end = -1, -2  # value v arises at node 2 v and is used at node 2 v + 1
        edges: list[Edge] = [(start, 2 * v, UNLIMITED, 0) for v in self.sources]
        used, kept, once = users(self.program), fetched(self.program), only_user(self.program)
        for v in self.values:
            edges.append((2 * v, 2 * v + 1, self._cost(v, once.get(v)), UNLIMITED))
            if v in kept or any(not any(w in self.joint for w in u.outputs) for u in used[v]):
                edges.append((2 * v + 1, end, UNLIMITED, 0))
        same = [(2 * x + 1, 2 * v) for v, pending in self.joint.items() for x in pending]
        side = minimum_cut(edges, same, start, end)
        return {v for v in self.values if 2 * v in side and 2 * v + 1 not in side}

    def _cost(self, v: int, user: Instruction | None) -> int:
        """Bytes to finish v (half where a reduce_scatter will do), then, far smaller, a message."""
        n = self.program.types[v].max_bytes(self.program.mesh)
        cut = None if user is None else user.attrs
        halves = 1 if isinstance(cut, LocalSlice) and set(cut.axes) <= set(self.axes) else 2
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
        elif is_source or not any(v in pending_now for v in i.inputs):
            out.append(i)
        else:
            renamed = {v: number + k for k, v in enumerate(i.outputs)}
            number += len(renamed)
            for v, p in renamed.items():
                partial = program.mesh.in_mesh_order((*types[v].partial, *axes))
                types[p] = replace(types[v], partial=partial, pending="sum")
            out.append(substituted(i, pending_now).replaced(outputs=tuple(renamed.values())))
            finish = AllReduce(axes, "sum")
            out += [Instruction(finish, (p,), (v,), i.source) for v, p in renamed.items() if v in cut]
            pending_now.update((v, p) for v, p in renamed.items() if v not in cut)
    return program.with_instructions(out, types)


def _merge_chains(program: Program) -> Program:
    """all_reduce of an all_reduce over other axes, used by nothing else -> one over both."""
    once, made = only_user(program), producers(program)
    merged: dict[int, tuple[int, Axes]] = {}
    dropped: set[int] = set()
    for i in program.instructions:
        if not (axes := _sum_over(i)):
            continue
        (y,) = i.inputs
        inner, x = _sum_over(made[y]), next(iter(made[y].inputs), y)
        if y in merged:
            x, inner = merged[y]
        if inner and y in once:
            merged[i.outputs[0]] = x, program.mesh.in_mesh_order((*inner, *axes))
            dropped.add(y)
    out: list[Instruction] = []
    for i in program.instructions:
        if i.outputs and i.outputs[0] in merged:
            x, axes = merged[i.outputs[0]]
            i = i.replaced(inputs=(x,), attrs=AllReduce(axes, "sum"))
        if not i.outputs or i.outputs[0] not in dropped:
            out.append(i)
    return program.with_instructions(out)


# ---- reduce only what is kept: all_reduce followed by take_shard becomes reduce_scatter -----------


def shard_early(program: Program) -> Program:
    """Takes blocks before a map instead of after it, where only the blocks are used.

    Computes less, and brings take_shard next to the all_reduce it belongs to.  From the end to the
    beginning, so that a block passes through a chain of maps at once.
    """
    once, made = only_user(program), producers(program)
    types, number = dict(program.types), fresh(program)
    moved: dict[int, tuple[Instruction, LocalSlice]] = {}  # value of a map -> the take_shard behind it
    out: list[Instruction] = []
    for i in reversed(program.instructions):
        takes: list[tuple[Instruction, LocalSlice]] = []
        if isinstance(i.attrs, Map) and i.outputs[0] in moved:
            (take, cut), inputs = moved[i.outputs[0]], list[int]()
            for v in i.inputs:
                if types[v].shape.find(cut.dim) >= 0:
                    types[number] = cut.result(program.mesh, types[v])
                    takes.append((take.replaced(inputs=(v,), outputs=(number,)), cut))
                    v, number = number, number + 1
                inputs.append(v)
            out.append(i.replaced(inputs=tuple(inputs), outputs=take.outputs))
        elif isinstance(i.attrs, LocalSlice):
            takes = [(i, i.attrs)]
        else:
            out.append(i)
        for take, cut in reversed(takes):
            x = take.inputs[0]
            source = made[x]
            passes = isinstance(source.attrs, Map) and len(source.outputs) == 1 and bool(source.inputs)
            if passes and x in once:
                moved[x] = take, cut
            else:
                out.append(take)
    return program if not moved else program.with_instructions(out[::-1], types)


def form_reduce_scatter(program: Program) -> Program:
    """all_reduce whose only use is one take_shard over some of its axes -> reduce_scatter.

    Axes of the reduction beyond those of the take_shard are reduced on the block that is left.
    """
    once = only_user(program)
    types, number = dict(program.types), fresh(program)
    out: list[Instruction] = []
    replaced: dict[int, tuple[Instruction, AllReduce]] = {}
    for i in program.instructions:
        if isinstance(i.attrs, LocalSlice) and i.inputs[0] in replaced:
            (first, reduction), cut = replaced.pop(i.inputs[0]), i.attrs
            rest = tuple(a for a in reduction.axes if a not in cut.axes)
            scatter = ReduceScatter(cut.dim, cut.axes, reduction.op)
            target = i.outputs[0] if not rest else number
            types[target] = scatter.result(program.mesh, types[first.inputs[0]])
            out.append(Instruction(scatter, first.inputs, (target,), first.source))
            if rest:
                number += 1
                out.append(Instruction(AllReduce(rest, scatter.op), (target,), i.outputs, first.source))
            continue
        if isinstance(i.attrs, AllReduce) and len(i.outputs) == 1 and i.outputs[0] in once:
            cut = once[i.outputs[0]].attrs
            if isinstance(cut, LocalSlice) and set(cut.axes) <= set(i.attrs.axes):
                replaced[i.outputs[0]] = i, i.attrs
                continue
        out.append(i)
    return program.with_instructions(out, types)
