"""A program as a few boxes: consecutive instructions of one scope, with what they send.

Instructions that are not consecutive never share a box, so a box depends only on boxes before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshmpi.ir.kinds import Write
from meshmpi.ir.program import Collective, Instruction, Program

WRITES = "variables are written"
_GRADIENT = re.compile(r"^(.*) \(gradient of (.*)\)$")


@dataclass
class Group:
    """A box of the picture.

    Attributes:
        name: The scope, or what its only instruction is called.
        numbers: Its instructions, in order.
        sent: (kind, axes) -> (count, bytes sent) of its collectives.
        before: Positions of the groups whose values it uses, ascending.
    """

    name: str
    numbers: list[int] = field(default_factory=list)
    sent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)


def scope_of(i: Instruction, depth: int) -> str:
    """The first ``depth`` parts of the scope of an instruction's tensor, marked if it is a gradient.

    Example:
        ``"layer_0/attention/einsum (gradient of ...)"`` at depth 1 is ``"layer_0 (gradient)"``.
    """
    name, mark = i.source.name, ""
    if found := _GRADIENT.match(name):
        name, mark = found[2], " (gradient)"
        while inner := _GRADIENT.match(name):  # a gradient of a gradient
            name = inner[2]
    scope = name.split("/")[:-1][:depth]
    return ("/".join(scope) + mark) if scope else ""


def single(i: Instruction) -> str:
    """What an instruction is called in a picture."""
    short = i.source.name.split("/")[-1] if "(gradient" not in i.source.name else i.source.name
    found = _GRADIENT.match(short)
    name = f"{found[1].split('/')[-1]} (gradient)" if found else short
    return f"{i.kind} {i.attrs.label or name}"


def sent_bytes(i: Instruction, program: Program) -> int:
    """Bytes that the busiest rank sends in a collective."""
    return program.most_bytes_sent(i, program.busiest() if i.traits.by_place else {})


def grouped(program: Program, depth: int | None, numbers: list[int] | None = None) -> list[Group]:
    """The instructions as groups, in order.

    Args:
        program: The program.
        depth: Parts of the scope that tell groups apart; None: every instruction by itself.  What
            is in no scope is grouped by the line that made it, and writes of variables make one
            group.  Groups leave out reads and feeds, and dependences that follow from others.
        numbers: Only these instructions.
    """
    groups: list[Group] = []
    made_by: dict[int, int] = {}
    last = ""
    chosen = range(len(program.instructions)) if numbers is None else numbers
    for n in chosen:
        i = program.instructions[n]
        if depth is not None and i.traits.given:
            continue
        key = f"{n}" if depth is None else _key(i, depth)
        if not groups or key != last:
            groups.append(Group(""))
            last = key
        _join(groups, i, n, program, made_by)
    for g in groups:
        first = program.instructions[g.numbers[0]]
        g.name = single(first) if len(g.numbers) == 1 else _name(first, depth)
    if depth is not None:
        _leave_out_what_follows(groups)
    return groups


def _leave_out_what_follows(groups: list[Group]) -> None:
    """Drops dependences that follow from others: on a group on which another dependence depends already."""
    reached: list[int] = []  # bit p of entry k: group k comes after group p
    for g in groups:
        all_before = 0
        for p in reversed(g.before):
            all_before |= reached[p]
        g.before = [p for p in g.before if not all_before >> p & 1]
        for p in g.before:
            all_before |= reached[p] | 1 << p
        reached.append(all_before)


def _key(i: Instruction, depth: int) -> str:
    """Equal for instructions of one group."""
    return WRITES if isinstance(i.attrs, Write) else scope_of(i, depth) or f"{i.source.file}:{i.source.line}"


def _name(i: Instruction, depth: int | None) -> str:
    if isinstance(i.attrs, Write):
        return WRITES
    line = f"{i.source.file.rsplit('/', 1)[-1]}:{i.source.line}"
    mark = " (gradient)" if _GRADIENT.match(i.source.name) else ""
    return scope_of(i, depth or 0) or f"{line}{mark}"


def _join(groups: list[Group], i: Instruction, n: int, program: Program, made_by: dict[int, int]) -> None:
    g, place = groups[-1], len(groups) - 1
    g.numbers.append(n)
    for v in i.inputs:
        if (maker := made_by.get(v, place)) != place and maker not in g.before:
            g.before.append(maker)
            g.before.sort()
    made_by.update(dict.fromkeys(i.outputs, place))
    if isinstance(i.attrs, Collective):
        key = (i.kind, "+".join(i.attrs.axes))
        count, total = g.sent.get(key, (0, 0))
        g.sent[key] = (count + 1, total + sent_bytes(i, program))


def readable(program: Program, most: int) -> int | None:
    """The largest depth of scopes that needs at most ``most`` boxes; None: single instructions."""
    if len(program.instructions) <= most:
        return None
    deepest = max((i.source.name.count("/") for i in program.instructions), default=0)
    for depth in range(deepest, 0, -1):
        if len(grouped(program, depth)) <= most:
            return depth
    return 1
