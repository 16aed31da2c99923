"""What the memory of a rank holds at its peak: parameters, slots, gradients, activations.

Read off a program and its memory plan; the kinds add up to the plan's total, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshmpi.compiler.passes.memory import MemoryPlan, Sharing, aligned_bytes
from meshmpi.ir.kinds import Write
from meshmpi.ir.program import Program

KINDS: tuple[str, ...] = ("parameters", "slots", "feeds", "gradients", "activations", "gaps", "workspace")
"""Kinds of memory; gaps are bytes of the arena between values."""


def peak_instruction(plan: MemoryPlan) -> int:
    """Number of the (first) instruction during which most of the arena is in use."""
    return max(range(len(plan.live_bytes)), key=plan.live_bytes.__getitem__, default=0)


def memory_by_kind(program: Program, plan: MemoryPlan) -> dict[str, int]:
    """Kind of `KINDS` -> bytes of the rank at the origin at its peak.

    A gradient is what becomes a variable's update by elementwise steps and reductions alone, back
    to the product or sum that made it; activations are all other values that live at the peak.
    """
    origin = dict.fromkeys(program.mesh.names, 0)
    out: dict[str, int] = dict.fromkeys(KINDS, 0)
    for v in program.variables.values():
        kind = "parameters" if v.trainable else "slots"
        out[kind] += aligned_bytes(v.type, program, origin)
    out["feeds"], out["workspace"] = plan.feed_bytes, plan.workspace_bytes
    gradients = gradient_values(program)
    for v in live_values(program, plan, peak_instruction(plan)):
        kind = "gradients" if v in gradients else "activations"
        out[kind] += aligned_bytes(program.types[v], program, origin)
    out["gaps"] = plan.arena_bytes - out["gradients"] - out["activations"]
    return out


def live_values(program: Program, plan: MemoryPlan, at: int) -> list[int]:
    """Values that own bytes of the arena during instruction number ``at``, in order of making."""
    sharing, made = Sharing(program), dict[int, int]()
    ended = dict.fromkeys(program.types, len(program.instructions))
    for n, i in enumerate(program.instructions):
        made.update(dict.fromkeys(i.outputs, n))
        ended.update(dict.fromkeys(sharing.ending[n], n))
    return [v for v in plan.offsets if made[v] <= at <= ended[v]]


def gradient_values(program: Program) -> Mapping[int, None]:
    """Values on the way from the product that makes a gradient to the write of its variable.

    With the shape of a variable only: what is made of them on the way, norms for instance, is
    small.
    """
    makers = {v: i for i in program.instructions for v in i.outputs}
    shapes = [v.type.shape.sizes for v in program.variables.values() if v.trainable]
    open_values = [i.inputs[0] for i in program.instructions if isinstance(i.attrs, Write)]
    seen: dict[int, None] = {}
    while open_values:
        v = open_values.pop()
        if v in seen or program.types[v].shape.sizes not in shapes:
            continue
        maker = makers[v]
        if maker.traits.given:
            continue
        seen[v] = None
        if maker.traits.carries_gradient:
            open_values += maker.inputs
    return seen
