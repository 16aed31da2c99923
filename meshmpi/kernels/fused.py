"""fused on NumPy: runs its instructions one after another, with intermediate values in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.ir.kinds.regions import Fused, region_types
from meshmpi.ir.program import Instruction
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, Scratch, Slot
from meshmpi.kernels.steps import Bound, run_all


def plan_fused(call: Call, plan_of: Callable[[Call], Plan]) -> Plan:
    """Runs the body of a fused kernel; the meaning that generated code must keep."""
    fused = call.of(Fused)
    known = {x.value: x for x in (*call.inputs, *call.outputs)}
    known.update((v, call.operand(v, t)) for v, t in fused.inner.items())
    inside = replace(call.program, types=region_types(call.instruction, call.program))
    scratch = Scratch()
    slots = scratch_slots(fused.body, fused.inner, known, scratch)
    plans: list[Plan] = []
    for i in fused.body:
        ins, outs = (tuple(known[v] for v in vs) for vs in (i.inputs, i.outputs))
        plans.append(plan_of(Call(i, ins, outs, inside, call.coordinates, call.ranges)))

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        arrays = {x.value: a for x, a in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)}
        arrays.update((v, slot.array(workspace)) for v, slot in slots.items())
        steps: list[Bound] = []
        for i, plan in zip(fused.body, plans, strict=True):
            ins, outs = ([arrays[v] for v in vs] for vs in (i.inputs, i.outputs))
            steps.append(plan.bind(ins, outs, workspace[scratch.bytes :], runtime))
        return run_all(steps)

    return Plan(bind, scratch.bytes + max(p.workspace_bytes for p in plans))


def scratch_slots(
    body: Sequence[Instruction], inner: Collection[int], known: Mapping[int, Operand], scratch: Scratch
) -> dict[int, Slot]:
    """Places of the inner values; one is taken again after the last instruction that reads it."""
    last = {v: n for n, i in enumerate(body) for v in (*i.outputs, *i.inputs)}
    slots: dict[int, Slot] = {}
    free: dict[int, list[int]] = {}  # bytes -> offsets
    for n, i in enumerate(body):
        for v in (v for v in i.outputs if v in inner):
            x = known[v]
            places = free.get(x.elements * x.dtype.itemsize)
            slots[v] = Slot(places.pop(), x.sizes, x.dtype) if places else scratch.reserve(x.sizes, x.dtype)
        for v in dict.fromkeys((*i.outputs, *i.inputs)):
            if v in slots and last[v] == n:
                x = known[v]
                free.setdefault(x.elements * x.dtype.itemsize, []).append(slots[v].offset)
    return slots
