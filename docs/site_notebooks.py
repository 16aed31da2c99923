"""Sphinx extension: notebooks are pages, with the outputs that are kept in them.

A notebook becomes MyST Markdown: its text as it is, its code as blocks, its pictures in place.
Nothing is executed here; `docs.notebook_runner` does that, and a test compares.
"""

from __future__ import annotations

import json
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

from docs.notebook_runner import source

FENCE = "`" * 4


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"{FENCE}text\n{''.join(output['text']).rstrip()}\n{FENCE}"
    data = output["data"]
    if "image/svg+xml" in data:
        # A blank line would end the HTML block of Markdown.
        picture = "".join(line for line in data["image/svg+xml"] if line.strip())
        return f'<div class="picture">\n{picture.strip()}\n</div>'
    return f"{FENCE}text\n{''.join(data['text/plain']).rstrip()}\n{FENCE}"


def as_markdown(notebook: dict[str, Any]) -> str:
    """The notebook as a page."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
        elif cell["cell_type"] == "code":
            parts.append(f"{FENCE}python\n{source(cell)}\n{FENCE}")
            parts += [_output(o) for o in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


class NotebookParser(MystParser):
    """Reads a notebook where Sphinx reads a page."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse(as_markdown(json.loads(inputstring)), document)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
