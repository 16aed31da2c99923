"""fused on NumPy: its instructions one after the other, inner values in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.ir.kinds.regions import Fused, region_types
from meshmpi.ir.program import Instruction
from meshmpi.kernels.binding import Arrays, Bound, Call, Operand, Plan, Runtime, Scratch, Slot, run_all


class FusedPlan(Plan):
    """Runs the body of a fused kernel; the meaning that generated code must keep."""

    def __init__(self, call: Call, plan_of: Callable[[Call], Plan]):
        self.call = call
        fused = call.of(Fused)
        inner = fused.inner
        known = {x.value: x for x in (*call.inputs, *call.outputs)}
        inside = replace(call.program, types=region_types(call.instruction, call.program))
        known.update((v, call.operand(v, t)) for v, t in inner.items())
        scratch = Scratch()
        self.slots = scratch_slots(fused.body, inner, known, scratch)
        self.own_bytes = scratch.bytes
        self.steps: list[tuple[Call, Plan]] = []
        for i in fused.body:
            ins, outs = (tuple(known[v] for v in vs) for vs in (i.inputs, i.outputs))
            one = Call(i, ins, outs, inside, call.coordinates, call.ranges)
            self.steps.append((one, plan_of(one)))

    @property
    def workspace_bytes(self) -> int:
        return self.own_bytes + max(p.workspace_bytes for _, p in self.steps)

    def bind(self, ins: Arrays, outs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        arrays = dict(zip(self.call.instruction.inputs, ins, strict=True))
        arrays.update(zip(self.call.instruction.outputs, outs, strict=True))
        for v, slot in self.slots.items():
            arrays[v] = slot.array(workspace)
        rest = workspace[self.own_bytes :]
        bound = [
            plan.bind(
                [arrays[v] for v in c.instruction.inputs], [arrays[v] for v in c.instruction.outputs], rest, runtime
            )
            for c, plan in self.steps
        ]
        return run_all(bound)


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
