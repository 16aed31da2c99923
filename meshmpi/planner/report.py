"""A plan in words: what a rank computes, sends and holds, where in the user's code, how long.

Text only, of programs, costs and predictions; nothing is measured here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from meshmpi.amounts import amount
from meshmpi.compiler.cost import Cost
from meshmpi.compiler.passes.memory import MemoryPlan
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.machine import Machine
from meshmpi.planner.memory_kinds import memory_by_kind, peak_instruction
from meshmpi.planner.timing import Prediction


def sent_by_line(program: Program) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """(kind, axes, tensor, file:line) -> (collectives, bytes sent), most bytes first.

    Numbers in names of tensors are replaced by #, so that the layers of a stack are one row.
    """
    busy = program.busiest()
    out: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for i in program.instructions:
        if not isinstance(i.attrs, Collective):
            continue
        sent = program.most_bytes_sent(i, busy)
        key = (i.kind, "+".join(i.attrs.axes), *_place(i))
        count, total = out.get(key, (0, 0))
        out[key] = (count + 1, total + sent)
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))


def _place(i: Instruction) -> tuple[str, str]:
    line = f"{os.path.relpath(i.source.file)}:{i.source.line}" if i.source.file else "(no line)"
    return re.sub(r"\d+", "#", i.source.name) or "(no name)", line


def memory_lines(program: Program, plan: MemoryPlan) -> list[str]:
    """Memory by kind at the peak, and the line at which it is."""
    kinds = memory_by_kind(program, plan)
    lines = [
        "memory "
        + ", ".join(f"{kind} {amount(n, 'B')}" for kind, n in kinds.items() if n)
        + f"; in all {plan.total_bytes:,} bytes"
    ]
    if program.instructions:
        i = program.instructions[peak_instruction(plan)]
        name, line = _place(i)
        lines.append(f"  the peak is while {i.kind} makes {name} ({line})")
    return lines


def traffic_lines(program: Program, most: int = 12) -> list[str]:
    """Bytes sent by kind, axes and line."""
    rows = [row for row in sent_by_line(program).items() if row[1][1]]
    lines = [
        f"  {amount(sent, 'B')} {kind} over {axes}, {count} of {name} ({line})"
        for (kind, axes, name, line), (count, sent) in rows[:most]
    ]
    if len(rows) > most:
        rest = sum(sent for _, (_, sent) in rows[most:])
        lines.append(f"  {amount(rest, 'B')} in {len(rows) - most} more places")
    return lines


def time_lines(prediction: Prediction, most: int = 8) -> list[str]:
    """The predicted time of a step, by what bounds it, by kind, by axes and by line."""
    whole = prediction.seconds
    if not whole:
        return [str(prediction)]
    lines = [str(prediction), f"  most of the step waits for: {prediction.bound}"]
    lines += _shares("by kind", prediction.by_kind(), whole)
    lines += _shares("in collectives over", prediction.by_axes(), whole)
    by_place: dict[str, float] = {}
    for source, seconds in prediction.by_source().items():
        key = re.sub(r"\d+", "#", source.name) or "(no name)"
        by_place[key] = by_place.get(key, 0.0) + seconds
    longest = sorted(by_place.items(), key=lambda item: -item[1])[:most]
    lines += _shares("longest", dict(longest), whole)
    return lines


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
