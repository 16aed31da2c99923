"""What the memory of a rank holds while a step runs, instruction by instruction."""

from __future__ import annotations

from meshmpi.amounts import amount
from meshmpi.compiler.passes.memory import MemoryPlan
from meshmpi.drawing.picture import FAINT, INK, LINE, MatplotlibFigure, Picture, noted, points, shortened, soft, strong
from meshmpi.drawing.program import about
from meshmpi.ir.program import Program
from meshmpi.planner.memory_use import KINDS, Use, memory_use
from meshmpi.planner.report import scope_of

COLOURS = {kind: soft(n) for n, kind in enumerate((*KINDS, "workspace"))}
MOST_POINTS = 300
"""Maximum number of points along the step.  In a longer program each point stands for several instructions
and shows their maximum."""


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
        if n and any(row):
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
    parts = ", ".join(f"{kind} {amount(b, 'B')}" for kind, b in use.at_peak.items() if b)
    return f"{peak_text(program, use)}\n  {parts}: held {amount(use.held, 'B')} ({use.held:,} bytes)"
