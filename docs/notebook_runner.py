"""Runs the notebooks of docs/notebooks in this process and keeps what their cells show.

python -m docs.notebook_runner            runs all and writes the outputs into them
python -m docs.notebook_runner --check    fails when a notebook does not show what its cells make

A cell shows what it prints and, as in Jupyter, the value of its last expression: as a picture where
the value has one (`_repr_svg_`), else as text.  No kernel is needed and nothing is installed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def notebooks() -> list[Path]:
    """All of them, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """The notebook as the JSON that it is."""
    return json.loads(path.read_text())


def source(cell: dict[str, Any]) -> str:
    """Text of a cell; Jupyter may keep it as a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def lines(text: str) -> list[str]:
    """As Jupyter writes them: with their ends, so that a change shows in a diff."""
    return text.splitlines(keepends=True)


def run_cell(code: str, names: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Outputs of a cell, in the notebook format.

    Args:
        code: Its Python code.
        names: What earlier cells defined; changed.
        place: For tracebacks and for the lines that programs name.
    """
    tree = ast.parse(code, place)
    last = tree.body[-1] if tree.body else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), place, "exec"), names)
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
        else:
            exec(compile(tree, place, "exec"), names)
    outputs = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())}
        )
    if value is not None:
        if hasattr(value, "_repr_svg_"):
            svg = lines(value._repr_svg_())
            data = {"image/svg+xml": svg, "text/plain": lines(str(value))}
        else:
            data = {"text/plain": lines(repr(value))}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs that its cells make now."""
    notebook, names = read(path), {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = run_cell(source(cell), names, f"{path.stem}[{number}]")
    return notebook


def as_text(notebook: dict[str, Any]) -> str:
    """As files have it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the outputs."""
    parser = argparse.ArgumentParser(prog="python -m docs.notebook_runner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing, fail when not current")
    options = parser.parse_args(arguments)
    status = 0
    for path in notebooks():
        text = as_text(run(path))
        if text == path.read_text():
            continue
        if options.check:
            print(f"{path.name} is not current. Run: python -m docs.notebook_runner")
            status = 1
        else:
            path.write_text(text)
            print(f"wrote {path.name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
