"""With which status this interpreter is about to end, asked from an atexit function.

Python tells nobody: `sys.excepthook` is not called for SystemExit, and the exception is gone when
atexit functions run.  So three things are looked at: where the outermost frame stopped, whether an
uncaught exception was reported, and the last SystemExit that was made.
Knows nothing of MPI.
"""

from __future__ import annotations

import builtins
import dis
import sys
import threading
from types import FrameType
from typing import Any

_UNKNOWN = object()
_last_code: Any = _UNKNOWN
_main_frame: FrameType | None = None


def watch() -> None:
    """Starts looking; from then on `pending` answers.  Further calls do nothing."""
    global _main_frame
    if _main_frame is not None:
        return
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _main_frame = frame
    note_exits()


def pending() -> int | None:
    """The exit status; None for a SystemExit that nobody saw being made.

    That is one raised in C, or by a ``sys.exit`` that was imported by name before meshmpi.
    """
    if _main_frame is None or _returned(_main_frame):
        return 0
    if hasattr(sys, "last_value"):  # an uncaught exception, reported by somebody else's hook
        return 1
    if _last_code is _UNKNOWN:
        return None
    if _last_code is None:
        return 0
    return _last_code & 0xFF if isinstance(_last_code, int) else 1


def _returned(frame: FrameType) -> bool:
    """Whether the last instruction of a finished frame was a return, and not one that raised."""
    opcode = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else 0
    return dis.opname[opcode].startswith("RETURN")


class _NotedExit(SystemExit):
    """SystemExit that notes its code when it is made."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        global _last_code
        _last_code = args[0] if len(args) == 1 else args or None


_NotedExit.__name__ = _NotedExit.__qualname__ = "SystemExit"


def _exit(status: Any = None, /) -> Any:
    """Exits the interpreter by raising SystemExit(status)."""
    raise _NotedExit(status)


def note_exits() -> None:
    """Has every SystemExit that Python code makes noted.

    ``raise SystemExit(3)`` looks the name up when it runs, so the name is bound to a subclass; what
    catches SystemExit catches it too.  `sys.exit` has to raise the same, as the C function raises
    the plain class.  In ``sys.exit(main())`` both names are looked up before main runs: ranks of a
    job call this as soon as meshmpi is imported.
    """
    builtins.SystemExit = _NotedExit  # type: ignore[misc]
    sys.exit = _exit  # type: ignore[assignment]
