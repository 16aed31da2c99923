"""Counts what the sources are measured by: ``python -m tests.house [FOLDER]`` prints a table.

Lines are those of Python and of the C that it generates or contains, blank ones and docstrings included.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("graph", "ir", "compiler", "kernels", "runtime", "nn", "files")
SERVICES = ("planner", "checking", "drawing", "checkpoint", "guard", "launch", "doctor")
SERVICES += ("training", "data", "extend.py", "validated.py")
FRONT = ("commands", "__init__.py", "__main__.py", "cli.py")
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
KIND_TEST = re.compile(r"\.kind (?:==|!=|in|not in) |(?:==|!=|(?<!for i) in) [\w.]+\.kind\b|match [\w.]+\.kind\b")


def floor(relative: Path) -> str:
    """The floor of a file of the package: core, services, product or front."""
    first = relative.parts[0]
    if first == "transformer":
        return "product"
    return "services" if first in SERVICES else "front" if first in FRONT else "core"


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names and lengths of all functions, decorators left out and docstrings counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def parameters_typed_any(tree: ast.AST) -> Iterator[str]:
    """Names of the parameters whose annotation is ``Any`` and nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Any":
            yield node.arg


def docstring_lines(tree: ast.AST) -> int:
    """The number of lines of docstrings."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return found


def main(folder: str = "meshmpi") -> None:
    """Prints the figures of one package."""
    package = ROOT / folder
    lines, rooms, counts, long = Counter(), Counter(), Counter(), []
    for path in sorted(p for end in ("py", "c", "h") for p in package.rglob(f"*.{end}")):
        text = path.read_text()
        n = text.count("\n")
        relative = path.relative_to(package)
        lines[floor(relative)] += n
        rooms[relative.parts[0]] += n
        if n > LONGEST_FILE:
            long.append(f"{relative}: {n} lines")
        if path.suffix != ".py":
            continue
        tree = ast.parse(text)
        long += [f"{relative}: {name}() {size} lines" for name, size in functions(tree) if size > LONGEST_FUNCTION]
        anything = list(parameters_typed_any(tree))
        counts["parameters typed Any"] += len(anything)
        counts["mesh: Any"] += anything.count("mesh")
        counts["tests on .kind"] += len(KIND_TEST.findall(text))
        counts["fmt: skip"] += text.count("fmt: skip")
        counts["lines of docstrings"] += docstring_lines(tree)
        counts["docstrings that begin with Of"] += len(re.findall(r'"""Of ', text))
        counts["files"] += 1
    print(f"{sum(lines.values()):7,} lines", *(f"{name} {n:,}" for name, n in lines.most_common()), sep="  ")
    print("  " + "  ".join(f"{name} {n:,}" for name, n in rooms.most_common()))
    for name, n in counts.items():
        print(f"{n:7,} {name}")
    print(
        f"{len(long):7,} files over {LONGEST_FILE} or functions over {LONGEST_FUNCTION} lines", *long, sep="\n        "
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
