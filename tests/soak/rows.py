"""What a part of the soak found: one row a kind of trial, and the table of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One kind of trial.

    Attributes:
        what: The kind, as "SIGKILL, 2 ranks, inside a save".
        tried: Trials made.
        passed: Those that ended as they must.
        note: Figures, or the first failure.
    """

    what: str
    tried: int
    passed: int
    note: str = ""

    @classmethod
    def of(cls, what: str, problems: Sequence[str], note: str = "") -> Row:
        """Trials of one kind, each with what was wrong or empty; the note gives way to the first problem."""
        bad = [p for p in problems if p]
        return cls(what, len(problems), len(problems) - len(bad), bad[0] if bad else note)

    @property
    def failed(self) -> bool:
        """Whether a trial went wrong; none made is a failure as well."""
        return self.tried == 0 or self.passed != self.tried


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one a line."""
    width = max((len(r.what) for r in rows), default=0)
    return "\n".join(
        f"{'FAILED' if r.failed else 'ok':6}  {r.what:{width}}  {r.passed:>6} of {r.tried:>6}  {r.note}".rstrip()
        for r in rows
    )
