"""Schedules reductions: packs many small ones into one message, overlaps large ones with computation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from meshmpi.compiler.passes.rewrite import fresh
from meshmpi.dims import Axes
from meshmpi.ir.collective_bytes import REDUCED_IN
from meshmpi.ir.kinds import AllReduce, Wait
from meshmpi.ir.program import Instruction, Program

SMALLEST_BYTES = 64 * 2**10
"""Shorter messages are not worth a second instruction.  Status: assumption."""
MESSAGE_BYTES = 16 * 2**20
"""Largest combined message.  Measured: longer ones are cut into pieces of this size anyway."""
ALONE_BYTES = 4 * 2**20
"""From here on a value travels alone: copying it costs more than a message saves.
Status: measured on two ranks of one machine (4 MB: 0.7 ms to reduce, 5 us per message)."""

Place = tuple[int, ...]
"""Where an instruction comes to stand: places are sorted.  The n-th of the program stands at (n, 0),
what is put before it at (n, -1, ...), what follows on another at that one's place and more numbers."""
Key = tuple[Axes, str, str]
"""Axes, op and data type: reductions with the same ones can share a message."""


def combine(program: Program, alone_bytes: int = ALONE_BYTES) -> Program:
    """Delays an all_reduce until its result is needed and sends those that wait together.

    Only reductions over the same axes, with the same op and data type, share a message.  Those over
    axes of one rank send none, and are not copied into one.
    """
    out: list[Instruction] = []
    waiting: dict[Key, _Message] = {}
    key_of: dict[int, Key] = {}  # value -> the message that brings it

    def flush(key: Key) -> None:
        message = waiting.pop(key)
        out.append(_joined(message.parts))
        for part in message.parts:
            for v in part.outputs:
                del key_of[v]

    for i in program.instructions:
        if wanted := {key_of[v]: None for v in i.inputs if v in key_of}:
            for key in [k for k in waiting if k in wanted]:
                flush(key)
        sent = isinstance(i.attrs, AllReduce) and program.mesh.count(i.attrs.axes) > 1
        size = sum(program.types[v].max_bytes(program.mesh) for v in i.inputs) if sent else 0
        if not sent or size >= alone_bytes:
            out.append(i)
            continue
        key = (i.of(AllReduce).axes, i.of(AllReduce).op, program.types[i.inputs[0]].dtype)
        if key in waiting and waiting[key].size + size > MESSAGE_BYTES:
            flush(key)
        message = waiting.setdefault(key, _Message())
        message.parts.append(i)
        message.size += size
        key_of.update(dict.fromkeys(i.outputs, key))
    for key in list(waiting):
        flush(key)
    return program.with_instructions(out)


@dataclass
class _Message:
    """Reductions that wait for each other, and their bytes."""

    parts: list[Instruction] = field(default_factory=list[Instruction])
    size: int = 0


def _joined(group: list[Instruction]) -> Instruction:
    if len(group) == 1:
        return group[0]
    inputs = tuple(v for i in group for v in i.inputs)
    outputs = tuple(v for i in group for v in i.outputs)
    return group[-1].replaced(inputs=inputs, outputs=outputs)


def overlap(program: Program) -> Program:
    """Starts large all_reduces early and waits for them late.

    An `all_reduce` becomes one that only starts (attribute ``start``) as soon as its inputs are made, and a `wait` in
    front of the first instruction that uses its results.  In a training step these are the gradients' reductions: each
    runs during the rest of the backward pass.  Values do not change.  Whether it pays depends on the network.

    A reduction with nothing to compute between its inputs and its first use stays as it is; so do
    those of data types that are reduced in another one, whose messages need scratch memory.
    """
    types, number, end = dict(program.types), fresh(program), len(program.instructions)
    placed: dict[Place, Instruction] = {(n, 0): i for n, i in enumerate(program.instructions)}
    made: dict[int, Place] = {v: place for place, i in placed.items() for v in i.outputs}
    first_use: dict[int, int] = {}
    for n, i in enumerate(program.instructions):
        for v in i.inputs:
            first_use.setdefault(v, n)
    writes = [n for n, i in enumerate(program.instructions) if not i.outputs]
    work = [0, *itertools.accumulate(int(i.traits.hides_network) for i in program.instructions)]  # before the n-th
    for n, i in enumerate(program.instructions):
        if not isinstance(i.attrs, AllReduce) or not _is_worth_it(program, i, i.attrs):
            continue
        (x,), (y,) = i.inputs, i.outputs
        behind = made[x]
        # What is only fetched is needed before the writes.
        last = first_use[y] if y in first_use else next((w for w in writes if w > n), end)
        if work[last] == work[behind[0] + (behind[1] == 0)]:
            continue
        types[number], made[y] = types[y], (last, -1, n)
        del placed[n, 0]
        placed[(*behind, 1, -n)] = i.replaced(outputs=(number,), start=True)
        placed[made[y]] = Instruction(Wait(i.attrs.axes), (number,), (y,), i.source)
        number += 1
    return program.with_instructions((placed[place] for place in sorted(placed)), types)


def _is_worth_it(program: Program, i: Instruction, a: AllReduce) -> bool:
    if a.start or len(i.inputs) != 1:
        return False
    t = program.types[i.inputs[0]]
    return t.dtype not in REDUCED_IN and t.max_bytes(program.mesh) >= SMALLEST_BYTES
