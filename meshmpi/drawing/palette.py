"""Colours that differ for colour-blind readers too, each for light and for dark pages.

The hues are those of Okabe and Ito (2008).  No picture says anything by colour alone: blocks carry
the numbers of their ranks, collectives the names of their axes.
"""

from __future__ import annotations

from typing import NamedTuple

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7A00", "#7A5FB8")
"""Blue, orange, green, purple, sky, vermillion; olive and violet for more than six."""
SHADES = ((0.30, 0.42), (0.55, 0.53), (0.16, 0.26))
"""How much of a hue is mixed with the light and the dark page: the first eight fills, the next
eight, ...  Text on them keeps a contrast of 4.5 (a test checks it)."""
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181c"


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
    """Hue number n, as a ground for text."""
    hue, (light, dark) = HUES[n % len(HUES)], SHADES[n // len(HUES) % len(SHADES)]
    return Colour(mixed(hue, LIGHT_PAGE, light), mixed(hue, DARK_PAGE, dark))


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours by WCAG 2.1: 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
