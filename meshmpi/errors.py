"""All deliberate errors of meshmpi, and the template of their messages.

A message says what is wrong, with names and numbers, then the remedy; the last line says which tensor, made where, or
which of the user's lines made the call. Tracebacks are cut to the frames of the user's code.
"""

from __future__ import annotations

import copyreg
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

TRACEBACK_VARIABLE = "MESHMPI_TRACEBACK"
"""Environment variable: ``full`` keeps the frames inside meshmpi in tracebacks of its own errors."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))


class MeshmpiError(Exception):
    """Base of all errors raised by meshmpi.

    Args:
        problem: What is wrong, which rule it breaks and why: names and numbers; a sentence.
        remedy: What would make it right; a sentence.
        where: ``"<tensor> made at <file>:<line>"``.  The user's innermost line is appended if it is
            another one; without ``where`` it stands alone: ``"the call at <file>:<line>"``.
    """

    def __init__(self, problem: str, remedy: str = "", where: str = ""):
        caller = users_line()
        if not where:
            where = f"the call at {caller}" if caller else ""
        elif caller and caller not in where:
            where = f"{where}, used at {caller}"
        text = f"{problem} {remedy}".strip()
        super().__init__(f"{text}\nin {where}" if where else text)
        self.problem, self.remedy, self.where = problem, remedy, where

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks; the default would pass the finished text as the problem.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show."""
        import traceback

        tb = without_library(self, self.__traceback__)
        return "".join(traceback.format_exception(type(self), self, tb)).splitlines()


class ShapeError(MeshmpiError):
    """Dimensions, sizes or data types that do not fit together."""


class ArgumentError(ShapeError, TypeError):
    """An argument of the wrong kind, or a missing one.

    It is also a TypeError, which Python's protocols (operators, iteration, conversion) require.
    """


class MissingNameError(MeshmpiError, AttributeError):
    """A name that a module or an object does not have."""


class LayoutError(MeshmpiError):
    """A layout that has an unknown name, or that splits one tensor twice over one mesh axis.

    Attributes:
        conflict: The dimensions that cannot be split over a mesh axis, and that axis, if this is the error.
    """

    conflict: tuple[tuple[str, ...], str] | None = None


class MeshError(MeshmpiError):
    """A mesh whose size is not the number of ranks, or an unknown mesh axis."""


class ProgramError(MeshmpiError):
    """An SPMD program that breaks its own rules, or differs between ranks."""


class FeedError(MeshmpiError):
    """A feed that is missing, unknown, misshapen or of the wrong data type."""


class VariableError(MeshmpiError):
    """A variable that is unknown, or made twice with different shapes."""


class CheckpointError(MeshmpiError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class TrainingError(MeshmpiError):
    """A training that cannot go on; raised on all ranks."""


class ConfigError(MeshmpiError):
    """A configuration key or value that does not exist or cannot be used."""


class DataError(MeshmpiError):
    """A corpus or vocabulary that is missing, empty or unreadable."""


class RangeError(MeshmpiError):
    """An index outside the dimension it addresses, found by ``mm.compile(..., debug=True)``."""


class HangError(MeshmpiError):
    """A deadlock or a lost rank.  Used in reports; never raised."""


class UnusedUpdatesWarning(UserWarning):
    """A program compiled without the updates of its graph, though this was not asked for."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the user's line that led here; Python shows it once for each line."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and _is_ours(frame.f_back.f_code.co_filename, frame.f_back):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level + 1)


def suggest(name: str, known: Iterable[str]) -> str:
    """``"Did you mean 'rows'?"`` with the nearest known name, else a list of all known names."""
    import difflib  # imported late, so that `import meshmpi` opens fewer files

    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known names: {', '.join(known)}." if known else "There are none of that kind here."


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a module that is asked for a name that it does not have."""
    if name.startswith("_"):  # Python's own questions
        return AttributeError(f"module '{module}' has no attribute '{name}'")
    return MissingNameError(f"module '{module}' has no '{name}'.", suggest(name, known))


def users_line() -> str:
    """``"<file>:<line>"`` of the user's innermost frame, or an empty string."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_ours(file, frame) and not _is_pythons(file):
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
    """Whether a frame is of meshmpi.  Code generated by dataclasses is recognised by its module."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return file.startswith(_PACKAGE) or module == "meshmpi"


def _is_pythons(file: str) -> bool:
    """Whether a source file belongs to Python itself rather than to an installed package."""
    if file.startswith("<frozen") or calls_back(file):
        return True
    return file.startswith(_PYTHON) and not any(name in file for name in _INSTALLED)


def calls_back(file: str) -> bool:
    """Whether a source file is of NumPy, which calls our objects while a user's line runs."""
    return f"{os.sep}site-packages{os.sep}numpy{os.sep}" in file


def without_library(error: BaseException, tb: TracebackType | None) -> TracebackType | None:
    """A traceback with the frames of the user's code only, ready to be shown.

    It is returned unchanged if the error is not one of meshmpi's own, if no frame is the user's, or
    if MESHMPI_TRACEBACK is ``full``.  Exceptions inside meshmpi that led to the error are removed
    from it, since its message says the same.
    """
    if not isinstance(error, MeshmpiError) or os.environ.get(TRACEBACK_VARIABLE) == "full":
        return tb
    if error.__context__ is not None and _users(error.__context__.__traceback__) is None:
        error.__cause__ = error.__context__ = None
    return _users(tb) or tb


def _users(tb: TracebackType | None) -> TracebackType | None:
    """The entries of a traceback that are the user's, or None."""
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
    """An exception hook (`sys.excepthook`) that passes the user's frames only to ``previous``."""

    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        tb = without_library(error, tb)
        previous(kind, error.with_traceback(tb), tb)

    return show
