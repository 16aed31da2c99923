"""What the memory of a rank holds while a step runs, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshmpi.drawing.palette import FAINT, INK, LINE, PLAIN, Colour, soft, strong
from meshmpi.drawing.scene import Line, Rect, Scene, Text, shortened, text_width
from meshmpi.passes.memory import MemoryPlan, Sharing, aligned_bytes
from meshmpi.planner.memory_kinds import gradient_values
from meshmpi.planner.report import amount
from meshmpi.program import Program

KINDS = ("parameters", "slots", "feeds", "gradients", "activations")
COLOURS: dict[str, Colour] = {
    "parameters": soft(0), "slots": soft(7), "feeds": PLAIN, "gradients": soft(5),
    "activations": soft(2), "workspace": soft(1),
}  # fmt: skip
MOST_POINTS = 600
"""Places along the step that are drawn; of longer programs the largest within each is taken."""


@dataclass(frozen=True)
class Use:
    """Bytes of the rank at the origin during each instruction.

    Attributes:
        by_kind: Kind of `KINDS` -> bytes during each instruction.
        peak: Number of the first instruction during which most is in use.
        limit: Bytes that are allocated: arena with its gaps, variables, feeds; no workspace.
        workspace: Scratch memory of kernels beside it.
    """

    by_kind: dict[str, list[int]]
    peak: int
    limit: int
    workspace: int

    @property
    def held(self) -> int:
        """All bytes that the rank holds: the plan's total."""
        return self.limit + self.workspace

    def at(self, n: int) -> int:
        """Bytes in use during instruction ``n``."""
        return sum(row[n] for row in self.by_kind.values())


def memory_use(program: Program, plan: MemoryPlan) -> Use:
    """Kind of memory -> bytes during each instruction; their sums are those of the plan."""
    origin = dict.fromkeys(program.mesh.names, 0)
    n = len(program.instructions)
    rows = {kind: [0] * n for kind in KINDS}
    for v in program.variables.values():
        size = aligned_bytes(v.type, program, origin)
        row = rows["parameters" if v.trainable else "slots"]
        row[:] = [b + size for b in row]
    rows["feeds"] = [plan.feed_bytes] * n
    sharing, gradients = Sharing(program), gradient_values(program)
    living = dict.fromkeys(("gradients", "activations"), 0)
    sizes = {v: aligned_bytes(program.types[v], program, origin) for v in plan.offsets}
    for k, i in enumerate(program.instructions):
        for v in i.outputs:
            if v in sizes:
                living["gradients" if v in gradients else "activations"] += sizes[v]
        for kind, held in living.items():
            rows[kind][k] = held
        for v in sharing.ending[k]:
            if v in sizes:
                living["gradients" if v in gradients else "activations"] -= sizes[v]
    totals = [sum(r[k] for r in rows.values()) for k in range(n)]
    peak = max(range(n), key=totals.__getitem__, default=0)
    held = plan.arena_bytes + plan.variable_bytes + plan.feed_bytes
    return Use(rows, peak, held, plan.workspace_bytes)


def draw_memory(program: Program, plan: MemoryPlan, title: str = "", width: float = 860.0) -> Scene:
    """Memory over the step as areas on top of each other, the peak marked with its line.

    The workspace of kernels, allocated once for all instructions, is a band on top of the rest.

    Args:
        program: The program.
        plan: Its memory plan (`meshmpi.runtime.compiled.memory_plan`).
        title: Above the picture.
        width: Of the picture.
    """
    use = memory_use(program, plan)
    n = len(program.instructions)
    scene = Scene(width, 330.0, title or "Memory of a rank over one step", _as_text(program, use))
    if not n:
        return scene
    left, top, right, bottom = 76.0, 74.0, width - 18.0, 268.0
    high = max(use.held, use.at(use.peak), 1)
    bins = _bins(n)

    def x_of(k: float) -> float:
        return left + (right - left) * k / len(bins)

    def y_of(b: float) -> float:
        return bottom - (bottom - top) * b / (high * 1.06)

    scene.add(Text(14, 18, scene.title, 14, INK, bold=True))
    scene.shapes += _axes(high, (left, right, bottom), y_of, n)
    below = [0] * len(bins)
    legend = left
    for kind in KINDS:
        row = use.by_kind[kind]
        if not any(row):
            continue
        tops = [b + max(row[k] for k in ks) for b, ks in zip(below, bins, strict=True)]
        note = f"{kind}: up to {amount(max(row), 'B')}"
        scene.add(Line(_outline(below, tops, x_of, y_of), LINE, 0.6, COLOURS[kind], note=note))
        scene.add(*_legend(kind, legend))
        legend += 17 + text_width(kind, 11.5) + 18
        below = tops
    if use.workspace:
        scene.add(*_legend("workspace", legend))
    scene.shapes += _held(use, (left, right), y_of, use.peak * 2 < n)
    scene.shapes += _peak(program, use, bins, x_of, y_of, (left, right, bottom))
    return scene


