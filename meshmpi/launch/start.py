"""Runs a program as a rank of a job, as ``__main__``, and reports its exit status (`outcome`).

The launcher puts the path of this file before the user's words: ``script.py ...``, ``-m module`` or ``-c text``; so
meshmpi need not be importable by the program.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path
from types import TracebackType

_TAKE_VALUE = ("-X", "-W")


def wrapped(argv: list[str]) -> list[str]:
    """Words after ``python`` that run the program ``argv`` by this file.

    Example:
        >>> wrapped(["-u", "train.py", "-n", "3"])[:1], wrapped(["-u", "train.py"])[2:]
        (['-u'], ['train.py'])
    """
    k = 0
    while k < len(argv) and argv[k].startswith("-") and argv[k] not in ("-", "-m", "-c"):
        k += 2 if argv[k] in _TAKE_VALUE else 1
    return [*argv[:k], os.path.abspath(__file__), *argv[k:]]


def is_wrapped(command: list[str]) -> bool:
    """Whether a command line runs its program by this file."""
    return os.path.abspath(__file__) in command


def main(argv: list[str]) -> int:
    """Runs the program; returns the exit status of this rank, or of a child that it has forked."""
    if not _safe_path():
        sys.path.pop(0)  # the folder of this file
    root, added = str(Path(__file__).resolve().parents[2]), False
    if root not in sys.path:
        sys.path.append(root)
        added = True
    from meshmpi.errors import MeshmpiError
    from meshmpi.guard import abort, exit_status, outcome

    if added:
        sys.path.remove(root)
    me = os.getpid()
    try:
        outcome.begin()
    except MeshmpiError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    abort.begin()
    status = _status(argv)
    exit_status.ended(status)
    if status and os.getpid() == me:
        outcome.tell(status)
    return status


def _status(argv: list[str]) -> int:
    """Runs the program and shows, as Python does, why it failed."""
    try:
        _run(argv)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        from meshmpi.guard import ending, outcome

        status, tb = 130 if isinstance(error, KeyboardInterrupt) else 1, _below(error.__traceback__)
        outcome.tell(status)  # before the others are ended
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
        sys.excepthook(type(error), error.with_traceback(tb), tb)
        outcome.tell(status, ending.report(error, tb))
        return status
    return 0


def _below(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        tb = tb.tb_next
    return tb


def _safe_path() -> bool:
    return getattr(sys.flags, "safe_path", False)


def _run(argv: list[str]) -> None:
    import zipfile

    kind, rest = argv[0], argv[1:]
    if kind == "-m":
        sys.argv = rest
        _look_in(os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        _look_in("")
        _execute(rest[0], "<string>")
    elif os.path.isfile(kind) and not zipfile.is_zipfile(kind):
        sys.argv = argv
        _look_in(os.path.dirname(os.path.realpath(kind)))
        _execute(Path(kind).read_bytes(), os.path.abspath(kind))
    else:  # a folder or an archive with a __main__.py
        sys.argv = argv
        runpy.run_path(os.path.abspath(kind), run_name="__main__")


def _look_in(folder: str) -> None:
    if not _safe_path():
        sys.path.insert(0, folder)


def _execute(source: str | bytes, name: str) -> None:
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=__builtins__, __file__=name, __cached__=None)
    if name == "<string>":
        del main_module.__dict__["__file__"]
    sys.modules["__main__"] = main_module  # for good: threads and pickles look things up there
    exec(compile(source, name, "exec", dont_inherit=True), main_module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
