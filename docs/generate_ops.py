"""Writes docs/ops.md from the code: what each operation means, its gradient, what it sends.

python -m docs.generate_ops            writes docs/ops.md
python -m docs.generate_ops --check    fails when docs/ops.md is not what would be written

The words come from docstrings; what is sent comes from lowering small examples.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import meshmpi as mm
from docs.traffic import by_dims, combined, traffic
from docs.traffic_examples import COMBINATIONS, EXAMPLES, TENSORS
from meshmpi import nn
from meshmpi.graph import Operation, ops

PAGE = Path(__file__).parent / "ops.md"
HEAD = """# Operations

*Generated from the code by `python -m docs.generate_ops`; a test keeps it current.*

This page lists all functions, then the primitives of which they are made. The [reference](api/index.md) describes
each function with its arguments.

Dimensions are matched by name, never by position. Only three things communicate: a sum over a split
dimension, a change of layout (rename, reshape, storage), and an operation along a split dimension.

**How to read the tables of traffic.** Each row is an expression, lowered once for every dimension, which is
split alone over a mesh axis of two ranks. The split dimension is bold; the collectives of the optimised
program follow, with the number of elements that the busiest rank passes to them. *With gradients* is the
traffic of a program that computes the results and the gradients of all tensors and variables in the
expression. A row with `f` holds for each of the functions named in it. The tensors are:
"""
TITLES = {
    "graph.ops.sources": "Sources: feeds, variables, constants, random numbers",
    "graph.ops.contraction": "Contraction",
    "graph.ops.convolution": "Convolution",
    "graph.ops.reductions": "Reductions and running sums",
    "graph.ops.positions": "Index ranges",
    "graph.ops.elementwise": "Elementwise",
    "graph.ops.structure": "Shapes",
    "graph.ops.indexing": "Indexing",
    "graph.ops.placement": "Placement",
    "graph.ops.regions": "Custom gradients",
    "nn.activations": "Activations",
    "nn.functions": "Softmax and related functions",
    "nn.ordering": "Order",
    "nn.control": "Repetition",
    "nn.layers": "Layers and embeddings",
    "nn.normalization": "Normalisation",
    "nn.convolution": "Convolution layers",
    "nn.pooling": "Pooling",
    "nn.attention": "Attention and masks",
    "nn.local_attention": "Local attention",
    "nn.positions": "Positions",
    "nn.experts": "Mixture of experts",
    "nn.losses": "Losses",
    "nn.randomness": "Random layers and sampling",
    "nn.initializers": "Initializers",
}
"""Module -> heading, in the order of the page; others follow under their own name."""
LONGEST_SIGNATURE = 100
"""Characters; of longer ones the first optional arguments are shown."""


def _module(value: Any) -> str:
    """``graph.ops.structure`` for what is defined there."""
    parts = value.__module__.split(".")[1:]
    return ".".join(parts[: 3 if parts[0] == "graph" else 2])


def primitives() -> list[type[Operation]]:
    """Every operation class, in the order of the headings."""

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    found = [c for c in below(Operation) if c.__module__.startswith("meshmpi.")]
    modules = list(dict.fromkeys([*TITLES, *map(_module, found)]))
    return sorted(found, key=lambda c: modules.index(_module(c)))


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
    shown = list(parts)
    while len(", ".join(shown)) > LONGEST_SIGNATURE and ("=" in shown[-1] or shown[-1] == "*"):
        shown.pop()
    return ", ".join(shown if shown == parts else [*shown, "..."])


def _first_sentence(function: Any) -> str:
    summary = (inspect.getdoc(function) or "").split("\n\n")[0]
    return _paragraph(summary)


def _says_of_traffic(function: Any) -> str:
    """What a composed function says of its traffic, if it does."""
    doc = inspect.getdoc(function) or ""
    found = re.search(r"^Lowers:\s(.*?)(?=\n\s*\n|\n[A-Z]\w+:|\Z)", doc, re.DOTALL | re.MULTILINE)
    return _paragraph(found[1]) if found else ""


def families_of(package: ModuleType) -> dict[str, list[tuple[str, Any]]]:
    """Module -> (name, function) of the functions that ``mm`` offers from ``package``."""
    by_module: dict[str, list[tuple[str, Any]]] = {}
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value):
            by_module.setdefault(_module(value), []).append((name, value))
    order = [m for m in dict.fromkeys([*TITLES, *by_module]) if m in by_module]
    return {m: sorted(by_module[m]) for m in order}


def families(package: ModuleType) -> dict[str, list[tuple[str, Any]]]:
    """The same by heading."""
    found = families_of(package)
    return {TITLES.get(m, m.split(".")[-1].capitalize()): found[m] for m in found}


def functions_tables(package: ModuleType) -> str:
    """Two tables per family: what its functions are, and what they send."""
    out = []
    for title, functions in families(package).items():
        out += [f"### {title}\n", "| call | result |", "|---|---|"]
        for name, function in functions:
            says = _says_of_traffic(function)
            result = _first_sentence(function) + (f" *Lowers:* {says}" if says else "")
            out.append(f"| `mm.{name}({_signature(function)})` | {result} |")
        out += ["", *_traffic_table([name for name, _ in functions]), ""]
    return "\n".join(out)


def _traffic_table(names: Sequence[str]) -> list[str]:
    """Rows of examples; functions that send the same in the same example share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if name not in EXAMPLES:
            continue
        found = traffic(EXAMPLES[name])
        pattern = re.sub(rf"\b{name}\(", "f(", EXAMPLES[name], count=1)
        both = "no gradient" if found.backward is None else by_dims(found.backward)
        made = ", ".join(found.results)
        cells = f"{made} | {by_dims(found.forward)} | {both}"
        rows.setdefault((pattern, cells), []).append(name)
    if not rows:
        return []
    out = ["| example | makes | sends | with gradients |", "|---|---|---|---|"]
    for (pattern, cells), same in rows.items():
        code = f"`{EXAMPLES[same[0]]}`"
        if len(same) > 1:
            code = f"`{pattern}` for f = " + ", ".join(f"`{n}`" for n in same)
        out.append(f"| {code} | {cells} |")
    return out


