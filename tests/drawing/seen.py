"""What can be seen in a picture: its boxes and its texts, where they are, in pixels."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from meshmpi.drawing import Picture

pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text


class Box(NamedTuple):
    """A box: place of its upper left corner, size, colour, and the note."""

    x: float
    y: float
    w: float
    h: float
    fill: str
    note: str


class Words(NamedTuple):
    """A text: place of its upper left corner, size, and whether it is bold."""

    x: float
    y: float
    w: float
    h: float
    text: str
    bold: bool


def boxes(picture: Picture) -> list[Box]:
    found = []
    for patch in picture.figure().findobj(FancyBboxPatch):
        if patch.get_gid() is not None:
            place = patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()
            found.append(Box(*place, to_hex(patch.get_facecolor()), str(patch.get_gid()).removeprefix("note:")))
    return found


def arrows(picture: Picture) -> list[FancyArrowPatch]:
    return picture.figure().findobj(FancyArrowPatch)


def words(picture: Picture) -> list[Words]:
    figure = picture.figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = []
    unseen = {id(t) for axes in figure.findobj(Axes) for t in _ticks_that_are_not_drawn(axes)}
    for t in figure.findobj(Text):
        if t.get_visible() and t.get_text().strip() and id(t) not in unseen:
            box = t.get_window_extent(canvas.get_renderer())
            place = box.x0, picture.height - box.y1, box.width, box.height
            found.append(Words(*place, t.get_text(), t.get_fontweight() == "bold"))
    return found


def _ticks_that_are_not_drawn(axes: Axes) -> list[Text]:
    if not axes.axison:
        return [*axes.xaxis.findobj(Text), *axes.yaxis.findobj(Text)]
    across, up = axes.get_xlim(), axes.get_ylim()
    outside = [t for t in axes.get_xticklabels() if not across[0] <= t.get_position()[0] <= across[1]]
    return outside + [t for t in axes.get_yticklabels() if not up[0] <= t.get_position()[1] <= up[1]]


def assert_legible(picture: Picture) -> None:
    """No text leaves the picture or covers another."""
    texts = words(picture)
    assert texts
    for t in texts:
        assert t.x >= -1 and t.y >= -1, t
        assert t.x + t.w <= picture.width + 1 and t.y + t.h <= picture.height + 1, t
    for a, b in itertools.combinations(texts, 2):
        apart = a.x + a.w <= b.x + 1 or b.x + b.w <= a.x + 1 or a.y + a.h <= b.y + 2 or b.y + b.h <= a.y + 2
        assert apart, (a, b)


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours by WCAG 2.1: 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    r, g, b = _linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _linear(colour: str) -> list[float]:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def distance(a: str, b: str) -> float:
    """How different two colours look (Oklab, Ottosson 2020): 0.02 can just be seen, black and white are 1 apart."""
    return sum((x - y) ** 2 for x, y in zip(_oklab(a), _oklab(b), strict=True)) ** 0.5


def _oklab(colour: str) -> tuple[float, float, float]:
    r, g, b = _linear(colour)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )
