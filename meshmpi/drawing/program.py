"""Draws a program as a column of boxes, with collectives coloured by their mesh axes.

A box is an instruction, or consecutive instructions of one scope, so it depends only on boxes before it. A collective
is written with kind, axes and bytes, so that no reader needs the colours.
"""

from __future__ import annotations

import math

from meshmpi.drawing.groups import Group, folded, grouped, readable
from meshmpi.drawing.picture import (
    FAINT,
    INK,
    LINE,
    PAGE,
    PLAIN,
    Canvas,
    Colours,
    MatplotlibFigure,
    Picture,
    mesh_text,
    shortened,
    strong,
    text_width,
)
from meshmpi.ir.program import Collective, Program, Source

MOST_BOXES = 70
"""Boxes in one picture that can still be read."""
FONT, ROW, GAP = 11.5, 17.0, 16.0
ARROW = "#6b7580"


def axis_colours(program: Program) -> Colours:
    """One colour for each set of mesh axes, in the order of the mesh."""
    return Colours([*program.mesh.names, *_axes_used(program)])


def _axes_used(program: Program) -> list[str]:
    return ["+".join(i.attrs.axes) for i in program.instructions if isinstance(i.attrs, Collective)]


def draw_program(
    program: Program, title: str = "", depth: int | None = -1, numbers: list[int] | None = None
) -> Picture:
    """The program as a column of boxes, in the order in which they run.

    An arrow leads from each box to those that use its results: down to the next box, or around on
    the left.

    Args:
        program: The program.
        title: Above the picture.
        depth: Parts of the scopes that make boxes differ; None: a box for each instruction.
            Default: as many as can be read.
        numbers: Only these instructions.
    """
    if depth == -1:
        depth = readable(program, MOST_BOXES)
    groups, colours = grouped(program, depth, numbers), axis_colours(program)
    groups = groups if depth is None else folded(groups)
    sizes = [_size(g) for g in groups]
    legend, caption = _legend(program, colours), about(program)
    reach = max((_reach(k - p) for k, g in enumerate(groups) for p in g.before), default=0.0) * 0.75
    column = max((w for w, _ in sizes), default=0.0)
    head = 12.0 + 22.0 * bool(title) + 20.0 + 22.0
    room = max(text_width(title, 14.5), text_width(caption, 11), *(x for *_, x in legend), reach + column) + 28
    tops = [head]
    for _, h in sizes:
        tops.append(tops[-1] + h + GAP)
    height = tops[-1] - GAP + 14 if groups else head + 8
    left = 14 + reach

    def paint(figure: MatplotlibFigure) -> None:
        canvas = Canvas(figure, room, height)
        if title:
            canvas.text(14, 18, title, 14, bold=True)
        canvas.text(14, head - 36, caption, 11, FAINT)
        for words, fill, edge, x, _ in legend:
            if fill:
                canvas.box(14 + x, head - 24, 12, 12, fill, edge, 1.6)
            canvas.text(14 + x + 18 * bool(fill), head - 18, words, 11, INK if fill else FAINT)
        for k, (g, (w, h)) in enumerate(zip(groups, sizes, strict=True)):
            for p in g.before:
                if p == k - 1:
                    x = left + min(w, sizes[p][0]) / 2
                    canvas.arrow((x, tops[k] - GAP), (x, tops[k]), 0, ARROW)
                else:
                    start, stop = tops[p] + sizes[p][1] * 0.65, tops[k] + h * 0.35
                    canvas.arrow((left, start), (left, stop), _reach(k - p), strong(p))
            _box(canvas, g, (left, tops[k], w, h), colours, program)

    return Picture(room, height, title or "Program", _as_text(groups), paint)


def _size(g: Group) -> tuple[float, float]:
    """Width and height of a box."""
    width = max(text_width(s, FONT) for s in (g.head, *g.lines)) + 18
    return min(max(width, 60.0), 330.0), 10 + ROW * (1 + len(g.sent) - g.is_one_collective)


def _reach(boxes: int) -> float:
    """How far an arrow to a box further down swings out, in pixels; 3/4 of it can be seen."""
    return 14.0 + 14.0 * math.sqrt(boxes)


def about(program: Program) -> str:
    """Mesh, and how variables and feeds are split over it."""
    kept = (*(v.type for v in program.variables.values()), *program.feeds.values())
    splits = [f"{d.name}:{'+'.join(over)}" for t in kept for d, over in zip(t.shape, t.splits, strict=True) if over]
    return f"{mesh_text(program.mesh)}s; split {';'.join(dict.fromkeys(splits)) or 'nothing'}"


def _made(s: Source) -> str:
    """Tensor, file and line; without folders, which differ between machines."""
    return f"{s.name} made at {s.short}" if s.file else s.name


def _box(
    canvas: Canvas, g: Group, place: tuple[float, float, float, float], colours: Colours, program: Program
) -> None:
    """A group; each of its collectives is a row of its own, in the colour of its axes."""
    x, y, w, h = place
    note = "\n".join(list(dict.fromkeys(_made(program.instructions[n].source) for n in g.numbers))[:12])
    if g.is_one_collective:
        ((_, axes),) = g.sent
        canvas.box(*place, colours.soft(axes), colours.strong(axes), 1.6, 5, note)
        canvas.text(x + w / 2, y + h / 2, shortened(g.lines[0], w - 10, FONT), FONT, where="center")
        return
    traits = program.instructions[g.numbers[0]].traits
    stored = len(g.numbers) == 1 and (traits.given or traits.kept)
    canvas.box(*place, PAGE if stored else PLAIN, LINE, 1.0, 5, note)
    canvas.text(x + w / 2, y + 5 + ROW / 2, shortened(g.head, w - 10, FONT), FONT, where="center")
    for k, ((_, axes), line) in enumerate(zip(g.sent, g.lines, strict=True)):
        at = y + 5 + ROW * (k + 1)
        canvas.box(x + 4, at, w - 8, ROW - 2, colours.soft(axes), colours.strong(axes), 1.0, 3)
        words = shortened(line, w - 16, FONT - 0.5)
        canvas.text(x + w / 2, at + ROW / 2 - 1, words, FONT - 0.5, where="center")


def _legend(program: Program, colours: Colours) -> list[tuple[str, str, str, float, float]]:
    """Words, colours of ground and edge, and where each entry begins and ends."""
    used = sorted(dict.fromkeys(_axes_used(program)), key=colours.numbers.__getitem__)
    if not used:
        words = "no collectives: nothing is sent"
        return [(words, "", "", 0.0, text_width(words, 11))]
    entries, x = [], 0.0
    for axes in used:
        words = f"over {axes} ({program.mesh.count(axes.split('+'))} ranks)"
        end = x + 36 + text_width(words, 11)
        entries.append((words, colours.soft(axes), colours.strong(axes), x, end))
        x = end
    return entries


def _as_text(groups: list[Group]) -> str:
    """The same as text: one line for each box."""
    lines = []
    for k, g in enumerate(groups):
        after = f" after {', '.join(map(str, g.before))}" if g.before else ""
        lines.append(f"{k:4} {g.head}{after}" + (f"  [{'; '.join(g.lines)}]" if g.sent else ""))
    return "\n".join(lines)
