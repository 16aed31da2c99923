"""A step as a time line: what is computed, and each collective by its axes, to scale.

Repeated layers are drawn once, as wide as all of them together: lengths add up to the time of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
from meshmpi.ir.program import Program
from meshmpi.planner.report import GRADIENT, masked
from meshmpi.planner.step_time import COMPUTE, OTHER, WAITING, Spent, Timed, milliseconds

MOST_STAGES = 40
"""Maximum number of groups along the step; a program with more is drawn by fewer parts of its scopes."""
LEFT, RIGHT, TOP, ROW = 130.0, 16.0, 62.0, 30.0


class Stage(NamedTuple):
    """A group of instructions, with row -> seconds in all its repetitions."""

    group: Group
    rows: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.rows.values())


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
