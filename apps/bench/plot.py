"""Draws the tables of a run as one picture.  Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.bench.tables import Table

OURS, OTHERS = "#1f6fb2", "#b0b0b0"
COLOURS = ("#1f6fb2", "#e08214", "#7b3294", "#4d9221", "#b2182b", "#878787")
OF_NAMES = {
    "meshmpi": 0,
    "meshmpi, generated C": 0,
    "meshmpi, NumPy": 1,
    "NumPy, out=": 2,
    "plain C": 3,
    "PyTorch": 4,
    "jax.jit": 5,
}
"""Who has which colour, in every panel."""


def _colour(name: str, number: int) -> str:
    return COLOURS[OF_NAMES.get(name, number) % len(COLOURS)]


def draw(tables: Sequence[Table], path: Path) -> str:
    """Writes the picture; returns why not, or an empty string.

    Args:
        tables: Those of other names than the panels', or without rows, are passed over.
    """
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'meshmpi[plot]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = {table.name: table for table in tables if table.rows}
    panels = [(PANELS[name], known[name]) for name in PANELS if name in known]
    if not panels:
        return "no plot: none of the parts that are drawn was measured"
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(7.5 * columns, 4.6 * rows), squeeze=False)
    for (panel, table), axis in zip(panels, axes.flat, strict=False):
        panel(axis, table)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout(h_pad=2.5, w_pad=2.5)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return ""


def _step(axis: Any, table: Table) -> None:
    names, ratios = table.column(table.columns[0]), table.column("step / bare products")
    colours = [OURS if str(n).startswith("meshmpi") else OTHERS for n in names]
    bars = axis.barh(range(len(names)), ratios, color=colours)
    axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_title("Training step / its bare matrix products (less is better)")


def _groups(title: str) -> Callable[[Any, Table], None]:
    """Bars side by side: one group for each row, one colour for each column of numbers."""

    def panel(axis: Any, table: Table) -> None:
        shown = [c for c in table.columns[1:] if " / " not in c]
        rows = [r for r in table.rows if r[0] != "median"]
        width = 0.8 / len(shown)
        for k, name in enumerate(shown):
            at = [n + (k - (len(shown) - 1) / 2) * width for n in range(len(rows))]
            heights = [row[list(table.columns).index(name)] or 0 for row in rows]
            axis.bar(at, heights, width, label=name, color=_colour(name, k))
        axis.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=18, ha="right", fontsize=8)
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
        axis.set_title(title)

    return panel


def _collectives(axis: Any, table: Table) -> None:
    kinds = list(dict.fromkeys(row[0] for row in table.rows))
    styles = {"meshmpi": "-", "mpi4py": "--", "gloo": ":"}
    for kind, colour in zip(kinds, COLOURS, strict=False):
        rows = [row for row in table.rows if row[0] == kind]
        for name, style in styles.items():
            column = list(table.columns).index(name)
            points = [(row[1], row[column]) for row in rows if row[column] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, linewidth=1.4, label=f"{kind}, {name}")
    axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
    axis.legend(fontsize=7, frameon=False, ncols=2)
    axis.set_title("Collectives, 2 ranks")


def _lines(title: str, x: str, y_label: str) -> Callable[[Any, Table], None]:
    """One line for each column of milliseconds."""

    def panel(axis: Any, table: Table) -> None:
        for k, name in enumerate(c for c in table.columns if c.endswith(", ms")):
            points = [(a, b) for a, b in zip(table.column(x), table.column(name), strict=True) if b is not None]
            if points:
                who = name.removesuffix(", ms")
                axis.plot(*zip(*points, strict=True), "o-", color=_colour(who, k), label=who)
        axis.set(xlabel=x, ylabel=y_label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
        axis.set_title(title)

    return panel


def _scaling(axis: Any, table: Table) -> None:
    series = list(dict.fromkeys(row[0] for row in table.rows))
    for name, colour in zip(series, COLOURS, strict=False):
        rows = [row for row in table.rows if row[0] == name]
        first = rows[0]
        axis.plot(
            [row[1] / first[1] for row in rows],
            [row[3] / first[3] for row in rows],
            "o-",
            color=colour,
            label=f"{name}, step",
        )
        axis.plot(
            [row[1] / first[1] for row in rows],
            [row[5] / first[5] for row in rows],
            "x:",
            color=colour,
            label=f"{name}, lowering",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel="changed by this factor", ylabel="time, relative to the first")
    axis.legend(fontsize=8, frameon=False, ncols=2)
    axis.set_title("Scaling of a step and of lowering")


PANELS: Mapping[str, Callable[[Any, Table], None]] = {
    "step": _step,
    "loops": _groups("Loops: nanoseconds per element (less is better)"),
    "products": _groups("Matrix products: GFLOP/s of one core (more is better)"),
    "attention": _lines("Attention forward and backward", "length", "milliseconds"),
    "collectives": _collectives,
    "scaling": _scaling,
}
"""Name of a table -> how it is drawn."""
