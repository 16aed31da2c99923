"""Reduce only what is kept: all_reduce followed by take_shard becomes reduce_scatter."""

from __future__ import annotations

from meshmpi.passes.rewrite import fetched, fresh, producers, users
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.typerules import redistributed


def shard_early(program: Program) -> Program:
    """Takes blocks before a map instead of after it, where only the blocks are used.

    Computes less, and brings take_shard next to the all_reduce it belongs to.
    """
    changed = True
    while changed:
        program, changed = _shard_early_once(program)
    return program


def _shard_early_once(program: Program) -> tuple[Program, bool]:
    used, made, kept_out = users(program), producers(program), fetched(program)
    types, number = dict(program.types), fresh(program)
    moved: dict[int, Instruction] = {}  # value of the map -> the take_shard behind it
    for i in program.instructions:
        if i.kind != "take_shard":
            continue
        source = made[i.inputs[0]]
        one = source.kind == "map" and len(source.outputs) == 1 and len(used[i.inputs[0]]) == 1
        if one and i.inputs[0] not in kept_out and source.inputs:
            moved[i.inputs[0]] = i
    if not moved:
        return program, False
    out: list[Instruction] = []
    gone = {i.outputs[0] for i in moved.values()}
    for i in program.instructions:
        if i.kind == "take_shard" and i.outputs[0] in gone:
            continue
        if i.outputs and i.outputs[0] in moved:
            take = moved[i.outputs[0]]
            inputs: list[int] = []
            for v in i.inputs:
                if types[v].shape.find(take.attrs["dim"]) < 0:
                    inputs.append(v)
                    continue
                types[number] = redistributed(program.mesh, types[v], "take_shard", take.attrs)
                out.append(take.replaced(inputs=(v,), outputs=(number,)))
                inputs.append(number)
                number += 1
            i = i.replaced(inputs=tuple(inputs), outputs=take.outputs)
        out.append(i)
    return program.with_instructions(out, types), True


def form_reduce_scatter(program: Program) -> Program:
    """all_reduce whose only use is one take_shard over some of its axes -> reduce_scatter.

    Axes of the reduction beyond those of the take_shard are reduced on the block that is left.
    """
    used, kept_out = users(program), fetched(program)
    types, number = dict(program.types), fresh(program)
    out: list[Instruction] = []
    replaced: dict[int, Instruction] = {}
    for i in program.instructions:
        if i.kind == "take_shard" and i.inputs[0] in replaced:
            first = replaced.pop(i.inputs[0])
            x: LocalType = types[first.inputs[0]]
            rest = tuple(a for a in first.attrs["axes"] if a not in i.attrs["axes"])
            attrs = {**i.attrs, "op": first.attrs["op"]}
            target = i.outputs[0] if not rest else number
            types[target] = redistributed(program.mesh, x, "reduce_scatter", attrs)
            out.append(Instruction("reduce_scatter", first.inputs, (target,), attrs, first.source))
            if rest:
                number += 1
                attrs = {"axes": rest, "op": first.attrs["op"]}
                out.append(Instruction("all_reduce", (target,), i.outputs, attrs, first.source))
            continue
        if i.kind == "all_reduce" and len(i.outputs) == 1 and i.outputs[0] not in kept_out:
            uses = used[i.outputs[0]]
            takes = len(uses) == 1 and uses[0].kind == "take_shard"
            if takes and all(a in i.attrs["axes"] for a in uses[0].attrs["axes"]):
                replaced[i.outputs[0]] = i
                continue
        out.append(i)
    return program.with_instructions(out, types)
