"""Colours on a white page.

The first hues are those of Okabe and Ito (2008), which colour-blind readers can tell apart too.  No
picture says anything by colour alone: blocks carry the numbers of their ranks, collectives the names
of their axes.
"""

from __future__ import annotations

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
"""Grounds for text, light ones of `HUES` first.  Each was chosen as far as possible from all before it (in
Oklab), among those on which text keeps a contrast of 4.6; tests check both."""


def strong(n: int) -> str:
    """Hue number n, for lines and small areas."""
    return HUES[n % len(HUES)]


def soft(n: int) -> str:
    """Ground number n for text; from the last one on that of the page."""
    return GROUNDS[n] if n < len(GROUNDS) else PAGE
