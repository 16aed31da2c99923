"""Signals that ask a run to stop: noted when they arrive, acted on between steps.

Batch systems send SIGTERM before they kill, and SIGUSR1 when told to warn earlier.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While it is open, the signals only set ``name``; afterwards they act as before.

    Attributes:
        name: Of the first signal that arrived, such as "SIGTERM"; empty before.
    """

    def __init__(self) -> None:
        self.name = ""
        self._previous: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: object) -> None:
        self.name = self.name or signal.Signals(number).name

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread set handlers; elsewhere the process keeps its own.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
