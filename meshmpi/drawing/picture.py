"""Pictures: matplotlib paints them when they are written or shown; as text they need nothing."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure, SubFigure

    MatplotlibFigure: TypeAlias = Figure | SubFigure
else:
    MatplotlibFigure = Any

INK, FAINT, LINE, PAGE = "#1a1d21", "#5a626b", "#9aa3ad", "#ffffff"
PLAIN = "#eceff2"
"""Ground of what is the same on every rank, or has no colour of its own."""
COLOURS = 36
"""Grounds that can be told apart: 12 hues in three lightnesses.  No picture says anything by colour alone."""
DOTS = 100
"""Pixels per inch: a font of 12 pixels has 12 * 72 / DOTS points."""
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which can be searched
    "svg.hashsalt": "meshmpi",  # equal pictures are equal files
    "text.parse_math": False,  # a dollar is a dollar
    "font.family": ["DejaVu Sans", "sans-serif"],
}
CHARACTER = 0.62
"""Width of a character over the size of the font, for DejaVu Sans.  Measured over the texts of these
pictures: 0.58 to 0.61."""
_NOTE = "note:"


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """A colour by how it looks (Oklab, Ottosson 2020): lightness 0 to 1, chroma from gray, hue in degrees."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    clipped = [min(max(c, 0.0), 1.0) for c in linear]
    parts = (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in clipped)
    return "#" + "".join(f"{round(255 * c):02x}" for c in parts)


def _hue(n: int) -> float:
    return (250 + 150 * n) % 360  # 5/12 of the circle from one to the next, so that neighbours differ most


def strong(n: int) -> str:
    """Hue number n, for lines and small areas; neighbours differ in lightness too, for colour-blind readers."""
    return oklch((0.47, 0.70)[n % 2], 0.13, _hue(n))


