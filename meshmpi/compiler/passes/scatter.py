"""Reduce only what is kept: all_reduce followed by take_shard becomes reduce_scatter."""

from __future__ import annotations

from meshmpi.compiler.passes.rewrite import fetched, fresh, producers, users
from meshmpi.ir.kinds import AllReduce, LocalSlice, Map, ReduceScatter
from meshmpi.ir.program import Instruction, LocalType, Program


def shard_early(program: Program) -> Program:
    """Takes blocks before a map instead of after it, where only the blocks are used.

    Computes less, and brings take_shard next to the all_reduce it belongs to.  From the end to the
    beginning, so that a block passes through a chain of maps at once.
    """
    uses = {v: len(us) for v, us in users(program).items()}
    made, kept_out = producers(program), fetched(program)
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
            if passes and uses[x] == 1 and x not in kept_out:
                moved[x] = take, cut
            else:
                out.append(take)
    return program if not moved else program.with_instructions(out[::-1], types)


def form_reduce_scatter(program: Program) -> Program:
    """all_reduce whose only use is one take_shard over some of its axes -> reduce_scatter.

    Axes of the reduction beyond those of the take_shard are reduced on the block that is left.
    """
    used, kept_out = users(program), fetched(program)
    types, number = dict(program.types), fresh(program)
    out: list[Instruction] = []
    replaced: dict[int, tuple[Instruction, AllReduce]] = {}
    for i in program.instructions:
        if isinstance(i.attrs, LocalSlice) and i.inputs[0] in replaced:
            (first, reduction), cut = replaced.pop(i.inputs[0]), i.attrs
            x: LocalType = types[first.inputs[0]]
            rest = tuple(a for a in reduction.axes if a not in cut.axes)
            scatter = ReduceScatter(cut.dim, cut.axes, reduction.op)
            target = i.outputs[0] if not rest else number
            types[target] = scatter.result(program.mesh, x)
            out.append(Instruction(scatter, first.inputs, (target,), first.source))
            if rest:
                number += 1
                out.append(Instruction(AllReduce(rest, scatter.op), (target,), i.outputs, first.source))
            continue
        if isinstance(i.attrs, AllReduce) and len(i.outputs) == 1 and i.outputs[0] not in kept_out:
            uses = used[i.outputs[0]]
            cut = uses[0].attrs if len(uses) == 1 else None
            if isinstance(cut, LocalSlice) and set(cut.axes) <= set(i.attrs.axes):
                replaced[i.outputs[0]] = i, i.attrs
                continue
        out.append(i)
    return program.with_instructions(out, types)
