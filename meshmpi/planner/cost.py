"""Cost of a program for the rank with the largest blocks: FLOP, bytes sent, memory.

Every number is a property of instructions and types; the executors count the same formulas on real
arrays, so prediction and measurement agree exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshmpi.collective_bytes import bytes_sent, wire_bytes
from meshmpi.flops import local_flops
from meshmpi.passes.memory import MemoryPlan
from meshmpi.program import COLLECTIVES, AxesTable, Program


@dataclass(frozen=True)
class Cost:
    """Per rank and step.

    Attributes:
        flops: Floating-point operations of local instructions.
        bytes_by: Kind of collective -> mesh axes -> bytes this rank sends.
        memory: Kind of memory -> bytes.
    """

    flops: int
    bytes_by: dict[str, AxesTable]
    memory: dict[str, int]

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sends in one step."""
        return sum(n for table in self.bytes_by.values() for n in table.values())

    @property
    def peak_memory(self) -> int:
        """Bytes held at the peak: variables, feeds, arena and workspace."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        lines = [
            f"per rank: {self.flops:.4g} FLOP, {self.bytes_sent:,} bytes sent,"
            f" {self.peak_memory:,} bytes of memory"
        ]
        for kind, table in self.bytes_by.items():
            for axes, n in table.items():
                lines.append(f"  {kind} over {axes}: {n:,} bytes")
        lines.append("  memory: " + ", ".join(f"{k} {n:,}" for k, n in self.memory.items()))
        return "\n".join(lines)


def bytes_by_collective(
    program: Program, coordinates: Mapping[str, int] | None = None
) -> dict[str, AxesTable]:
    """Kind of collective -> mesh axes -> bytes that one rank sends.

    Args:
        program: The program.
        coordinates: Of the rank; None means the largest blocks, and for `shift`
            `Program.busiest`: a rank with neighbours on both sides.
    """
    largest = dict.fromkeys(program.mesh.names, 0) if coordinates is None else coordinates
    busy = program.busiest() if coordinates is None else coordinates
    out: dict[str, AxesTable] = {}
    for i in program.instructions:
        if i.kind in COLLECTIVES:
            table = out.setdefault(i.kind, AxesTable())
            elements = program.elements_handed(i, busy if i.kind == "shift" else largest)
            item = wire_bytes(i.kind, program.types[i.inputs[0]].dtype)
            key = "+".join(i.attrs["axes"])
            n = program.mesh.count(i.attrs["axes"])
            table[key] = table.get(key, 0) + bytes_sent(i.kind, elements, item, n)
    return out


def program_cost(program: Program, plan: MemoryPlan) -> Cost:
    """Cost of ``program``, with the memory plan of the rank whose coordinates are all 0."""
    first = dict.fromkeys(program.mesh.names, 0)
    memory = {
        "variables": plan.variable_bytes,
        "feeds": plan.feed_bytes,
        "arena": plan.arena_bytes,
        "workspace": plan.workspace_bytes,
    }
    total = sum(local_flops(i, program, first) for i in program.instructions)
    return Cost(total, bytes_by_collective(program), memory)
