"""A picture as a list of shapes, written as SVG or PNG.

Lengths are pixels, y grows downwards.  SVG needs the standard library only and follows the reader's
light or dark page; PNG is drawn by matplotlib, if it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Union

from meshmpi.drawing.palette import INK, LINE, PAGE, Colour
from meshmpi.errors import ConfigError

FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
CHARACTER = 0.62
"""Width of a character over the size of the font: the mean of DejaVu Sans, the widest of the list.
Measured over the texts of these pictures: 0.58 to 0.61."""


def text_width(text: str, size: float) -> float:
    """Room that a text needs, a little more than it takes."""
    return CHARACTER * size * len(text)


def shortened(text: str, width: float, size: float) -> str:
    """``text``, cut with an ellipsis where it is wider than ``width``."""
    most = int(width / (CHARACTER * size))
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"


@dataclass(frozen=True)
class Rect:
    """A box; ``note`` is shown when a reader points at it."""

    x: float
    y: float
    w: float
    h: float
    fill: Colour | None = None
    stroke: Colour | None = LINE
    width: float = 1.0
    round: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Straight lines, or a smooth curve, through points; closed and filled where ``fill`` is."""

    points: tuple[tuple[float, float], ...]
    stroke: Colour | None = LINE
    width: float = 1.0
    fill: Colour | None = None
    dashed: bool = False
    smooth: bool = False
    arrow: bool = False
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text; ``y`` is its middle, ``anchor`` start, middle or end; ``turned`` upwards."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: Colour = INK
    anchor: str = "start"
    bold: bool = False
    turned: bool = False


Shape = Union[Rect, Line, Text]


@dataclass
class Scene:
    """Shapes in the order in which they are painted.

    Attributes:
        width, height: Of the picture.
        title: What it shows, for readers who cannot see it.
        text: The same as text.
    """

    width: float = 0.0
    height: float = 0.0
    title: str = ""
    text: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Paints on top of what is there."""
        self.shapes.extend(shapes)

    def put(self, other: Scene, x: float, y: float) -> None:
        """All shapes of another picture, its corner at (x, y)."""
        self.shapes.extend(_moved(s, x, y) for s in other.shapes)

    def __str__(self) -> str:
        return self.text or self.title

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(self, standalone: bool = True) -> str:
        """The picture as SVG; inside a page (not standalone) the page brings `style`."""
        size = f'width="{_n(self.width)}" height="{_n(self.height)}"'
        view = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        name = f' xmlns="http://www.w3.org/2000/svg" {size}' if standalone else f" {size}"
        parts = [f'<svg{name} {view} role="img" font-family="{FONT}">']
        parts.append(f"<title>{escape(self.title)}</title>")
        if standalone:
            parts.append(f"<style>{style(colours_of(self))}</style>")
            parts.append(f'<rect width="100%" height="100%" class="{_class(PAGE)}"/>')
        parts += [_svg(s) for s in self.shapes]
        return "\n".join([*parts, "</svg>"])

    def png(self, scale: float = 2.0, dark: bool = False) -> bytes:
        """The picture as PNG.

        Args:
            scale: Pixels of the file per pixel of the picture.
            dark: For a dark page.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        from meshmpi.drawing.raster import png

        return png(self, scale, dark)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture; the ending says how: .svg, .png or .txt."""
        path = Path(path)
        if path.suffix == ".png":
            path.write_bytes(self.png())
        elif path.suffix in (".svg", ".txt"):
            path.write_text(self.svg() if path.suffix == ".svg" else f"{self}\n", encoding="utf-8")
        else:
            raise ConfigError(
                f"'{path.name}' does not say what kind of picture.", "End it in .svg, .png or .txt."
            )


def stacked(scenes: Sequence[Scene], title: str, gap: float = 18.0) -> Scene:
    """Pictures below each other."""
    out = Scene(max((s.width for s in scenes), default=0.0), 0.0, title)
    for s in scenes:
        out.put(s, 0, out.height)
        out.height += s.height + gap
    out.height = max(out.height - gap, 0.0)
    out.text = "\n\n".join(s.text for s in scenes if s.text)
    return out


def _moved(s: Shape, x: float, y: float) -> Shape:
    if isinstance(s, Line):
        return replace(s, points=tuple((a + x, b + y) for a, b in s.points))
    return replace(s, x=s.x + x, y=s.y + y)


# -- SVG -------------------------------------------------------------------------------------------


def colours_of(scene: Scene) -> list[Colour]:
    """Every colour of a picture, the page's first."""
    found: dict[Colour, None] = {PAGE: None}
    for s in scene.shapes:
        for c in (s.fill, getattr(s, "stroke", None)):
            if c is not None:
                found[c] = None
    return list(found)


