"""Debug mode: instructions that check what they otherwise take as it is."""

from __future__ import annotations

from meshmpi.compiler.passes.rewrite import producers
from meshmpi.ir.kinds import Lookup
from meshmpi.ir.program import Program


def check_indices(program: Program) -> Program:
    """Every gather and scatter_add refuses an index outside its dim, unless it ``may_miss``."""
    made = producers(program)
    return program.with_instructions(
        i.replaced(checked=made[i.inputs[1]].source.name or "the index")
        if isinstance(i.attrs, Lookup) and not i.attrs.may_miss
        else i
        for i in program.instructions
    )
