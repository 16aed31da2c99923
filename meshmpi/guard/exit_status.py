"""The exit status of this rank, if meshmpi runs the program (`launch.start`, `cli`).

Python does not pass the status to hooks or atexit functions. Under plain ``mpirun python script.py`` the status of a
``sys.exit`` is unknown, and the rank counts as one that left in order.
"""

from __future__ import annotations

LOST = 69
"""Exit status of a job that has lost a rank: not an error of the program, worth another start.
EX_UNAVAILABLE of sysexits.h."""
_known: int | None = None


def ended(status: int) -> None:
    """Notes the status, where whoever runs the program has seen its end."""
    global _known
    _known = status


def pending() -> int | None:
    """The exit status; None where nobody has seen how the program ends."""
    return _known
