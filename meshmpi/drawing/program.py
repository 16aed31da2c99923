"""A program as a column of boxes, with collectives coloured by the mesh axes they run over.

A collective is written out with kind, axes and bytes, so that no reader needs the colours.
"""

from __future__ import annotations

import math
from typing import Any

from meshmpi.amounts import amount
from meshmpi.drawing.groups import Group, grouped, readable
from meshmpi.drawing.palette import FAINT, INK, LINE, PAGE, PLAIN, soft, strong
from meshmpi.drawing.picture import Canvas, Picture, shortened, text_width
from meshmpi.ir.program import Collective, Program, Source

MOST_BOXES = 70
"""Boxes in one picture that can still be read."""
FONT, ROW, GAP = 11.5, 17.0, 16.0
ARROW = "#6b7580"


class AxisColours:
    """One colour for each set of mesh axes, in the order of the mesh."""

    def __init__(self, program: Program):
        names = list(program.mesh.names)
        found = ["+".join(i.attrs.axes) for i in program.instructions if isinstance(i.attrs, Collective)]
        self.numbers: dict[str, int] = {}
        for name in [*names, *dict.fromkeys(found)]:
            self.numbers.setdefault(name, len(self.numbers))
        self.used = [n for n in self.numbers if n in found]

    def soft(self, axes: str) -> str:
        return soft(self.numbers[axes])

    def strong(self, axes: str) -> str:
        return strong(self.numbers[axes])


def draw_program(
    program: Program, title: str = "", depth: int | None = -1, numbers: list[int] | None = None
) -> Picture:
    """The program as a column of boxes, in the order in which they run.

    An arrow leads from each box to those that use its results: down to the next box, or around on
    the left.

    Args:
        program: The program.
        title: Above the picture.
        depth: How many parts of the scopes tell boxes apart; None: a box for each instruction.
            Default: as many as can be read.
        numbers: Only these instructions.
    """
    if depth == -1:
        depth = readable(program, MOST_BOXES)
    groups, colours = grouped(program, depth, numbers), AxisColours(program)
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

    def paint(figure: Any) -> None:
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

    return Picture(room, height, title or "Program", program_text(groups), paint)


def _reach(boxes: int) -> float:
    """How far an arrow to a box further down swings out, in pixels; 3/4 of it can be seen."""
    return 14.0 + 14.0 * math.sqrt(boxes)


def about(program: Program) -> str:
    """Mesh, and how variables and feeds are split over it."""
    axes = ";".join(f"{name}:{size}" for name, size in program.mesh.axes)
    splits: dict[str, None] = {}
    for t in (*(v.type for v in program.variables.values()), *program.feeds.values()):
        for d, over in zip(t.shape, t.splits, strict=True):
            if over:
                splits[f"{d.name}:{'+'.join(over)}"] = None
    return f"mesh {axes}, {program.mesh.size} ranks; split {';'.join(splits) or 'nothing'}"


def _size(g: Group) -> tuple[float, float]:
    texts = [_head(g), *(_sent(*item) for item in g.sent.items())]
    width = max(text_width(s, FONT) for s in texts) + 18
    return min(max(width, 60.0), 330.0), 10 + ROW * (1 + len(g.sent) - _is_one_collective(g))


def _is_one_collective(g: Group) -> bool:
    return len(g.numbers) == 1 and bool(g.sent)


def _head(g: Group) -> str:
    return g.name if len(g.numbers) == 1 else f"{g.name}  ({len(g.numbers)})"


def _sent(key: tuple[str, str], value: tuple[int, int]) -> str:
    (kind, axes), (count, total) = key, value
    times = f"{count} " if count > 1 else ""
    return f"{times}{kind} {axes}: {amount(total, 'B')}"


def _made(s: Source) -> str:
    """Tensor, file and line; without folders, which differ between machines."""
    return f"{s.name} made at {s.file.rsplit('/', 1)[-1]}:{s.line}" if s.file else s.name


def _box(
    canvas: Canvas, g: Group, place: tuple[float, float, float, float], colours: AxisColours, program: Program
) -> None:
    """A group; each of its collectives is a row of its own, in the colour of its axes."""
    x, y, w, h = place
    lines = [_made(program.instructions[n].source) for n in g.numbers]
    note = "\n".join(list(dict.fromkeys(lines))[:12])
    if _is_one_collective(g):
        ((key, value),) = g.sent.items()
        canvas.box(*place, colours.soft(key[1]), colours.strong(key[1]), 1.6, 5, note)
        canvas.text(x + w / 2, y + h / 2, shortened(_sent(key, value), w - 10, FONT), FONT, where="center")
        return
    traits = program.instructions[g.numbers[0]].traits
    stored = len(g.numbers) == 1 and (traits.given or traits.kept)
    canvas.box(*place, PAGE if stored else PLAIN, LINE, 1.0, 5, note)
    canvas.text(x + w / 2, y + 5 + ROW / 2, shortened(_head(g), w - 10, FONT), FONT, where="center")
    for k, (key, value) in enumerate(g.sent.items()):
        at = y + 5 + ROW * (k + 1)
        canvas.box(x + 4, at, w - 8, ROW - 2, colours.soft(key[1]), colours.strong(key[1]), 1.0, 3)
        words = shortened(_sent(key, value), w - 16, FONT - 0.5)
        canvas.text(x + w / 2, at + ROW / 2 - 1, words, FONT - 0.5, where="center")


def _legend(program: Program, colours: AxisColours) -> list[tuple[str, str, str, float, float]]:
    """Words, colours of ground and edge, and where each entry begins and ends."""
    if not colours.used:
        words = "no collectives: nothing is sent"
        return [(words, "", "", 0.0, text_width(words, 11))]
    entries, x = [], 0.0
    for axes in colours.used:
        words = f"over {axes} ({program.mesh.count(axes.split('+'))} ranks)"
        end = x + 36 + text_width(words, 11)
        entries.append((words, colours.soft(axes), colours.strong(axes), x, end))
        x = end
    return entries


def program_text(groups: list[Group]) -> str:
    """The same as text: a line a box."""
    lines = []
    for k, g in enumerate(groups):
        sent = "; ".join(_sent(*item) for item in g.sent.items())
        after = f" after {', '.join(map(str, g.before))}" if g.before else ""
        lines.append(f"{k:4} {_head(g)}{after}" + (f"  [{sent}]" if sent else ""))
    return "\n".join(lines)