def style(colours: Sequence[Colour]) -> str:
    """Style rules of colours: those of the light page, and of the dark one where that is wanted."""
    light = "".join(_rules(c, c.light) for c in colours)
    dark = "".join(_rules(c, c.dark) for c in colours)
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _rules(c: Colour, value: str) -> str:
    name = _class(c)
    return f".{name}{{fill:{value}}}.s{name}{{stroke:{value}}}"


def _class(c: Colour) -> str:
    return f"c{c.light[1:]}{c.dark[1:]}"


def _n(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def _paint(fill: Colour | None, stroke: Colour | None, width: float) -> str:
    names = [_class(fill)] if fill else []
    names += [f"s{_class(stroke)}"] if stroke else []
    text = f' class="{" ".join(names)}"' if names else ""
    text += "" if fill else ' fill="none"'
    return text + (f' stroke-width="{_n(width)}"' if stroke else "")


def _svg(s: Shape) -> str:
    if isinstance(s, Text):
        turn = f' transform="rotate(-90 {_n(s.x)} {_n(s.y)})"' if s.turned else ""
        bold = ' font-weight="bold"' if s.bold else ""
        look = f'text-anchor="{s.anchor}" class="{_class(s.fill)}"{bold}{turn}'
        place = f'x="{_n(s.x)}" y="{_n(s.y)}" dy=".35em" font-size="{_n(s.size)}"'
        return f"<text {place} {look}>{escape(s.text)}</text>"
    note = f"<title>{escape(s.note)}</title>" if s.note else ""
    paint = _paint(s.fill, s.stroke, s.width)
    if isinstance(s, Rect):
        corner = f' rx="{_n(s.round)}"' if s.round else ""
        place = f'x="{_n(s.x)}" y="{_n(s.y)}" width="{_n(s.w)}" height="{_n(s.h)}"'
        return f"<rect {place}{corner}{paint}>{note}</rect>"
    dash = ' stroke-dasharray="5 4"' if s.dashed else ""
    drawn = f'<path d="{_curve(s)}"{paint}{dash}>{note}</path>'
    if not s.arrow or s.stroke is None:
        return drawn
    corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in arrow_head(s))
    return f'{drawn}<polygon points="{corners}" class="{_class(s.stroke)}"/>'


def _curve(s: Line) -> str:
    (x, y), *rest = s.points
    parts = [f"M{_n(x)} {_n(y)}"]
    for a, b in rest:
        if s.smooth:
            middle = (y + b) / 2
            parts.append(f"C{_n(x)} {_n(middle)} {_n(a)} {_n(middle)} {_n(a)} {_n(b)}")
        else:
            parts.append(f"L{_n(a)} {_n(b)}")
        x, y = a, b
    return "".join(parts) + ("Z" if s.fill else "")


def arrow_head(s: Line, size: float = 7.0) -> list[tuple[float, float]]:
    """The corners of the head at the last point; a smooth line ends straight down or up."""
    (a, b), (x, y) = s.points[-2:]
    dx, dy = (0.0, y - b) if s.smooth else (x - a, y - b)
    length = (dx * dx + dy * dy) ** 0.5 or 1.0
    dx, dy = dx / length * size, dy / length * size
    return [(x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)]
