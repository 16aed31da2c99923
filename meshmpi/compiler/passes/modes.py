"""Optional modes of a step: `atomic` updates of variables, and what debug mode checks within a rank."""

from __future__ import annotations

from meshmpi.compiler.passes.rewrite import producers
from meshmpi.ir.kinds import LocalFunction, Lookup, Write
from meshmpi.ir.program import Instruction, Program


def write_last(program: Program) -> Program:
    """Moves what computes new values of variables behind the last collective, with the writes.

    New values often take the place of the old ones in memory, so that computing them is writing.  What a collective
    needs stays where it is.  A rank that is lost before the last collective leaves the variables of all others as they
    were before the step; one that is lost later is not needed any more to end it.  So the survivors never hold parts
    of two steps.  Values do not change, but gradients wait in memory for the last reduction.
    """
    instructions = program.instructions
    written = {i.inputs[0] for i in instructions if isinstance(i.attrs, Write)}
    needed = _needed_by_collectives(program)
    made: set[int] = set()  # by what is moved
    late: list[bool] = []
    for i in instructions:
        updates = not i.outputs or not (written.isdisjoint(i.outputs) and made.isdisjoint(i.inputs))
        moved = updates and not (i.traits.meets_ranks or i.traits.given) and needed.isdisjoint(i.outputs)
        late.append(moved)
        if moved:
            made.update(i.outputs)
    last = max((n for n, i in enumerate(instructions) if i.traits.meets_ranks), default=-1)
    behind = [n > last or moved for n, moved in enumerate(late)]
    order = sorted(range(len(instructions)), key=behind.__getitem__)
    return program.with_instructions((instructions[n] for n in order), program.types)


def _needed_by_collectives(program: Program) -> set[int]:
    """Values that a collective takes, directly or through other instructions."""
    needed: set[int] = set()
    for i in reversed(program.instructions):
        if i.traits.meets_ranks or not needed.isdisjoint(i.outputs):
            needed.update(i.inputs)
    return needed


def check_calls(program: Program) -> Program:
    """Every gather and scatter_add refuses an index outside its dim, unless it ``may_miss``; functions are checked."""
    made = producers(program)

    def strict(i: Instruction) -> Instruction:
        if isinstance(i.attrs, Lookup) and not i.attrs.may_miss:
            return i.replaced(checked=made[i.inputs[1]].source.name or "the index")
        return i.replaced(checked=True) if isinstance(i.attrs, LocalFunction) else i

    return program.with_instructions(map(strict, program.instructions))
