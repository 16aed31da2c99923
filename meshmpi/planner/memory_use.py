"""What the memory of a rank holds while a step runs, by kind, instruction by instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshmpi.compiler.passes.memory import MemoryPlan, Sharing, aligned_bytes
from meshmpi.ir.kinds import Write
from meshmpi.ir.program import Program

KINDS = ("parameters", "slots", "feeds", "gradients", "activations")


@dataclass(frozen=True)
class Use:
    """Bytes of the rank at the origin during each instruction; a program of none has one row of what it keeps.

    Attributes:
        by_kind: Kind of `KINDS` -> bytes during each instruction.
        peak: Number of the first instruction during which most is in use.
        limit: Bytes that are allocated: arena with its gaps, variables, feeds; no workspace.
        workspace: Scratch memory of kernels, which comes on top.
    """

    by_kind: dict[str, list[int]]
    peak: int
    limit: int
    workspace: int

    @property
    def held(self) -> int:
        """All bytes that the rank holds: the plan's total."""
        return self.limit + self.workspace

    def at(self, n: int) -> int:
        """Bytes in use during instruction ``n``."""
        return sum(row[n] for row in self.by_kind.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Kind -> bytes at the peak; with the gaps of the arena between values, and the workspace, all that is held."""
        kinds = {kind: row[self.peak] for kind, row in self.by_kind.items()}
        return {**kinds, "gaps": self.limit - self.at(self.peak), "workspace": self.workspace}


def memory_use(program: Program, plan: MemoryPlan) -> Use:
    """Kind of memory -> bytes during each instruction; their sums are those of the plan.

    A gradient is what becomes a variable's update by elementwise steps and reductions alone, back
    to the product or sum that made it; activations are all other values.
    """
    origin = dict.fromkeys(program.mesh.names, 0)
    n = max(len(program.instructions), 1)
    kept = {"parameters": 0, "slots": 0, "feeds": plan.feed_bytes}
    for v in program.variables.values():
        kept["parameters" if v.trainable else "slots"] += aligned_bytes(v.type, program, origin)
    rows = {kind: [kept.get(kind, 0)] * n for kind in KINDS}
    sharing, gradients = Sharing(program), gradient_values(program)
    living = dict.fromkeys(("gradients", "activations"), 0)
    sizes = {v: aligned_bytes(program.types[v], program, origin) for v in plan.offsets}
    for k, i in enumerate(program.instructions):
        for v in i.outputs:
            living["gradients" if v in gradients else "activations"] += sizes.get(v, 0)
        for kind, held in living.items():
            rows[kind][k] = held
        for v in sharing.ending[k]:
            living["gradients" if v in gradients else "activations"] -= sizes.get(v, 0)
    peak = max(range(n), key=lambda k: sum(r[k] for r in rows.values()))
    held = plan.arena_bytes + plan.variable_bytes + plan.feed_bytes
    return Use(rows, peak, held, plan.workspace_bytes)


def gradient_values(program: Program) -> Mapping[int, None]:
    """Values on the way from the product that makes a gradient to the write of its variable.

    Those with the shape of a variable only: what else is made of them, norms for instance, is small.
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
