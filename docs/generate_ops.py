"""Writes docs/ops.md from the code: what each operation means, its gradient, what it sends.

python -m docs.generate_ops            writes docs/ops.md
python -m docs.generate_ops --check    fails when docs/ops.md is not what would be written

The words come from docstrings; the last table comes from lowering small examples.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import meshmpi as mm
from docs.traffic_examples import EXAMPLES, traffic_row
from meshmpi import nn, ops
from meshmpi.graph import Operation

PAGE = Path(__file__).parent / "ops.md"
HEAD = """# Operations

*Generated from the code by `python -m docs.generate_ops`; a test keeps it current.*

Dimensions are matched by name, never by position. "Lowers" says which local instructions and
which collectives an operation becomes; the instruction kinds are listed in the docstring of
`meshmpi/program.py`. Nothing communicates but what is said here: a sum over a split dimension, a
change of layout (rename, reshape, storage), and operations along a split dimension.
"""
TITLES = {
    "sources": "Sources: feeds, variables, constants, random numbers",
    "contraction": "Contraction",
    "reductions": "Reductions",
    "elementwise": "Elementwise",
    "structure": "Shapes",
    "indexing": "Indexing",
    "placement": "Placement",
    "activations": "Activations",
    "functions": "Softmax and its kin",
    "layers": "Layers",
    "attention": "Attention",
    "losses": "Losses",
    "randomness": "Random layers and sampling",
    "initializers": "Initializers",
}
"""Module -> heading, in the order of the page."""


def primitives() -> list[type[Operation]]:
    """Every operation class, in the order of the headings."""

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    found = [c for c in below(Operation) if c.__module__.startswith("meshmpi.")]
    modules = list(TITLES)
    return sorted(found, key=lambda c: modules.index(c.__module__.split(".")[-1]))


def _paragraph(text: str) -> str:
    """One line, with the quotes of docstrings turned into those of Markdown, fit for a table."""
    text = " ".join(text.split()).replace("``", "`")
    return text.replace("|", "\\|")


def sections(doc: str) -> dict[str, str]:
    """Parts of an operation's docstring: "" (what it means), Gradient, Lowers, Source."""
    marked = re.split(r"\b(Gradient[^:.]{0,30}|Its gradient|Lowers|Source|Shapes|Args):\s", doc)
    parts = {"": _paragraph(marked[0])}
    for label, text in zip(marked[1::2], marked[2::2], strict=True):
        key = label.split()[0]
        prefix = _paragraph(label[len(key) :]).strip()
        text = _paragraph(text)
        parts[key] = f"{prefix}: {text}" if prefix else text
    return parts


def primitives_table() -> str:
    """The table of primitives."""
    rows = ["| primitive | meaning | gradient | lowers to |", "|---|---|---|---|"]
    for cls in primitives():
        parts = sections(inspect.getdoc(cls) or "")
        gradient = parts.get("Gradient", "")
        if not gradient:
            gradient = "yes" if cls.grad is not Operation.grad else "—"
        shapes = f" {parts['Shapes']}" if "Shapes" in parts else ""
        row = (f"`{cls.__name__}`", parts[""] + shapes, gradient, parts.get("Lowers", "—"))
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def _signature(function: Any) -> str:
    parts = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        stars = "*" * ((p.kind is p.VAR_POSITIONAL) + 2 * (p.kind is p.VAR_KEYWORD))
        default = "" if p.default is p.empty else f"={p.default!r}"
        parts.append(f"{stars}{p.name}{default}")
    return ", ".join(parts)


def _first_sentence(function: Any) -> str:
    summary = (inspect.getdoc(function) or "").split("\n\n")[0]
    return _paragraph(summary)


def _traffic(function: Any) -> str:
    """What a composed function says of its traffic, if it does."""
    doc = inspect.getdoc(function) or ""
    found = re.search(r"^Lowers:\s(.*?)(?=\n\s*\n|\n[A-Z]\w+:|\Z)", doc, re.DOTALL | re.MULTILINE)
    return _paragraph(found[1]) if found else ""


def functions_tables(package: ModuleType) -> str:
    """One table per module of the functions that ``mm`` offers from ``package``."""
    by_module: dict[str, list[Any]] = {}
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value):
            by_module.setdefault(value.__module__.split(".")[-1], []).append((name, value))
    out = []
    for module in TITLES:
        if module not in by_module:
            continue
        out += [f"### {TITLES[module]}\n", "| call | result |", "|---|---|"]
        for name, function in sorted(by_module[module]):
            traffic = _traffic(function)
            result = _first_sentence(function) + (f" *Lowers:* {traffic}" if traffic else "")
            out.append(f"| `mm.{name}({_signature(function)})` | {result} |")
        out.append("")
    return "\n".join(out)


def optimizers_table() -> str:
    """The optimizers."""
    rows = ["| optimizer | update |", "|---|---|"]
    for name in mm.optimize.__all__:
        cls = getattr(mm.optimize, name)
        if cls is not mm.optimize.Optimizer:
            rows.append(f"| `mm.optimize.{name}({_signature(cls)})` | {_first_sentence(cls)} |")
    return "\n".join(rows)


def traffic_table() -> str:
    """What examples send, by lowering them."""
    rows = ["| example | split | sends, per rank |", "|---|---|---|"]
    for e in EXAMPLES:
        kept = f", stored as {e.storage}" if e.storage else ""
        rows.append(f"| `{e.code}` | {e.layout}{kept} | {traffic_row(e)} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD, "## Primitives\n", primitives_table(), "",
            "## Functions made of one primitive\n", functions_tables(ops),
            "## Functions and layers composed of several\n", functions_tables(nn),
            "### Optimizers\n", optimizers_table(), "",
            "## What is sent\n",
            "Each row is lowered when this page is generated, on a mesh {rows: 2, cols: 2} with"
            " `x[a=8, b=12]`,\n`w[b=12, c=16]`, `n[a=8]` (integers below 12) and a variable"
            " `v[b=12, c=16]`. Numbers are elements that one\nrank hands to the collective over the"
            " named mesh axes.\n",
            traffic_table(), "",
        ]
    )  # fmt: skip


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate_ops", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when not current")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print("docs/ops.md is not current. Run: python -m docs.generate_ops")
    return 1


if __name__ == "__main__":
    sys.exit(main())
