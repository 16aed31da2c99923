"""Every error that the source raises on purpose says what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "meshmpi"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "errors.py")
BASE = "MeshmpiError"
BUGS_OF_OURS = {"kernels"}
"""Rooms whose `fail` adds the remedy itself: what fails there is a bug of a pass."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _kinds() -> set[str]:
    """Names of all classes that derive from MeshmpiError, from the source alone."""
    parents: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                parents[node.name] = {ast.unparse(b).rpartition(".")[2] for b in node.bases}
    kinds, before = {BASE}, 0
    while len(kinds) > before:
        before = len(kinds)
        kinds |= {name for name, bases in parents.items() if bases & kinds}
    return kinds


def _errors(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Calls that make an error, and the name called."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            fails = name == "fail" and isinstance(node.func, ast.Attribute)
            if name in _kinds() or (fails and path.parent.name not in BUGS_OF_OURS):
                yield node, name


def _remedy(call: ast.Call) -> ast.expr | None:
    named = [k.value for k in call.keywords if k.arg == "remedy"]
    return named[0] if named else call.args[1] if len(call.args) > 1 else None


def test_every_error_has_a_remedy():
    silent = []
    for path in FILES:
        for call, name in _errors(path):
            remedy = _remedy(call)
            empty = isinstance(remedy, ast.Constant) and not remedy.value
            if (remedy is None or empty) and not any(isinstance(a, ast.Starred) for a in call.args):
                silent.append(f"{path}:{call.lineno}: {name} does not say what to do")
    assert silent == []
