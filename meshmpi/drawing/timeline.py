"""A step as a time line: what is computed, and each collective by its axes, to scale.

Repeated layers are drawn once, as wide as all of them together: lengths add up to the time of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshmpi.drawing.groups import Group, folded, grouped, readable
from meshmpi.drawing.picture import (
    FAINT,
    INK,
    PLAIN,
    Canvas,
    MatplotlibFigure,
    Picture,
    mesh_text,
    shortened,
    text_width,
)
from meshmpi.drawing.program import axis_colours
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import Wait
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.machine_file import load_machine
from meshmpi.planner.report import GRADIENT, masked
from meshmpi.planner.timing import Prediction, predict_time
from meshmpi.runtime.trace import Recorded, read_trace

COMPUTE, WAITING, OTHER = "compute", "wait for others", "not in an instruction"
MOST_STAGES = 40
"""Maximum number of groups along the step; a program with more is drawn by fewer parts of its scopes."""
LEFT, RIGHT, TOP, ROW = 130.0, 16.0, 62.0, 30.0


class Spent(NamedTuple):
    """Seconds of a step, in a row of the time line."""

    instruction: int  # its number; -1: none
    row: str  # `COMPUTE`, `WAITING`, `OTHER` or mesh axes joined by +
    seconds: float


class Timed(NamedTuple):
    """Where the time of a step goes, and where that is known from."""

    about: str
    parts: tuple[Spent, ...]


class Stage(NamedTuple):
    """A group of instructions, with row -> seconds in all its repetitions."""

    group: Group
    rows: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.rows.values())


def predicted(program: Program, prediction: Prediction | None = None) -> Timed:
    """Where the predicted time of a step goes; the sum is ``prediction.seconds``.

    Args:
        prediction: From `predict_time`; default: that for the stated machine ``"core"``.
    """
    prediction = prediction or predict_time(program, load_machine("core"))
    left, out = list(reversed(prediction.timings)), list[Spent]()
    for n, i in enumerate(program.instructions):
        if left and left[-1].instruction is i:
            out.append(Spent(n, _row(i), left.pop().seconds))
    out += [Spent(-1, OTHER, prediction.other)] if prediction.other else []
    return Timed(str(prediction), tuple(out))


def recorded(program: Program, path: str | Path) -> Timed:
    """Where the time of steps went that ``meshmpi train --trace`` recorded; means over steps and ranks.

    Raises:
        ConfigError: The file is not a trace, or one of another program.
    """
    out, at = list[Spent](), -1
    calls, steps, ranks = read_trace(path)
    for n, call in enumerate(calls):
        if call.kind:
            ways = range(max(at, 0), len(program.instructions))  # an instruction may make several calls
            found = next((k for k in ways if _is(program.instructions[k], call)), None)
            if found is None:
                raise ConfigError(
                    f"the trace {path} is not one of this program: its call {n}, {call.kind} of '{call.name}', is not"
                    f" among the instructions from number {max(at, 0)} on.",
                    "Give the configuration, mesh and layout of the run that wrote it.",
                )
            at, row = found, _row(program.instructions[found])
        else:
            row = OTHER
        out.append(Spent(at, row, call.seconds - call.waited))
        out += [Spent(at, WAITING, call.waited)] if call.waited else []
    whole = milliseconds(sum(s.seconds for s in out))
    return Timed(f"recorded: {whole} a step, the mean of {steps} steps on {ranks} ranks", tuple(out))


def _is(i: Instruction, call: Recorded) -> bool:
    return i.kind == call.kind and i.source.name == call.name


def _row(i: Instruction) -> str:
    return "+".join(i.attrs.axes) if isinstance(i.attrs, (Collective, Wait)) else COMPUTE


def stages(program: Program, parts: Sequence[Spent]) -> list[Stage]:
    """The groups of a step in order, repeated ones folded, with their seconds; what is in none comes last."""
    groups = folded(grouped(program, readable(program, MOST_STAGES, single=False)))
    rest = Group("the rest of the step")
    owner = {n: k for k, g in enumerate(groups) for n in g.numbers}
    found = [Stage(g, {}) for g in (*groups, rest)]
    for one in parts:
        mine = found[owner.get(one.instruction, -1)].rows
        mine[one.row] = mine.get(one.row, 0.0) + one.seconds
    return found if found[-1].rows else found[:-1]


def draw_timeline(program: Program, timed: Timed, title: str = "", width: float = 900.0) -> Picture:
    """The time of a step from left to right: a row for what is computed, one for each set of axes.

    Args:
        program: The program.
        timed: Where its time goes, from `predicted` or `recorded`.
        title: Above the picture.
        width: Of the picture, in pixels.
    """
    found, colours = stages(program, timed.parts), axis_colours(program)
    used = dict.fromkeys(row for s in found for row, seconds in s.rows.items() if seconds)
    axes = [str(a) for a in colours.numbers if a in used]
    rows = [r for r in (COMPUTE, *axes, WAITING, OTHER) if r in used]
    height = TOP + 24 + ROW * len(rows) + 30

    def paint(figure: MatplotlibFigure) -> None:
        canvas = Canvas(figure, width, height)
        canvas.text(14, 18, title, 14, bold=True)
        canvas.text(14, 40, shortened(f"{mesh_text(program.mesh)}s; {timed.about}", width - 28, 11), 11, FAINT)
        whole, room = sum(s.seconds for s in found) or 1.0, width - LEFT - RIGHT
        for n, row in enumerate(rows):
            canvas.text(14, TOP + 24 + ROW * (n + 0.5), shortened(row, LEFT - 20, 11.5), 11.5)
        _scale(canvas, whole, room, height)
        x, sections = LEFT, dict[int, list[tuple[Stage, float]]]()
        for s in found:
            if s.group.section >= 0:
                sections.setdefault(s.group.section, []).append((s, x))
            for row, seconds in s.rows.items():
                wide, y = room * seconds / whole, TOP + 24 + ROW * rows.index(row) if seconds else 0.0
                if wide:
                    name = masked(s.group.name).removesuffix(GRADIENT) if row == COMPUTE else row
                    fill = PLAIN if row in (WAITING, OTHER) else colours.soft(name)
                    _part(canvas, s, row, seconds / whole, fill, (x, y + 2, wide, ROW - 4))
                x += wide
        for members in sections.values():
            _bracket(canvas, members, room * sum(s.seconds for s, _ in members) / whole)

    return Picture(width, height, title or "Time line of a step", "\n".join([timed.about, *_as_text(found)]), paint)


def _scale(canvas: Canvas, whole: float, room: float, height: float) -> None:
    for k in range(5):
        x = LEFT + room * k / 4
        canvas.box(x, height - 30, 0, 5, INK)
        where = "right" if k == 4 else "center"
        canvas.text(x, height - 16, milliseconds(whole * k / 4), 11, FAINT, where)


def _bracket(canvas: Canvas, members: Sequence[tuple[Stage, float]], wide: float) -> None:
    """Above the groups that are repeated: what they are, and how often."""
    names = [masked(s.group.name).removesuffix(GRADIENT).split("/") for s, _ in members]
    alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    count = f"x {members[0][0].group.repeats}"
    mark = GRADIENT * all(s.group.name.endswith(GRADIENT) for s, _ in members)
    words = f"{'/'.join(parts[0] for parts in alike)}{mark} {count}".strip()
    x = members[0][1]
    canvas.box(x, TOP, wide, 18, PLAIN, note=f"{words}, drawn as one")
    _within(canvas, (words, count), (x, TOP, wide, 18))


def _part(canvas: Canvas, s: Stage, row: str, share: float, fill: str, box: tuple[float, float, float, float]) -> None:
    """A group in a row: what it is, where there is room; all about it in the note."""
    canvas.box(*box, fill, note=f"{s.group.head}: {row} {milliseconds(s.rows[row])} ({share:.1%})")
    if row == COMPUTE:
        parts = masked(s.group.name).removesuffix(GRADIENT).split("/")
        _within(canvas, ["/".join(parts[k:]) for k in range(len(parts))], box)


def _within(canvas: Canvas, ways: Sequence[str], box: tuple[float, float, float, float]) -> None:
    """The first of some texts that fits into a box, else the last one cut short, where a few letters fit."""
    x, y, w, h = box
    words = next((t for t in ways if text_width(t, 10.5) < w - 4), shortened(ways[-1], w - 4, 10.5))
    if w > 34 or words in ways:
        canvas.text(x + w / 2, y + h / 2, words, 10.5, where="center")


def milliseconds(seconds: float) -> str:
    """As ``"3.21 ms"``."""
    return f"{1e3 * seconds:.3g} ms"


def table(found: Sequence[Stage]) -> list[tuple[str, str, str, str, str]]:
    """(name, repetitions, instructions, milliseconds by row, share) of each stage, in order."""
    whole = sum(s.seconds for s in found) or 1.0
    return [
        (
            s.group.name,
            f"x {s.group.repeats}" if s.group.repeats > 1 else "",
            f"{len(s.group.numbers)}",
            ", ".join(f"{row} {milliseconds(seconds)}" for row, seconds in s.rows.items()) or milliseconds(0.0),
            f"{s.seconds / whole:.1%}",
        )
        for s in found
    ]


def _as_text(found: Sequence[Stage]) -> list[str]:
    return [f"  {share:>6} {name}{count and f'  {count}'}: {rows}" for name, count, _, rows, share in table(found)]
