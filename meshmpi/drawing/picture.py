"""Pictures: matplotlib paints them when they are written or shown; as text they need nothing."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
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

# The first hues are those of Okabe and Ito (2008), which colour-blind readers can tell apart too.  No
# picture says anything by colour alone.
INK, FAINT, LINE, PAGE = "#1a1d21", "#5a626b", "#9aa3ad", "#ffffff"
PLAIN = "#eceff2"
"""Ground of what is the same on every rank, or has no colour of its own."""
HUES = ("#00649d", "#ca8c00", "#008b65", "#b46a93", "#4c9ecd", "#bb5300", "#796b00", "#6b54a2")
"""Blue, orange, green, purple, sky, vermillion; olive and violet."""
_GROUNDS = """
#b2d5e8 #f8e2b2 #b2e2d5 #f0d7e5 #cce8f8 #f2cfb2 #dcd7b2 #d7cfea #e46be4 #95ec95 #9595ec #a86be4 #e46b7f
#ec95cf #cca6ac #94b882 #e4bc6b #e4936b #f4bff4 #6b93e4 #b89d82 #d1f4bf #bfbff4 #829db8 #ec9595 #cfec95
#f4bfbf #95ecc0 #82b8ae #e46bbc #de95ec #6ba8e4 #4dcbe4 #df8226 #b680ec #df6326 #a69fc6 #8080ec #deb2f4
#e44d98 #26a1df #f4b2d3 #cb4de4 #e0fae0 #f4f4b2 #9d925c #ec80b6 #ae8b79 #ae79a5 #b2b2f4 #dcc9c5 #c5c5dc
#bfc69f #79ae8b #80b6ec #9fc6c6 #bf9fc6 #80c8ec #e44dcb #ec80da #9fb9c6 #e47f4d #fae0fa #9facc6
"""
GROUNDS = _GROUNDS.split()
"""Grounds for text, light ones of `HUES` first.  Each is as far as possible from all before it (in Oklab),
among those on which text keeps a contrast of 4.6; tests check both."""
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


def strong(n: int) -> str:
    """Hue number n, for lines and small areas."""
    return HUES[n % len(HUES)]


def soft(n: int) -> str:
    """Ground number n for text; that of the page when there are no more."""
    return GROUNDS[n] if n < len(GROUNDS) else PAGE


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
