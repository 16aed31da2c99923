"""With which status this interpreter is about to end, asked from an atexit function.

Python tells nobody: `sys.excepthook` is not called for SystemExit, and the exception is gone when
atexit functions run.  So three things are looked at: where the outermost frame stopped, whether an
uncaught exception was reported, and the last SystemExit that was made.
Knows nothing of MPI.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_PY_TP_INIT = 60
"""Py_tp_init of CPython's stable ABI (Include/typeslots.h)."""
_TYPE_WORDS = 50
"""Words of a PyTypeObject to look through; tp_init is word 37 of a usual 64-bit build."""

_UNKNOWN = object()
_last_code: Any = _UNKNOWN
_main_frame: FrameType | None = None
_kept_alive: list[Any] = []


def watch() -> None:
    """Starts looking; from then on `pending` answers.  Further calls do nothing."""
    global _main_frame
    if _main_frame is not None:
        return
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _main_frame = frame
    _wrap_exit()
    if sys.implementation.name == "cpython":
        _record_creation()


def pending() -> int | None:
    """The exit status; None when the program was ended by a SystemExit with an unseen code."""
    _restore_creation()
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


def _note(code: object) -> None:
    global _last_code
    _last_code = code


def _wrap_exit() -> None:
    """`sys.exit` of Python <= 3.11 makes no SystemExit object unless somebody looks at it."""
    original = sys.exit

    def exit(status: Any = None, /) -> Any:
        _note(status)
        original(status)

    exit.__doc__ = original.__doc__
    sys.exit = exit


def _record_creation() -> None:
    """Has CPython report each ``SystemExit(code)``: ``raise SystemExit(3)`` calls no function.

    SystemExit is a static type, so its initialiser can only be replaced in its C structure.  The
    field is found by its known value; where it is not found exactly once nothing is done and
    `pending` answers None in such a case.
    """
    get_slot = ctypes.pythonapi.PyType_GetSlot
    get_slot.restype, get_slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    address = get_slot(SystemExit, _PY_TP_INIT)
    words = (ctypes.c_size_t * _TYPE_WORDS).from_address(id(SystemExit))
    places = [i for i, word in enumerate(words) if word == address]
    if len(places) != 1:
        return
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
    original: Callable[..., int] = kind(address)

    def initialise(self: Any, args: Any, kwargs: int | None) -> int:
        _note(args[0] if len(args) == 1 else args or None)
        return original(self, args, kwargs)

    hook = kind(initialise)
    words[places[0]] = ctypes.cast(hook, ctypes.c_void_p).value or address
    _kept_alive[:] = [hook, words, places[0], address]


def _restore_creation() -> None:
    """Undoes `_record_creation`, before the interpreter frees the function it put there."""
    if _kept_alive:
        _, words, place, address = _kept_alive
        words[place] = address
