"""Variables change after everything that other ranks take part in.

A rank that is lost before that leaves the variables of all others as they were before the step;
one that is lost later is not needed any more to end it.  So the survivors never hold parts of two
steps.  Values do not change, but gradients wait in memory for the last reduction.
"""

from __future__ import annotations

from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.ir.program import Program

_COMMUNICATING = (*COLLECTIVES, "wait")


def write_last(program: Program) -> Program:
    """Moves what computes new values of variables behind the last collective, with the writes.

    New values often take the place of the old ones in memory, so that computing them is writing.
    What a collective needs stays where it is.
    """
    instructions = program.instructions
    written = {i.inputs[0] for i in instructions if i.kind == "write"}
    made: set[int] = set()  # by what is moved
    late: list[bool] = []
    needed = _needed_by_collectives(program)
    for i in instructions:
        moved = i.kind not in (*_COMMUNICATING, "feed", "read") and needed.isdisjoint(i.outputs)
        moved = moved and (i.kind == "write" or not (written.isdisjoint(i.outputs) and made.isdisjoint(i.inputs)))
        late.append(moved)
        if moved:
            made.update(i.outputs)
    last = max((n for n, i in enumerate(instructions) if i.kind in _COMMUNICATING), default=-1)
    order = [
        *(i for n, i in enumerate(instructions) if n <= last and not late[n]),
        *(i for n, i in enumerate(instructions) if n > last or late[n]),
    ]
    return program.with_instructions(order, program.types)


def _needed_by_collectives(program: Program) -> set[int]:
    """Values that a collective takes, directly or through other instructions."""
    needed: set[int] = set()
    for i in reversed(program.instructions):
        if i.kind in _COMMUNICATING or not needed.isdisjoint(i.outputs):
            needed.update(i.inputs)
    return needed
