"""Cost of a program for its busiest rank or for any rank: FLOP, bytes sent, memory.

Every number follows from instructions and types. The executors account for the same formulas on real arrays, so
predicted and accounted figures agree exactly. They are not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshmpi.compiler.passes.memory import MemoryPlan
from meshmpi.ir.flops import busiest_rank, program_flops
from meshmpi.ir.program import AxesTable, Program


@dataclass(frozen=True)
class Cost:
    """Per step, of one rank; or of each figure the most that any rank has.

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
            f"per rank: {self.flops:.4g} FLOP, {self.bytes_sent:,} bytes sent, {self.peak_memory:,} bytes of memory"
        ]
        for kind, table in self.bytes_by.items():
            for axes, n in table.items():
                lines.append(f"  {kind} over {axes}: {n:,} bytes")
        lines.append("  memory: " + ", ".join(f"{k} {n:,}" for k, n in self.memory.items()))
        return "\n".join(lines)


def bytes_by_collective(program: Program, coordinates: Mapping[str, int] | None = None) -> dict[str, AxesTable]:
    """Kind of collective -> mesh axes -> bytes that one rank sends; None: the rank of `Program.elements_handed`."""
    return program.traffic(lambda i: program.bytes_sent(i, coordinates))


def program_cost(program: Program, plan: MemoryPlan, coordinates: Mapping[str, int] | None = None) -> Cost:
    """Cost of one rank, all of which have this plan; None: the most that any rank computes, and that any sends."""
    at = busiest_rank(program) if coordinates is None else coordinates
    memory = {
        "variables": plan.variable_bytes,
        "feeds": plan.feed_bytes,
        "arena": plan.arena_bytes,
        "workspace": plan.workspace_bytes,
    }
    sent = bytes_by_collective(program, coordinates)
    return Cost(program_flops(program, at), sent, memory)
