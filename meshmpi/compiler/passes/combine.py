"""Reductions of many small tensors travel together."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshmpi.dims import Axes
from meshmpi.ir.kinds import AllReduce
from meshmpi.ir.program import Instruction, Program

MESSAGE_BYTES = 16 * 2**20
"""Largest combined message.  Measured: longer ones are cut into pieces of this size anyway."""
ALONE_BYTES = 4 * 2**20
"""From here on a value travels alone: copying it costs more than a message saves.
Status: measured on two ranks of one machine (4 MB: 0.7 ms to reduce, 5 us per message)."""

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
