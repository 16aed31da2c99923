"""Sphinx extension: the reference of operations, from docstrings and from lowered examples, and links to it.

The directive ``{operations} graph.ops.structure`` stands for all functions that ``mm`` offers from that
module, so that no page has to list them.  Each function that has an example in
`docs.traffic_examples` also says what the example makes and sends.
"""

from __future__ import annotations

import re
from typing import Any, cast

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.util.docutils import SphinxDirective

from docs.generate_ops import families_of
from docs.traffic import NOTHING, Traffic, by_dims, traffic
from docs.traffic_examples import EXAMPLES
from meshmpi import nn
from meshmpi.graph import ops

AFTER_NAPOLEON = 900
"""Priority of an event handler: later than that of the extension that reads Google style."""
PACKAGES = {"graph": ops, "nn": nn}


class Operations(SphinxDirective):
    """All public functions of one module, in alphabetical order."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Nodes of one ``autofunction`` for each function."""
        module = self.arguments[0]
        found = families_of(PACKAGES[module.split(".")[0]]).get(module)
        if not found:
            raise self.error(f"meshmpi.{module} offers no function to users")
        lines = ["```{eval-rst}"]
        for name, _ in found:
            lines += [f".. autofunction:: meshmpi.{name}", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def describe(code: str, found: Traffic) -> list[str]:
    """What an example makes and sends, as reStructuredText.

    Args:
        code: The example.
        found: What lowering it told.
    """
    inputs = ", ".join(f"{name} {shape}" for name, shape in found.inputs.items())
    made = ", ".join(found.results)
    where = f" for {inputs}" if inputs else ""
    sent = by_dims(found.forward)
    if sent == NOTHING:
        sends = "There is no traffic, whatever is split."
    else:
        sends = f"Elements per rank that collectives take, by the dimension that is split in two: {sent}."
    gradients = "" if found.backward is None else f" With gradients: {by_dims(found.backward)}."
    return [
        ".. rubric:: Shapes and traffic",
        "",
        f"``{code}`` makes {made}{where}. {sends}{gradients}",
        "",
    ]


def add_traffic(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Appends what its example sends to the docstring of a function of ``mm``."""
    short = name.removeprefix("meshmpi.")
    if what == "function" and short in EXAMPLES:
        lines += ["", *describe(EXAMPLES[short], traffic(EXAMPLES[short]))]


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Makes ``mm.name`` and ``mm.name(...)`` on every page a link to the reference of that name."""
    known = cast(PythonDomain, app.env.get_domain("py")).objects
    for literal in list(doctree.findall(nodes.literal)):
        named = re.match(r"mm\.([\w.]+)(\(|$)", literal.astext())
        place = known.get(f"meshmpi.{named[1]}") if named else None
        if place is None or isinstance(literal.parent, nodes.reference):
            continue
        target = f"{app.builder.get_relative_uri(page, place.docname)}#{place.node_id}"
        link = nodes.reference("", "", refuri=target, internal=True)
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("operations", Operations)
    app.connect("doctree-resolved", link_names)
    app.connect("autodoc-process-docstring", add_traffic, priority=AFTER_NAPOLEON)
    return {"parallel_read_safe": True}
