"""Scenes as PNG, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from meshmpi.drawing.palette import PAGE, Colour
from meshmpi.errors import ConfigError

if TYPE_CHECKING:
    from meshmpi.drawing.scene import Line, Rect, Scene, Text

DOTS = 100
"""Pixels per inch of the figure, so that a font of 12 pixels has 12 * 72 / DOTS points."""


def png(scene: Scene, scale: float, dark: bool) -> bytes:
    """See `Scene.png`."""
    figure, axes = _canvas(scene, dark)
    for order, s in enumerate(scene.shapes):
        kind = type(s).__name__
        {"Rect": _rect, "Line": _line, "Text": _text}[kind](axes, s, dark, order)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DOTS * scale, metadata={"Software": None})
    return out.getvalue()


def _canvas(scene: Scene, dark: bool) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "PNG pictures need matplotlib.", "Install meshmpi[plot], or write .svg, which does not."
        ) from None
    figure = Figure((max(scene.width, 1) / DOTS, max(scene.height, 1) / DOTS), dpi=DOTS)
    FigureCanvasAgg(figure)
    figure.patch.set_facecolor(_of(PAGE, dark))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, max(scene.width, 1))
    axes.set_ylim(max(scene.height, 1), 0)
    axes.axis("off")
    return figure, axes


def _of(c: Colour | None, dark: bool) -> str:
    return "none" if c is None else c.dark if dark else c.light


def _points(pixels: float) -> float:
    return pixels * 72 / DOTS


def _rect(axes: Any, s: Rect, dark: bool, order: int) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    look = {
        "facecolor": _of(s.fill, dark), "edgecolor": _of(s.stroke, dark),
        "linewidth": _points(s.width) if s.stroke else 0, "zorder": order,
    }  # fmt: skip
    if s.round:
        box = f"round,pad=0,rounding_size={s.round}"
        axes.add_patch(FancyBboxPatch((s.x, s.y), s.w, s.h, boxstyle=box, **look))
    else:
        axes.add_patch(Rectangle((s.x, s.y), s.w, s.h, **look))


def _line(axes: Any, s: Line, dark: bool, order: int) -> None:
    from matplotlib.patches import PathPatch, Polygon
    from matplotlib.path import Path

    from meshmpi.drawing.scene import arrow_head

    points, codes = [s.points[0]], [Path.MOVETO]
    for (x, y), (a, b) in zip(s.points, s.points[1:], strict=False):
        if s.smooth:
            points += [(x, (y + b) / 2), (a, (y + b) / 2), (a, b)]
            codes += [Path.CURVE4] * 3
        else:
            points.append((a, b))
            codes.append(Path.LINETO)
    axes.add_patch(PathPatch(
        Path(points, codes), facecolor=_of(s.fill, dark), edgecolor=_of(s.stroke, dark),
        linewidth=_points(s.width) if s.stroke else 0,
        linestyle=(0, (5, 4)) if s.dashed else "-", zorder=order,
    ))  # fmt: skip
    if s.arrow:
        colour = _of(s.stroke, dark)
        axes.add_patch(Polygon(arrow_head(s), color=colour, linewidth=0, zorder=order))


def _text(axes: Any, s: Text, dark: bool, order: int) -> None:
    anchors = {"start": "left", "middle": "center", "end": "right"}
    axes.text(
        s.x, s.y, s.text.replace("$", r"\$"), fontsize=_points(s.size), color=_of(s.fill, dark),
        ha=anchors[s.anchor], va="center", rotation=90 if s.turned else 0,
        rotation_mode="anchor", fontweight="bold" if s.bold else "normal", zorder=order,
    )  # fmt: skip
