"""The instructions of a program as groups by scope, and repeated sequences of groups folded into one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from meshmpi.amounts import amount
from meshmpi.ir.kinds import Write
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.report import masked, scope_of, users_name

WRITES = "variables are written"
UPDATES = "update of variables"


@dataclass
class Group:
    """A box of a picture.

    Attributes:
        name: The scope, else the user's line; # in it stands for numbers that differ between repetitions.
        numbers: Its instructions, in order, those of all repetitions.
        sent: (kind, axes) -> (count, bytes sent) of its collectives.
        before: Positions of the groups whose values it uses, ascending.
        repeats: Number of groups that were folded into this one.
        once: Number of instructions of the first of them; 0: of all.
        section: Number of the repeated sequence that it belongs to; -1: it is not repeated.
    """

    name: str
    numbers: list[int] = field(default_factory=list)
    sent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    repeats: int = 1
    once: int = 0
    section: int = -1

    @property
    def head(self) -> str:
        """The first line of the box."""
        count = f"  ({len(self.numbers)})" if len(self.numbers) > 1 else ""
        return f"{self.name}{count}{f'  x {self.repeats}' if self.repeats > 1 else ''}"

    @property
    def lines(self) -> list[str]:
        """One line for each kind of collective and axes."""
        return [
            f"{f'{count} ' if count > 1 else ''}{kind} {axes}: {amount(total, 'B')}"
            for (kind, axes), (count, total) in self.sent.items()
        ]

    @property
    def is_one_collective(self) -> bool:
        return len(self.numbers) == 1 and bool(self.sent)


def grouped(program: Program, depth: int | None, numbers: Sequence[int] | None = None) -> list[Group]:
    """The instructions as groups, in order.

    Args:
        program: The program.
        depth: Parts of the scope that make groups differ; None: every instruction is a group.  Instructions
            in no scope are grouped by the line that made them; those after the last gradient, and writes
            of variables, make one group each.  Groups leave out reads and feeds, and dependences that
            follow from others.
        numbers: Only these instructions.
    """
    groups: list[Group] = []
    made_by: dict[int, int] = {}
    last, backward = "", _last_gradient(program)
    for n in range(len(program.instructions)) if numbers is None else numbers:
        i = program.instructions[n]
        if depth is not None and i.traits.given:
            continue
        name = _name(i, depth) if depth is None or n <= backward else _after_gradients(i, depth)
        key = f"{n}" if depth is None else name
        if not groups or key != last:
            groups.append(Group(name))
            last = key
        _join(groups, i, n, program, made_by)
    if depth is not None:
        _leave_out_what_follows(groups)
    return groups


def _name(i: Instruction, depth: int | None) -> str:
    """The name of a group; the user's words, as names of tensors such as ``einsum_3`` say nothing."""
    if depth is None:
        return f"{i.kind} {i.attrs.label or users_name(i)}"
    return WRITES if isinstance(i.attrs, Write) else users_name(i, depth)


def _after_gradients(i: Instruction, depth: int) -> str:
    name = _name(i, depth)
    return name if name == WRITES or scope_of(i) else UPDATES


def _last_gradient(program: Program) -> int:
    """Number of the last instruction of a gradient; the number of instructions where nothing is updated."""
    updates = any(isinstance(i.attrs, Write) for i in program.instructions)
    found = [n for n, i in enumerate(program.instructions) if "(gradient of " in i.source.name]
    return found[-1] if updates and found else len(program.instructions)


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


def _join(groups: list[Group], i: Instruction, n: int, program: Program, made_by: dict[int, int]) -> None:
    g, place = groups[-1], len(groups) - 1
    g.numbers.append(n)
    makers = {made_by.get(v, place) for v in i.inputs} - {place}
    g.before = sorted(makers.union(g.before))
    made_by.update(dict.fromkeys(i.outputs, place))
    if isinstance(i.attrs, Collective):
        key = (i.kind, "+".join(i.attrs.axes))
        count, total = g.sent.get(key, (0, 0))
        g.sent[key] = (count + 1, total + program.bytes_sent(i))


def folded(groups: Sequence[Group]) -> list[Group]:
    """The groups, with each repeated sequence of them, such as the layers of a stack, folded into its first.

    Groups are equal if their names without numbers and their collectives' kinds and axes are.  Instructions and
    bytes of the repetitions are added up; dependences between repetitions are left out.
    """
    out, place, section = list[Group](), dict[int, int](), 0
    for start, period, count in repeats([(masked(g.name), *g.sent) for g in groups]):
        for k in range(start, start + period * count):
            g = groups[k]
            if k < start + period:
                fresh = Group(g.name, repeats=count, once=len(g.numbers), section=section if count > 1 else -1)
                out.append(fresh)
            place[k] = at = len(out) - 1 if k < start + period else place[k - period]
            one = out[at]
            one.name = one.name if one.name == g.name else masked(g.name)
            one.numbers += g.numbers
            for key, (n, total) in g.sent.items():
                known = one.sent.get(key, (0, 0))
                one.sent[key] = (known[0] + n, known[1] + total)
            one.before = sorted({*one.before, *(p for b in g.before if (p := place[b]) < at)})
        section += count > 1
    return out


def repeats(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(start, period, count) of sequences that follow each other, and cover all keys once, in order.

    A count above 1 says that the ``period`` keys from ``start`` on are there ``count`` times in a row.  From the
    left, what covers most is taken; of equals that of the shortest period.

    Example:
        >>> repeats("xababy")
        [(0, 1, 1), (1, 2, 2), (5, 1, 1)]
    """
    out, at = list[tuple[int, int, int]](), 0
    while at < len(keys):
        best = (1, 1)
        for period in range(1, (len(keys) - at) // 2 + 1):
            end = at + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            count = (end - at) // period
            if count > 1 and period * count > best[0] * best[1]:
                best = (period, count)
        out.append((at, best[0], best[1]))
        at += best[0] * best[1]
    return out


def readable(program: Program, most: int, single: bool = True) -> int | None:
    """The largest depth of scopes that needs at most ``most`` boxes, folded; None, if ``single``: instructions."""
    if single and len(program.instructions) <= most:
        return None
    deepest = max((i.source.name.count("/") for i in program.instructions), default=0)
    depths = range(deepest, 0 if single else -1, -1)
    return next((d for d in depths if len(folded(grouped(program, d))) <= most), 1)