def soft(n: int, dark: bool = False) -> str:
    """Ground number n for text, on a light or dark page; that of the page from `COLOURS` on."""
    if n >= COLOURS:
        return PAGE
    return oklch(0.34 + 0.05 * (n // 12) if dark else 0.89 - 0.06 * (n // 12), 0.075, _hue(n))


class Colours:
    """A colour for each name, in the order in which they are first asked for, as long as there are colours."""

    def __init__(self, first: Iterable[Hashable] = ()) -> None:
        self.numbers: dict[Hashable, int] = {name: n for n, name in enumerate(dict.fromkeys(first))}

    def soft(self, name: Hashable) -> str:
        return soft(self.numbers.setdefault(name, len(self.numbers)))

    def strong(self, name: Hashable) -> str:
        return strong(self.numbers.setdefault(name, len(self.numbers)))


def mesh_text(mesh: MeshShape) -> str:
    """As "mesh rows:2;cols:3, 6 rank"."""
    return f"mesh {';'.join(f'{name}:{size}' for name, size in mesh.axes)}, {mesh.size} rank"


def text_width(text: str, size: float) -> float:
    """Room that a text needs, in pixels; a little more than it takes."""
    return CHARACTER * size * len(text)


def shortened(text: str, width: float, size: float) -> str:
    """``text``, cut with an ellipsis where it is wider than ``width``."""
    most = int(width / (CHARACTER * size))
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"


@dataclass(frozen=True)
class Picture:
    """A picture, and the same as text.

    Attributes:
        width, height: In pixels.
        title: What it shows.
        text: The same as text.
        paint: Paints on a figure or subfigure of matplotlib.
    """

    width: float
    height: float
    title: str
    text: str
    paint: Callable[[MatplotlibFigure], None]

    def __str__(self) -> str:
        return self.text or self.title

    def _repr_svg_(self) -> str:
        return self.svg()

    def figure(self) -> Figure:
        """The picture as a figure of matplotlib.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(
                "pictures are drawn by the package matplotlib, which is not installed.",
                "Install it with: pip install 'meshmpi[plot]'. As text a picture needs nothing: print it.",
            ) from error
        with rc_context(_LOOK):
            figure = Figure((self.width / DOTS, self.height / DOTS), dpi=DOTS, facecolor=PAGE)
            self.paint(figure)
        return figure

    def svg(self) -> str:
        """The picture as SVG; boxes show their notes when a reader points at them."""
        figure, out = self.figure(), io.StringIO()
        from matplotlib import rc_context

        with rc_context(_LOOK):
            about = dict.fromkeys(("Date", "Creator", "Format", "Type")) | {"Title": self.title}
            figure.savefig(out, format="svg", metadata=about)
        svg = out.getvalue()
        return re.sub(rf'<g id="{_NOTE}([^"]*)">', r"<g><title>\1</title>", svg[svg.index("<svg") :])

    def png(self, scale: float = 2.0) -> bytes:
        """The picture as PNG, with ``scale`` pixels of the file per pixel of the picture."""
        figure, out = self.figure(), io.BytesIO()
        figure.savefig(out, format="png", dpi=DOTS * scale, metadata={"Software": None})
        return out.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture; the ending says how: .svg, .png or .txt.

        Raises:
            ConfigError: The ending is another, or matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".png", ".txt"):
            raise ConfigError(f"'{path.name}' does not say what kind of picture.", "End it in .svg, .png or .txt.")
        if path.suffix == ".png":
            path.write_bytes(self.png())
        else:
            path.write_text(self.svg() if path.suffix == ".svg" else f"{self}\n", encoding="utf-8")


def stacked(pictures: Sequence[Picture], title: str) -> Picture:
    """Pictures below each other."""
    heights = [p.height for p in pictures]

    def paint(figure: MatplotlibFigure) -> None:
        parts = figure.subfigures(len(pictures), 1, squeeze=False, hspace=0, height_ratios=heights)
        for picture, (part,) in zip(pictures, parts, strict=True):
            widths = [picture.width, width - picture.width + 1e-3]  # narrower ones stand on the left
            picture.paint(part.subfigures(1, 2, wspace=0, width_ratios=widths)[0])

    width = max(p.width for p in pictures)
    return Picture(width, sum(heights), title, "\n\n".join(p.text for p in pictures if p.text), paint)


def noted(artist: Artist, note: str) -> None:
    """Gives a shape the note that an SVG shows when a reader points at it."""
    artist.set_gid(f"{_NOTE}{note}")


def points(pixels: float) -> float:
    """Pixels as points, in which matplotlib counts fonts and widths of lines."""
    return pixels * 72 / DOTS


class Canvas:
    """A figure of ``width`` x ``height`` pixels, painted from its upper left corner."""

    def __init__(self, figure: MatplotlibFigure, width: float, height: float) -> None:
        self._axes = figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        edge: str = LINE,
        line: float = 1.0,
        corner: float = 0.0,
        note: str = "",
    ) -> None:
        """A box with its upper left corner at (x, y)."""
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={corner}" if corner else "square,pad=0"
        patch = FancyBboxPatch((x, y), w, h, boxstyle=style, fc=fill, ec=edge, lw=points(line), clip_on=False)
        if note:
            noted(patch, note)
        self._axes.add_patch(patch)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12.0,
        colour: str = INK,
        where: str = "left",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """A line of text whose middle has the height ``y``; ``turned`` runs upwards."""
        self._axes.text(
            x,
            y,
            text,
            fontsize=points(size),
            color=colour,
            ha=where,
            va="center",
            rotation=90 if turned else 0,
            rotation_mode="anchor",
            fontweight="bold" if bold else "normal",
        )

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], reach: float, colour: str) -> None:
        """An arrow that swings out to the left by ``reach``; straight where that is 0."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        (x, y), (a, b) = start, stop
        if reach:
            path = Path([start, (x - reach, y), (a - reach, b), stop], [Path.MOVETO, *[Path.CURVE4] * 3])
        else:
            path = Path([start, stop])
        style = "-|>,head_length=3,head_width=1.6"
        self._axes.add_patch(
            FancyArrowPatch(path=path, arrowstyle=style, color=colour, lw=points(1.1), fill=True, clip_on=False)
        )
