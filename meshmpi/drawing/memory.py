"""What the memory of a rank holds while a step runs, instruction by instruction."""

from __future__ import annotations

from dataclasses import dataclass

from meshmpi.amounts import amount
from meshmpi.compiler.passes.memory import MemoryPlan, Sharing, aligned_bytes
from meshmpi.drawing.picture import FAINT, INK, LINE, MatplotlibFigure, Picture, noted, points, shortened, soft, strong
from meshmpi.drawing.program import about
from meshmpi.ir.program import Program
from meshmpi.planner.report import gradient_values, scope_of

KINDS = ("parameters", "slots", "feeds", "gradients", "activations")
COLOURS = {kind: soft(n) for n, kind in enumerate((*KINDS, "workspace"))}
MOST_POINTS = 300
"""Maximum number of points along the step.  In a longer program each point stands for several instructions
and shows their maximum."""


@dataclass(frozen=True)
class Use:
    """Bytes of the rank at the origin during each instruction.

    Attributes:
        by_kind: Kind of `KINDS` -> bytes during each instruction.
        peak: Number of the first instruction during which most is in use.
        limit: Bytes that are allocated: arena with its gaps, variables, feeds; no workspace.
        workspace: Scratch memory of kernels, which comes on top.
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


def draw_memory(program: Program, plan: MemoryPlan, title: str = "", width: float = 860.0) -> Picture:
    """Memory over the step as areas on top of each other, the peak marked with its line.

    The workspace of kernels, allocated once for all instructions, is a band on top of the rest.

    Args:
        program: The program.
        plan: Its memory plan (`meshmpi.runtime.compiled.memory_plan`).
        title: Above the picture.
        width: Of the picture, in pixels.
    """
    use = memory_use(program, plan)
    title = title or "Memory of a rank over one step"
    return Picture(width, 380.0, title, _as_text(program, use), lambda figure: _paint(figure, program, use, title))


def _paint(figure: MatplotlibFigure, program: Program, use: Use, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes, n = figure.add_axes((0.1, 0.13, 0.875, 0.54)), len(program.instructions)
    figure.text(0.016, 0.95, title, fontsize=points(14), fontweight="bold", color=INK, va="center")
    figure.text(0.016, 0.89, about(program), fontsize=points(11), color=FAINT, va="center")
    count = min(n, MOST_POINTS)
    bins = [range(k * n // count, (k + 1) * n // count) for k in range(count)]
    edges = [ks.start for ks in bins] + [n]
    below = [0] * len(edges)
    for kind, row in use.by_kind.items():
        if any(row):
            tops = [b + max(row[k] for k in ks) for b, ks in zip(below, bins, strict=False)]
            tops.append(tops[-1])
            area = axes.fill_between(edges, below, tops, step="post", fc=COLOURS[kind], ec=LINE, lw=0.5, label=kind)
            noted(area, f"{kind}: up to {amount(max(row), 'B')}")
            below = tops
    words = f"held {amount(use.held, 'B')}"
    if use.workspace:
        words += f": values {amount(use.limit, 'B')}, workspace {amount(use.workspace, 'B')}"
        band = axes.axhspan(use.limit, use.held, fc=COLOURS["workspace"], ec=LINE, lw=0.5, label="workspace")
        noted(band, f"workspace: {amount(use.workspace, 'B')}")
    axes.axhline(use.held, color=FAINT, lw=0.8, ls="--")
    if n:
        axes.axvline(use.peak + 0.5, color=strong(1), lw=1.2)
    axes.set(xlim=(0, max(n, 1)), ylim=(0, max(use.held, 1) * 1.06))
    peak = shortened(peak_text(program, use), figure.bbox.width * 0.87, 11.5)
    for y, line in ((0.765, words), (0.71, peak)):
        figure.text(0.1, y, line, fontsize=points(11.5), color=INK, va="center")
    axes.set_xlabel("instruction", fontsize=points(11.5), color=FAINT)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.tick_params(labelsize=points(11), labelcolor=FAINT, color=LINE)
    axes.spines[:].set_color(LINE)
    if axes.get_legend_handles_labels()[0]:
        at = {"loc": "center left", "bbox_to_anchor": (0.09, 0.825), "ncols": 6}
        figure.legend(**at, fontsize=points(11.5), frameon=False, handlelength=1.2, labelcolor=INK)


def peak_text(program: Program, use: Use) -> str:
    """Where the peak is: bytes, instruction, scope, line."""
    if not program.instructions:
        return "no instructions"
    i = program.instructions[use.peak]
    where = " ".join(filter(None, (scope_of(i), i.source.short)))
    return f"peak {amount(use.at(use.peak), 'B')} at {use.peak}: {i.kind} of {where}"


def _as_text(program: Program, use: Use) -> str:
    if not program.instructions:
        return peak_text(program, use)
    at = {kind: row[use.peak] for kind, row in use.by_kind.items()}
    at |= {"gaps": use.limit - use.at(use.peak), "workspace": use.workspace}
    parts = ", ".join(f"{kind} {amount(b, 'B')}" for kind, b in at.items() if b)
    return f"{peak_text(program, use)}\n  {parts}: held {amount(use.held, 'B')} ({use.held:,} bytes)"
