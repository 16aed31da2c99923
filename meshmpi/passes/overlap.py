"""Reductions travel while other instructions compute.

An `all_reduce` becomes one that only starts (attribute ``start``) as soon as its inputs are made,
and a `wait` in front of the first instruction that uses its results.  In a training step these are
the gradients' reductions: each runs during the rest of the backward pass.  The values do not
change.  Whether this pays depends on the network, so the pass runs only when asked for.
"""

from __future__ import annotations

from meshmpi.collective_bytes import REDUCED_IN
from meshmpi.program import Instruction, LocalType, Program

SMALLEST_BYTES = 64 * 2**10
"""Shorter messages are not worth a second instruction.  Status: assumption."""
COMPUTING = ("contract", "conv", "segment", "map", "reduce", "loop", "gather", "scatter_add")
"""What a message can travel behind."""


def overlap(program: Program) -> Program:
    """Starts large all_reduces early and waits for them late.

    A reduction with nothing to compute between its inputs and its first use stays as it is; so do
    those of data types that are reduced in another one, whose messages need scratch memory.
    """
    out = list(program.instructions)
    types = dict(program.types)
    for i in program.instructions:
        if _is_worth_it(program, i):
            _split(out, types, i)
    return program.with_instructions(out, types)


def _is_worth_it(program: Program, i: Instruction) -> bool:
    if i.kind != "all_reduce" or i.attrs.get("start") or len(i.inputs) != 1:
        return False
    t = program.types[i.inputs[0]]
    return t.dtype not in REDUCED_IN and t.max_bytes(program.mesh) >= SMALLEST_BYTES


def _split(out: list[Instruction], types: dict[int, LocalType], i: Instruction) -> None:
    """Replaces ``i`` in ``out`` by a start and a wait, if there is work between the two."""
    at, (x,), (y,) = out.index(i), i.inputs, i.outputs
    first = max((n for n in range(at) if x in out[n].outputs), default=-1) + 1
    last = next((n for n in range(at + 1, len(out)) if y in out[n].inputs), len(out))
    if last == len(out):  # only fetched: before the writes, which come last
        last = next((n for n in range(at + 1, len(out)) if out[n].kind == "write"), len(out))
    if not any(one.kind in COMPUTING for one in out[first:last]):
        return
    running = max(types) + 1
    types[running] = types[y]
    start = i.replaced(outputs=(running,), attrs={**i.attrs, "start": True})
    wait = Instruction("wait", (running,), (y,), {"axes": i.attrs["axes"]}, i.source)
    out.insert(last, wait)
    del out[at]
    out.insert(first, start)
