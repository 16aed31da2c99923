"""What accompanies a run and never ends it: predictions, reports, pictures, event files.

A failure is reported in one line and the run goes on, with the exit status that it would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LONGEST = 300  # characters of a line about a failure


class Extras:
    """Does what a run can do without.

    Args:
        say: Takes the line about a failure.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failed: dict[str, None] = {}

    def __call__(self, what: str, do: Callable[[], T]) -> T | None:
        """The result of ``do``; None where it fails, or where ``what`` has failed before.

        Args:
            what: Names it in the line about a failure: "no loss curve: ...".
            do: Not collective: it may fail on one rank alone.
        """
        if what in self._failed:
            return None
        try:
            return do()
        except Exception as error:
            self._failed[what] = None
            told = " ".join(str(error).split())
            kind = type(error).__name__
            self._say(f"no {what}, the run goes on without: {kind}: {told}"[:_LONGEST])
            return None
