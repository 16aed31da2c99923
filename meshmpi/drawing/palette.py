"""Colours that differ for colour-blind readers too, each for light and for dark pages.

The hues are those of Okabe and Ito (2008); where they do not suffice, more are chosen far from each
other.  No picture says anything by colour alone: blocks carry the numbers of their ranks,
collectives the names of their axes.
"""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7A00", "#7A5FB8")
"""Blue, orange, green, purple, sky, vermillion; olive and violet for more than six."""
SOFT = (0.30, 0.42)
"""How much of a hue is mixed with the light and the dark page as a ground for text.  The text keeps
a contrast of 4.5 (a test checks it)."""
GROUNDS = 64
"""How many grounds for text can be told apart side by side."""
MORE_SHADES = ((0.12, 0.14), (0.30, 0.30), (0.50, 0.45), (0.70, 0.55), (0.85, 0.70))
"""As `SOFT`, of those that further fills are chosen from."""
GENTLE_TONES, ALL_TONES = ((0.8, 0.85), (0.5, 0.6)), ((1.0, 0.85), (0.55, 0.55))
"""Saturation and value of the hues of further fills: at first, and where these do not suffice."""
APART = 0.045
"""Least distance (`distance`) of the gentle ones."""
READABLE = 4.6
"""Least contrast of a text on a further fill."""
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181c"


Pair = tuple[float, float]


class Colour(NamedTuple):
    """The same colour on a light and on a dark page."""

    light: str
    dark: str


def mixed(hue: str, page: str, share: float) -> str:
    """``share`` of a hue, the rest page."""
    parts = [
        round(int(hue[k : k + 2], 16) * share + int(page[k : k + 2], 16) * (1 - share))
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{p:02x}" for p in parts)


INK = Colour("#1a1d21", "#e8eaed")
FAINT = Colour("#5a626b", "#a4adb8")
LINE = Colour("#9aa3ad", "#6b7580")
PAGE = Colour(LIGHT_PAGE, DARK_PAGE)
PLAIN = Colour("#eceff2", "#2b3138")
"""What is the same on every rank, or has no colour of its own."""


def strong(n: int) -> Colour:
    """Hue number n, for lines and small areas."""
    hue = HUES[n % len(HUES)]
    return Colour(mixed(hue, "#000000", 0.88), mixed(hue, "#ffffff", 0.78))


def soft(n: int) -> Colour:
    """Ground number n for text, the first ones of `HUES`; from `GROUNDS` on that of the page."""
    if n >= len(HUES):
        return _further()[n - len(HUES)] if n < GROUNDS else PAGE
    return Colour(mixed(HUES[n], LIGHT_PAGE, SOFT[0]), mixed(HUES[n], DARK_PAGE, SOFT[1]))


@cache
def _further() -> list[Colour]:
    """Grounds after those of `HUES`, each as far from all before it as can be, soft ones first."""
    taken = [PLAIN, PAGE, *map(soft, range(len(HUES)))]
    gentle = _farthest(taken, _candidates(GENTLE_TONES, MORE_SHADES[:-1]), APART)
    return gentle + _farthest(taken + gentle, _candidates(ALL_TONES, MORE_SHADES), 0.0)


def _farthest(taken: list[Colour], candidates: list[Colour], least: float) -> list[Colour]:
    """Candidates in the order of choice, until all grounds are found or one is too near."""
    out: list[Colour] = []
    places = {c: _both(c) for c in (*taken, *candidates)}
    gap = {c: min(_apart(places[c], places[t]) for t in taken) for c in candidates}
    while len(taken) + len(out) < GROUNDS + 2:  # the page and the plain ground are taken too
        best = max(gap, key=gap.__getitem__)
        if gap[best] < least:
            break
        out.append(best)
        gap = {c: min(g, _apart(places[c], places[best])) for c, g in gap.items()}
    return out


def _candidates(tones: Sequence[Pair], shades: Sequence[Pair]) -> list[Colour]:
    """Hues around the circle in several tones and shades, those on which text can be read."""
    found: list[Colour] = []
    for k, (saturation, value) in itertools.product(range(36), tones):
        parts = colorsys.hsv_to_rgb(k / 36, saturation, value)
        hue = "#" + "".join(f"{round(255 * p):02x}" for p in parts)
        found += [Colour(mixed(hue, LIGHT_PAGE, a), mixed(hue, DARK_PAGE, b)) for a, b in shades]
    return [
        c for c in found
        if min(contrast(INK.light, c.light), contrast(INK.dark, c.dark)) > READABLE
    ]  # fmt: skip


def distance(a: Colour, b: Colour) -> float:
    """How different two colours look on the page where they differ less (Oklab, Ottosson 2020).

    0.02 can just be seen side by side; black and white are 1 apart.
    """
    return _apart(_both(a), _both(b))


def _both(c: Colour) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    return _oklab(c.light), _oklab(c.dark)


def _apart(a: tuple, b: tuple) -> float:
    return min(sum((x - y) ** 2 for x, y in zip(p, q, strict=True)) ** 0.5
               for p, q in zip(a, b, strict=True))  # fmt: skip


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
