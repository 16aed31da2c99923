"""A plan as text and as data: what a rank computes, sends and holds, where in the user's code, and how long it takes.

From programs, costs and predictions only; nothing is measured here.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from meshmpi.amounts import amount
from meshmpi.api import Plan, plan
from meshmpi.compiler.cost import Cost
from meshmpi.compiler.passes.memory import MemoryPlan
from meshmpi.dims import Axes, MeshShape
from meshmpi.graph import Graph
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.machine import Machine, axes_between_hosts, shared_axes
from meshmpi.planner.machine_file import find_machine
from meshmpi.planner.memory_use import memory_use
from meshmpi.planner.timing import Prediction, predict_time, summed
from meshmpi.runtime.compiled import memory_plan

_GRADIENT = re.compile(r"^(.*) \(gradient of (.*)\)$")
GRADIENT = " (gradient)"
"""Mark of a scope whose gradient is computed."""


NO_MACHINE = "no time is predicted: this machine was not measured; `meshmpi calibrate` does it"


class Planned(NamedTuple):
    """A plan with its predicted time, where the machine is known."""

    plan: Plan
    layout: str
    machine: Machine | None
    prediction: Prediction | None

    def lines(self) -> list[str]:
        """For people."""
        program, cost = self.plan.program, self.plan.cost
        counts = program.counts()
        lines = [str(cost)]
        lines.append(f"{len(program.instructions)} instructions: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
        for kind in COLLECTIVES:
            for axes, elements in program.values().get(kind, {}).items():
                lines.append(f"  {kind} over {axes}: {elements:,} elements per rank and step")
        lines += traffic_lines(program)
        lines += memory_lines(program, memory_plan(program))
        if self.machine is None or self.prediction is None:
            return [*lines, NO_MACHINE]
        between = axes_between_hosts(program.mesh, self.machine.ranks_per_host)
        lines += network_lines(cost, program.mesh, between)
        lines += [*time_lines(self.prediction), fit_line(cost, self.machine)]
        return [line for line in lines if line]

    def data(self) -> dict[str, Any]:
        """For programs: bytes, FLOP and seconds, of the rank that has most of each."""
        program, cost, timed = self.plan.program, self.plan.cost, self.prediction
        sent = sent_by_scope(program).items()
        use = memory_use(program, memory_plan(program))
        return {
            "mesh": dict(program.mesh.axes),
            "ranks": program.mesh.size,
            "layout": self.layout,
            "flops": cost.flops,
            "bytes_sent": cost.bytes_sent,
            "bytes_sent_by": cost.bytes_by,
            "bytes_sent_in": [
                {"scope": scope, "kind": kind, "axes": axes, "line": line, "collectives": n, "bytes_sent": nbytes}
                for (scope, kind, axes, line), (n, nbytes) in sent
            ],
            "peak_memory": cost.peak_memory,
            "memory": cost.memory,
            "memory_at_peak": dict(use.at_peak),
            "instructions": program.counts(),
            "machine": None if timed is None else timed.machine,
            "seconds": None if timed is None else timed.seconds,
            "seconds_by_kind": None if timed is None else timed.by_kind(),
            "seconds_by_axes": None if timed is None else timed.by_axes(),
            "seconds_by_bound": None if timed is None else timed.by_bound(),
        }


def took(began: float) -> str:
    """What planning took since ``began``, a `time.perf_counter`; as a line."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"planned in {time.perf_counter() - began:.1f} s; this process took {peak / 1024:.0f} MB of memory"


def planned(graph: Graph, mesh: MeshShape, layout: str, machine: str = "", **how: Any) -> Planned:
    """The plan of a step and its predicted time.

    Args:
        machine: Name or file of a machine; empty: this host, if it was measured for that mesh.
        how: Further arguments of `mm.plan`.
    """
    known = find_machine(machine, mesh)
    found = plan(graph, mesh, layout, shared=shared_axes(mesh, known), **how)
    return Planned(found, layout, known, None if known is None else predict_time(found.program, known))


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
