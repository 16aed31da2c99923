"""segment on NumPy: its instructions one after the other, inner values in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.kernels.binding import Bound, Call, Operand, Plan, Runtime, Scratch, run_all


class SegmentPlan(Plan):
    """Runs the body of a segment; the meaning that generated code must keep.

    Args:
        call: The segment.
        plan_of: Plans one instruction of the body.
    """

    def __init__(self, call: Call, plan_of: Callable[[Call], Plan]):
        self.call = call
        inner, mesh = call.attrs["inner"], call.program.mesh
        known = {x.value: x for x in (*call.inputs, *call.outputs)}
        inside = replace(call.program, types={**call.program.types, **inner})
        scratch = Scratch()
        self.slots = {}
        where = call.coordinates
        for v, t in inner.items():
            known[v] = Operand(v, t, t.block(mesh, where))
            self.slots[v] = scratch.reserve(known[v].sizes, known[v].dtype)
        self.own_bytes = scratch.bytes
        self.steps: list[tuple[Call, Plan]] = []
        for i in call.attrs["body"]:
            ins, outs = (tuple(known[v] for v in vs) for vs in (i.inputs, i.outputs))
            one = Call(i, ins, outs, inside, where)
            self.steps.append((one, plan_of(one)))

    @property
    def workspace_bytes(self) -> int:
        return self.own_bytes + max(p.workspace_bytes for _, p in self.steps)

    def bind(
        self, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], workspace: np.ndarray,
        runtime: Runtime,
    ) -> Bound:  # fmt: skip
        arrays = dict(zip(self.call.instruction.inputs, ins, strict=True))
        arrays.update(zip(self.call.instruction.outputs, outs, strict=True))
        for v, slot in self.slots.items():
            arrays[v] = slot.array(workspace)
        rest = workspace[self.own_bytes :]
        bound = [
            plan.bind([arrays[v] for v in c.instruction.inputs],
                      [arrays[v] for v in c.instruction.outputs], rest, runtime)
            for c, plan in self.steps
        ]  # fmt: skip
        return run_all(bound)
