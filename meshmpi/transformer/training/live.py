"""A moving line on the terminal while a run works; no part of it gets into a log.

It is drawn to stderr, and only where that is a terminal: under mpirun and in files it is a pipe.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_PERIOD = 0.2  # seconds between two drawings: faster cannot be read, and a terminal is slow
_CLEAR = "\r\x1b[K"


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a line can be drawn over."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False


class LiveLine:
    """The moving line, and the lines of progress that go above it.

    Args:
        mode: "auto": on a terminal; "on": always; "off".
        say: Prints a line of progress.
        stream: To draw to; default stderr.

    Attributes:
        active: Whether anything is drawn.
    """

    def __init__(self, mode: str, say: Callable[[str], None], stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.active = mode == "on" or (mode == "auto" and is_terminal(self._stream))
        self._say, self._drawn, self._next = say, False, 0.0

    def say(self, line: str) -> None:
        """Prints a line of progress in place of the moving line, which is drawn anew later."""
        self.clear()
        self._say(line)

    def show(self, done: int, total: int, text: str) -> None:
        """Draws how far the run is.

        Args:
            done: Steps.
            total: Steps of the run.
            text: Stands behind the bar; cut to the width of the terminal.
        """
        now = time.monotonic()
        if not self.active or now < self._next:
            return
        self._next = now + _PERIOD
        width = shutil.get_terminal_size().columns - 1
        self._write(_CLEAR + bar(done, total, text, width))
        self._drawn = True

    def clear(self) -> None:
        """Takes the line away, so that the terminal is as it was."""
        if self._drawn:
            self._write(_CLEAR)
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal has gone: the run goes on without the line
            self.active = self._drawn = False


def bar(done: int, total: int, text: str, width: int) -> str:
    """``12/100 [##......]  12%  text``, no longer than ``width``."""
    share = done / total if total else 1.0
    head, tail = f"{done}/{total} ", f" {share:4.0%}  {text}"
    cells = max(0, min(30, width - len(head) - len(tail) - 2))
    full = round(share * cells)
    drawn = f"[{'#' * full}{'.' * (cells - full)}]" if cells >= 5 else ""
    return f"{head}{drawn}{tail}"[:width]
