"""A program as a graph: boxes of computation, collectives coloured by the mesh axes they run over.

Solid boxes are what instructions compute; a collective is a line of its own colour in the box, with
kind, axes and bytes, so that no reader needs the colours.
"""

from __future__ import annotations

from meshmpi.drawing.groups import Group, grouped, readable
from meshmpi.drawing.layered import place
from meshmpi.drawing.palette import FAINT, INK, LINE, PAGE, PLAIN, Colour, soft, strong
from meshmpi.drawing.scene import Line, Rect, Scene, Text, shortened, text_width
from meshmpi.planner.report import amount
from meshmpi.program import COLLECTIVES, Program, Source

MOST_BOXES = 70
"""Boxes in one picture that can still be read."""
FONT, ROW = 11.5, 17.0


class AxisColours:
    """One colour for each set of mesh axes, in the order of the mesh."""

    def __init__(self, program: Program):
        names = list(program.mesh.names)
        found = [
            "+".join(i.attrs["axes"]) for i in program.instructions if i.kind in COLLECTIVES
        ]  # fmt: skip
        self.numbers: dict[str, int] = {}
        for name in [*names, *dict.fromkeys(found)]:
            self.numbers.setdefault(name, len(self.numbers))
        self.used = [n for n in self.numbers if n in found]

    def soft(self, axes: str) -> Colour:
        return soft(self.numbers[axes])

    def strong(self, axes: str) -> Colour:
        return strong(self.numbers[axes])


def draw_program(
    program: Program, title: str = "", depth: int | None = -1, numbers: list[int] | None = None
) -> Scene:
    """The program as a graph from top to bottom.

    Args:
        program: The program.
        title: Above the picture.
        depth: How many parts of the scopes tell boxes apart; None: a box for each instruction.
            Default: what can be read.
        numbers: Only these instructions.
    """
    if depth == -1:
        depth = readable(program, MOST_BOXES)
    groups = grouped(program, depth, numbers)
    colours = AxisColours(program)
    sizes = [_size(g) for g in groups]
    placed = place(sizes, [g.before for g in groups])
    legend = _legend(program, colours)
    head = (30.0 if title else 6.0) + legend.height + 14
    width = max(placed.width + 28, legend.width + 28, text_width(title, 14.5) + 28)
    scene = Scene(width, placed.height + head + 14, title or "Program", program_text(groups))
    if title:
        scene.add(Text(14, 18, title, 14, INK, bold=True))
    scene.put(legend, 14, 30.0 if title else 6.0)
    x0 = (width - placed.width) / 2
    for points in placed.routes.values():
        moved = tuple((x + x0, y + head) for x, y in points)
        scene.add(Line(moved, LINE, 1.1, smooth=True, arrow=True))
    for g, (w, h), (x, y) in zip(groups, sizes, placed.centres, strict=True):
        scene.put(_box(g, w, h, colours, program), x + x0 - w / 2, y + head - h / 2)
    return scene


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


def _box(g: Group, w: float, h: float, colours: AxisColours, program: Program) -> Scene:
    box = Scene(w, h)
    lines = [_made(program.instructions[n].source) for n in g.numbers]
    note = "\n".join(list(dict.fromkeys(lines))[:12])
    room = w - 14
    if _is_one_collective(g):
        ((key, value),) = g.sent.items()
        box.add(Rect(0, 0, w, h, colours.soft(key[1]), colours.strong(key[1]), 1.6, 5, note))
        box.add(Text(w / 2, h / 2, shortened(_sent(key, value), room, FONT), FONT, INK, "middle"))
        return box
    first = program.instructions[g.numbers[0]]
    stored = len(g.numbers) == 1 and first.kind in ("read", "feed", "write")
    box.add(Rect(0, 0, w, h, PAGE if stored else PLAIN, LINE, 1.0, 5, note))
    box.add(Text(w / 2, 5 + ROW / 2, shortened(_head(g), room, FONT), FONT, INK, "middle"))
    for k, (key, value) in enumerate(g.sent.items()):
        y = 5 + ROW * (k + 1)
        box.add(Rect(4, y, w - 8, ROW - 2, colours.soft(key[1]), colours.strong(key[1]), 1.0, 3))
        words = shortened(_sent(key, value), room - 6, FONT - 0.5)
        box.add(Text(w / 2, y + ROW / 2 - 1, words, FONT - 0.5, INK, "middle"))
    return box


def _legend(program: Program, colours: AxisColours) -> Scene:
    scene, x = Scene(0.0, 16.0), 0.0
    if not colours.used:
        scene.add(Text(0, 8, "no collectives: nothing is sent", 11, FAINT))
        scene.width = text_width("no collectives: nothing is sent", 11)
        return scene
    for axes in colours.used:
        n = program.mesh.count(axes.split("+"))
        words = f"over {axes} ({n} ranks)"
        scene.add(Rect(x, 2, 12, 12, colours.soft(axes), colours.strong(axes), 1.6))
        scene.add(Text(x + 18, 8, words, 11, INK))
        x += 18 + text_width(words, 11) + 18
    scene.width = x
    return scene


def program_text(groups: list[Group]) -> str:
    """The same as text: a line a box."""
    lines = []
    for k, g in enumerate(groups):
        sent = "; ".join(_sent(*item) for item in g.sent.items())
        after = f" after {', '.join(map(str, g.before))}" if g.before else ""
        lines.append(f"{k:4} {_head(g)}{after}" + (f"  [{sent}]" if sent else ""))
    return "\n".join(lines)
