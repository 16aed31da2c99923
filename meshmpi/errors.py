"""Every error meshmpi raises on purpose, and the one template their messages follow.

A message says what is wrong, with names and numbers, then what would make it right; a last line
says which tensor, made where, or which of the user's lines made the call.  What Python shows of the
stack is told here too: of these errors the frames of the user's code only.
This module knows nothing of tensors, meshes or MPI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

TRACEBACK_VARIABLE = "MESHMPI_TRACEBACK"
"""Set to ``full`` it shows the frames inside meshmpi for meshmpi's own errors too."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))


class MeshmpiError(Exception):
    """Base of all errors raised by meshmpi.

    Args:
        problem: What is wrong, which rule it breaks and why: names and numbers; a sentence.
        remedy: What would make it right; a sentence.
        where: ``"<tensor> made at <file>:<line>"``.  The innermost line outside of meshmpi that led
            here is added where it is another one, or stands alone: ``"the call at <file>:<line>"``.
    """

    def __init__(self, problem: str, remedy: str = "", where: str = ""):
        caller = _calling_line()
        if not where:
            where = f"the call at {caller}" if caller else ""
        elif caller and caller not in where:
            where = f"{where}, used at {caller}"
        text = f"{problem} {remedy}".strip()
        super().__init__(f"{text}\nin {where}" if where else text)
        self.problem, self.remedy, self.where = problem, remedy, where

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks: the parts go, not the finished text as the problem.
        return _same_again, (type(self), self.args, self.__dict__)

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show."""
        import traceback

        tb = without_library(self, self.__traceback__)
        return "".join(traceback.format_exception(type(self), self, tb)).splitlines()


def _same_again(kind: type[MeshmpiError], args: tuple[str], parts: dict[str, Any]) -> MeshmpiError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(parts)
    return error


class ShapeError(MeshmpiError):
    """Dimensions, sizes or data types that do not fit together."""


class LayoutError(MeshmpiError):
    """A layout that names an unknown thing or splits one tensor twice over one mesh axis."""


class MeshError(MeshmpiError):
    """A mesh whose sizes do not match the ranks there are, or an unknown mesh axis."""


class ProgramError(MeshmpiError):
    """An SPMD program that breaks its own rules, or differs between ranks."""


class FeedError(MeshmpiError):
    """A feed that is missing, unknown, misshapen or of the wrong data type."""


class VariableError(MeshmpiError):
    """A variable that is unknown, or made twice with different shapes."""


class CheckpointError(MeshmpiError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class ConfigError(MeshmpiError):
    """A configuration key or value that does not exist or cannot be used."""


class DataError(MeshmpiError):
    """A corpus or vocabulary that is missing, empty or unreadable."""


class RangeError(MeshmpiError):
    """An index outside the dimension it addresses, found by ``mm.compile(..., debug=True)``."""


class HangError(MeshmpiError):
    """Ranks that wait for each other in vain, or a rank that is lost: a report, never raised."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'rows'?"`` for the nearest known name, or the list of known names."""
    import difflib  # late: only a mistake needs it, and `import meshmpi` shall open few files

    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known names: {', '.join(known)}." if known else ""


def _calling_line() -> str:
    """``"<file>:<line>"`` of the innermost frame that is the user's, or nothing."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_ours(file, frame):
            # pytest reads this name in the globals of each frame, and then leaves the frame out
            frame.f_globals.setdefault("__tracebackhide__", _hides)
        elif not _is_pythons(file):
            started_by_us = os.path.basename(file) in ("meshmpi", "meshmpi.exe")
            return "" if started_by_us else place(file, frame.f_lineno)
        frame = frame.f_back
    return ""


def place(file: str, line: int) -> str:
    """``"<file>:<line>"``, and for a cell of a notebook ``"In[3]:<line>"``."""
    ipython = sys.modules.get("IPython")
    if ipython is not None:
        compiler = getattr(ipython.get_ipython(), "compile", None)
        name_of = getattr(compiler, "format_code_name", None)
        cell = name_of(file) if name_of is not None else None
        if cell is not None:  # ("Cell", "In[3]")
            return f"{cell[1]}:{line}"
    return f"{file}:{line}"


def _is_ours(file: str, frame: FrameType) -> bool:
    """Whether a frame is of meshmpi; the module tells of code that dataclasses write, say."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return file.startswith(_PACKAGE) or module == "meshmpi"


def _is_pythons(file: str) -> bool:
    """Whether a source file is of Python itself, and not of a package installed beside it."""
    if file.startswith("<frozen"):
        return True
    return file.startswith(_PYTHON) and not any(name in file for name in _INSTALLED)


def _hides(caught: Any) -> bool:
    """Whether pytest leaves frames of meshmpi out of what it shows of an exception."""
    return isinstance(caught.value, MeshmpiError) and _users_lines_only()


def _users_lines_only() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE) != "full"


def without_library(error: BaseException, tb: TracebackType | None) -> TracebackType | None:
    """A traceback with the frames of the user's code only, ready to be shown.

    It is given back whole where the error is not one of meshmpi's own, where it has no frame of
    the user, or where the variable MESHMPI_TRACEBACK asks for all.  Exceptions inside meshmpi that
    led to the error are taken off it: its message tells what they said.

    Args:
        error: The exception.
        tb: Its traceback.
    """
    if not isinstance(error, MeshmpiError) or not _users_lines_only():
        return tb
    if error.__context__ is not None and _users(error.__context__.__traceback__) is None:
        error.__cause__ = error.__context__ = None
    return _users(tb) or tb


def _users(tb: TracebackType | None) -> TracebackType | None:
    """The entries of a traceback that are the user's; None where there is none."""
    entries: list[TracebackType] = []
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        shell = str(tb.tb_frame.f_globals.get("__name__", "")).startswith("IPython.")
        if not _is_ours(file, tb.tb_frame) and not _is_pythons(file) and not shell:
            entries.append(tb)
        tb = tb.tb_next
    users: TracebackType | None = None
    for one in reversed(entries):
        users = TracebackType(users, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return users


def users_lines(previous: Callable[..., Any]) -> Callable[..., Any]:
    """An exception hook (`sys.excepthook`) that hands on to ``previous`` the user's frames only."""

    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        tb = without_library(error, tb)
        previous(kind, error.with_traceback(tb), tb)

    return show
