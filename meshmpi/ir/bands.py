"""Bands: which pairs of two indices take part in a product or sum, by their distance.

Pairs outside a band are not part of a sum *by definition*, whatever their values, so blocks of such pairs may be
skipped by comparing index ranges. Names and integers only.
"""

from __future__ import annotations

from typing import NamedTuple

from meshmpi.dims import Range


class Band(NamedTuple):
    """Pairs (row, column) with ``least <= row - column <= most``.

    Attributes:
        rows: Name of the dim of the first index, as query positions.
        columns: Name of the dim of the second, as memory positions.
        least: Smallest distance; None: any.
        most: Largest distance; None: any.

    Example:
        >>> mm.Band.causal("length", "memory_length").holds(3, 3)
        True
        >>> mm.Band.local("length", "memory_length", window=2).holds(3, 1)
        False
    """

    rows: str
    columns: str
    least: int | None = None
    most: int | None = None

    @classmethod
    def causal(cls, rows: str, columns: str) -> Band:
        """A row sees its own column and those before it."""
        return cls(rows, columns, least=0)

    @classmethod
    def local(cls, rows: str, columns: str, window: int, causal: bool = True) -> Band:
        """A row sees columns less than ``window`` positions away; none behind it if ``causal``."""
        return cls(rows, columns, 0 if causal else 1 - window, window - 1)

    def holds(self, row: int, column: int) -> bool:
        """Whether a pair is in the band."""
        far = row - column
        return (self.least is None or far >= self.least) and (self.most is None or far <= self.most)

    def seen(self, rows: Range, columns: Range) -> Range:
        """The part of ``columns`` that at least one of ``rows`` is paired with; may be empty."""
        return self._between(rows[0], rows[1] - 1, columns) if rows[0] < rows[1] else (columns[0], columns[0])

    def seen_by_all(self, rows: Range, columns: Range) -> Range:
        """The part of ``columns`` that every one of ``rows`` is paired with; may be empty."""
        return self._between(rows[1] - 1, rows[0], columns)

    def _between(self, a: int, b: int, columns: Range) -> Range:
        """The part of ``columns`` from the first that row a is paired with to the last of row b."""
        first, end = columns
        low = first if self.most is None else max(first, a - self.most)
        high = end if self.least is None else min(end, b - self.least + 1)
        low = min(low, end)
        return low, max(low, high)

    def covers(self, rows: Range, columns: Range) -> bool:
        """Whether every pair of two ranges is in the band."""
        return self.seen_by_all(rows, columns) == columns or rows[0] >= rows[1]

    def turned(self) -> Band:
        """The same pairs with the two dims in the other roles."""
        least = None if self.most is None else -self.most
        most = None if self.least is None else -self.least
        return Band(self.columns, self.rows, least, most)

    def __str__(self) -> str:
        low = "" if self.least is None else f"{self.least}<="
        high = "" if self.most is None else f"<={self.most}"
        return f"{low}{self.rows}-{self.columns}{high}"
