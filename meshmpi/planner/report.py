"""A plan as text: what a rank computes, sends and holds, where in the user's code, and how long it takes.

Text only, from programs, costs and predictions; nothing is measured here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from meshmpi.amounts import amount
from meshmpi.compiler.cost import Cost
from meshmpi.compiler.passes.memory import MemoryPlan
from meshmpi.dims import Axes, MeshShape
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.machine import Machine
from meshmpi.planner.memory_use import memory_use
from meshmpi.planner.timing import Prediction, summed

_GRADIENT = re.compile(r"^(.*) \(gradient of (.*)\)$")
GRADIENT = " (gradient)"
"""Mark of a scope whose gradient is computed."""


def scope_of(i: Instruction, depth: int | None = None) -> str:
    """The scope of an instruction's tensor, or its first ``depth`` parts, marked if it is a gradient; empty: none.

    Example:
        ``"layer_0/attention/einsum (gradient of ...)"`` at depth 1 is ``"layer_0 (gradient)"``.
    """
    name, mark = i.source.name, ""
    while found := _GRADIENT.match(name):  # perhaps a gradient of a gradient
        name, mark = found[2], GRADIENT
    scope = name.split("/")[:-1][:depth]
    return ("/".join(scope) + mark) if scope else ""


def users_name(i: Instruction, depth: int | None = None) -> str:
    """What the user calls the place of an instruction: its scope, else its line, marked if it is a gradient."""
    mark = GRADIENT if _GRADIENT.match(i.source.name) else ""
    return scope_of(i, depth) or f"{i.source.short}{mark}"


def masked(name: str) -> str:
    """A name of a scope with # for its numbers, so that the layers of a stack have one; lines keep theirs."""
    return name if ":" in name else re.sub(r"\d+", "#", name)


def sent_by_scope(program: Program) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """(scope, kind, axes, file:line) -> (collectives, bytes sent), most bytes first.

    Numbers in scopes are replaced by #, so that the layers of a stack are one row; a tensor in no scope has an
    empty one.
    """
    out: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for i in program.instructions:
        if not isinstance(i.attrs, Collective):
            continue
        key = (masked(scope_of(i)), i.kind, "+".join(i.attrs.axes), _line(i))
        count, total = out.get(key, (0, 0))
        out[key] = (count + 1, total + program.bytes_sent(i))
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))


def _line(i: Instruction) -> str:
    return f"{os.path.relpath(i.source.file)}:{i.source.line}" if i.source.file else "(no line)"


def memory_lines(program: Program, plan: MemoryPlan) -> list[str]:
    """Memory by kind at the peak, and the scope and line at which it is."""
    use = memory_use(program, plan)
    lines = [
        "memory "
        + ", ".join(f"{kind} {amount(n, 'B')}" for kind, n in use.at_peak.items() if n)
        + f"; in all {plan.total_bytes:,} bytes"
    ]
    if program.instructions:
        i = program.instructions[use.peak]
        lines.append(f"  the peak is while {i.kind} runs{_in(masked(scope_of(i)))} ({_line(i)})")
    return lines


def traffic_lines(program: Program, most: int = 12) -> list[str]:
    """Bytes sent by scope, kind, axes and line, with their share."""
    rows = [row for row in sent_by_scope(program).items() if row[1][1]]
    whole = sum(sent for _, (_, sent) in rows)
    lines = [
        f"  {amount(sent, 'B')} ({sent / whole:.0%}) {kind} over {axes}, {count}{_in(scope)} ({line})"
        for (scope, kind, axes, line), (count, sent) in rows[:most]
    ]
    if len(rows) > most:
        rest = sum(sent for _, (_, sent) in rows[most:])
        lines.append(f"  {amount(rest, 'B')} in {len(rows) - most} more places")
    return lines


def _in(scope: str) -> str:
    return f" in {scope}" if scope else ""


def network_lines(cost: Cost, mesh: MeshShape, between: Axes) -> list[str]:
    """Which axes cross the network between hosts, and a warning where one of them sends more than an axis inside.

    Args:
        between: The axes along which some neighbours are on different hosts.
    """
    if not between:
        return []
    sent = Counter[str]()
    for table in cost.bytes_by.values():
        for axes, nbytes in table.items():
            for axis in axes.split("+"):
                sent[axis] += nbytes
    inside = [n for n in mesh.names if n not in between and mesh.axis_size(n) > 1]
    told = ", ".join(f"{n} ({amount(sent[n], 'B')} a rank and step)" for n in between)
    lines = [f"between hosts: {told}; inside a host: {', '.join(inside) or 'no axis'}"]
    heavy = max(between, key=lambda n: sent[n])
    lighter = [n for n in inside if sent[n] < sent[heavy]]
    if lighter:
        # Ranks that differ in the last axes only share a host.
        better = MeshShape(sorted(mesh.axes, key=lambda axis: sent[axis[0]]))
        lines.append(
            f"warning: axis {heavy} sends more than {', '.join(lighter)} and crosses the network;"
            f" mesh '{';'.join(f'{n}:{size}' for n, size in better.axes)}' keeps it inside a host"
        )
    return lines


def time_lines(prediction: Prediction) -> list[str]:
    """The predicted time of a step, by what bounds it, by kind, by axes and by scope."""
    whole = prediction.seconds
    if not whole:
        return [str(prediction)]
    lines = [str(prediction), f"  most of the step waits for: {prediction.bound}"]
    lines += _shares("by kind", prediction.by_kind(), whole)
    lines += _shares("in collectives over", prediction.by_axes(), whole)
    by_scope = summed((masked(users_name(t.instruction)), t.seconds) for t in prediction.timings)
    longest = sorted(by_scope.items(), key=lambda item: -item[1])[:8]
    return [*lines, *_shares("longest", dict(longest), whole)]


def _shares(title: str, table: Mapping[str, float], whole: float) -> list[str]:
    rows: Iterable[tuple[str, float]] = sorted(table.items(), key=lambda item: -item[1])
    parts = [f"{name} {1e3 * s:.3g} ms ({s / whole:.0%})" for name, s in rows]
    return [f"  {title}: " + ", ".join(parts)] if parts else []


def fit_line(cost: Cost, machine: Machine) -> str:
    """Whether a rank's memory is enough, where the machine says how much there is."""
    if not machine.memory_bytes:
        return ""
    share = cost.peak_memory / machine.memory_bytes
    fits = "fits in" if share <= 1.0 else "DOES NOT FIT in"
    return f"  it {fits} a rank's {amount(machine.memory_bytes, 'B')} ({share:.0%})"