def optimizers_table() -> str:
    """The optimizers."""
    rows = ["| optimizer | update |", "|---|---|"]
    for name in mm.optimize.__all__:
        cls = getattr(mm.optimize, name)
        if cls is not mm.optimize.Optimizer:
            rows.append(f"| `mm.optimize.{name}({_signature(cls)})` | {_first_sentence(cls)} |")
    return "\n".join(rows)


def tensors_table() -> str:
    """The tensors of the examples."""
    rows = [
        f"`{n}[{shape.replace(':', '=').replace(';', ', ')}]`"
        + ("" if dtype == "float32" else f" ({dtype})")
        for n, (shape, dtype) in TENSORS.items()
    ]
    return ", ".join([*rows, "and a variable `v` with the shape of `w`."])


def combinations_table() -> str:
    """What several splits at once, storage layouts and constraints send."""
    rows = ["| example | split | sends, per rank |", "|---|---|---|"]
    for e in COMBINATIONS:
        kept = f", stored as {e.storage}" if e.storage else ""
        rows.append(f"| `{e.code}` | {e.layout}{kept} | {combined(e)} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            tensors_table(),
            "",
            "## Functions made of one primitive\n",
            functions_tables(ops),
            "## Functions and layers composed of several\n",
            functions_tables(nn),
            "### Optimizers\n",
            optimizers_table(),
            "",
            "## Several splits at once\n",
            "On a mesh {rows: 2, cols: 2}; results only.\n",
            combinations_table(),
            "",
            "## Primitives\n",
            "Every function is made of these. [Writing an operation](writing_an_op.md) adds one.\n",
            primitives_table(),
            "",
        ]
    )


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