def _legend(kind: str, x: float) -> list[Rect | Text]:
    return [Rect(x, 36, 12, 12, COLOURS[kind]), Text(x + 17, 42, kind, 11.5)]


def _held(
    use: Use, ends: tuple[float, float], y_of: Callable[[float], float], on_the_right: bool
) -> list[Rect | Line | Text]:
    """The workspace as a band on top of all else, and what a rank holds with it."""
    (left, right), top = ends, y_of(use.held)
    words = f"held {amount(use.held, 'B')}"
    shapes: list[Rect | Line | Text] = []
    if use.workspace:
        words += f": values {amount(use.limit, 'B')}, workspace {amount(use.workspace, 'B')}"
        note = f"workspace: {amount(use.workspace, 'B')}"
        box = (left, top, right - left, y_of(use.limit) - top)
        shapes.append(Rect(*box, COLOURS["workspace"], LINE, 0.6, note=note))
    x, anchor = (right, "end") if on_the_right else (left, "start")
    return [
        *shapes, Line(((left, top), (right, top)), FAINT, 1, dashed=True),
        Text(x, top - 8, words, 11, FAINT, anchor),
    ]  # fmt: skip


def _bins(n: int) -> list[range]:
    count = min(n, MOST_POINTS)
    return [range(k * n // count, (k + 1) * n // count) for k in range(count)]


def _outline(below: Sequence[int], tops: Sequence[int], x_of, y_of) -> tuple:
    """The steps along the top, and back along the bottom."""
    upper = [p for k, b in enumerate(tops) for p in ((x_of(k), y_of(b)), (x_of(k + 1), y_of(b)))]
    lower = [p for k, b in enumerate(below) for p in ((x_of(k), y_of(b)), (x_of(k + 1), y_of(b)))]
    return (*upper, *reversed(lower))


def _axes(high: int, box: tuple[float, float, float], y_of, n: int) -> list[Line | Text]:
    left, right, bottom = box
    step = _round_step(high)
    shapes: list[Line | Text] = []
    b = 0.0
    while b <= high:
        shapes.append(Line(((left, y_of(b)), (right, y_of(b))), LINE, 0.5))
        shapes.append(Text(left - 8, y_of(b), amount(b, "B") if b else "0", 11, FAINT, "end"))
        b += step
    for k in sorted({0, n // 4, n // 2, 3 * n // 4, n}):
        x = left + (right - left) * k / n
        shapes.append(Text(x, bottom + 13, str(k), 11, FAINT, "middle"))
    shapes.append(Text((left + right) / 2, bottom + 31, "instruction", 11.5, FAINT, "middle"))
    return shapes


def _round_step(high: float) -> float:
    """A round distance that cuts ``high`` into three to seven parts."""
    step = 1.0
    while high / step > 7:
        step *= 2.5 if str(int(step)).startswith("2") else 2
    return step


def _peak(program: Program, use: Use, bins, x_of, y_of, box) -> list[Line | Text]:
    _, right, bottom = box
    place = next(k for k, ks in enumerate(bins) if use.peak in ks)
    x, y = x_of(place + 0.5), y_of(use.at(use.peak))
    words = shortened(peak_text(program, use), right - 14, 11.5)
    start = max(14.0, min(x - text_width(words, 11.5) / 2, right - text_width(words, 11.5)))
    return [
        Line(((x, bottom), (x, 66)), strong(5), 1.6),
        Line(((x - 5, y), (x + 5, y)), strong(5), 1.6),
        Text(start, 58, words, 11.5, INK),
    ]


def peak_text(program: Program, use: Use) -> str:
    """Where the peak is: bytes, instruction, tensor, line."""
    i = program.instructions[use.peak]
    where = f"{i.source.name} {i.source.file.rsplit('/', 1)[-1]}:{i.source.line}"
    return f"peak {amount(use.at(use.peak), 'B')} at {use.peak}: {i.kind} of {where}"


def _as_text(program: Program, use: Use) -> str:
    if not program.instructions:
        return "no instructions"
    at = {kind: row[use.peak] for kind, row in use.by_kind.items()}
    at |= {"gaps": use.limit - use.at(use.peak), "workspace": use.workspace}
    parts = ", ".join(f"{kind} {amount(b, 'B')}" for kind, b in at.items() if b)
    return (
        f"{peak_text(program, use)}\n  {parts}: held {amount(use.held, 'B')} ({use.held:,} bytes)"
    )
