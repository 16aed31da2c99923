"""Sphinx extension: docstrings of meshmpi are plain text in Google style, not reStructuredText.

What means something in reStructuredText and not in plain text (``|x|``, a lone ``*``) is escaped
before the docstring is read, and forms that Napoleon does not know are written out.
"""

from __future__ import annotations

import itertools
import re
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

import meshmpi

BEFORE_NAPOLEON, AFTER_NAPOLEON = 100, 800
"""Priorities of event handlers around that of the extension that reads Google style (500)."""
VALUES = ("property", "attribute", "data")
"""Napoleon takes what stands before a colon in their docstrings for a type; here it is text."""
_LITERAL = re.compile(r"(``.+?``|`[^`]+`|\*\w[\w ]*\*(?!\w))(\w?)")
_BROKEN_NAMES = re.compile(r"^( +(?:\w+, )*\w+),\n +((?:\w+, )*\w+: )", re.MULTILINE)
_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$")


def escaped(line: str) -> str:
    """A line of plain text as reStructuredText.

    Names in backticks become links where ``mm`` has them, else literals; ``|`` and a lone ``*``
    mean themselves.  Lines of examples stay.
    """
    if line.lstrip().startswith((">>>", "...")):
        return line
    # plain, literal, the letter behind it, plain, ...: see re.split.
    parts = _LITERAL.split(line)
    plain = [re.sub(r"([|*])", r"\\\1", part) for part in parts[::3]]
    marked = [
        _marked(literal) + (f"\\ {letter}" if letter else "")
        for literal, letter in zip(parts[1::3], parts[2::3], strict=True)
    ]
    return "".join(a + b for a, b in itertools.zip_longest(plain, marked, fillvalue=""))


def _marked(literal: str) -> str:
    if literal.startswith(("``", "*")):
        return literal
    name = literal.strip("`").removeprefix("mm.")
    public = name.isidentifier() and not name.startswith("_") and hasattr(meshmpi, name)
    if public and not isinstance(getattr(meshmpi, name), ModuleType):
        return f":py:obj:`{name} <meshmpi.{name}>`"
    return f"``{literal.strip('`')}``"


def joined(text: str) -> str:
    """Lists of argument names that go over a line's end, in one line."""
    while (changed := _BROKEN_NAMES.sub(r"\1, \2", text)) != text:
        text = changed
    return text


def each_attribute(lines: list[str]) -> list[str]:
    """In sections of attributes, ``a, b: text`` becomes one entry for each name."""
    out: list[str] = []
    inside, k = False, 0
    while k < len(lines):
        line = lines[k]
        if line and not line.startswith(" "):
            inside = line == "Attributes:"
        found = _NAMES.match(line) if inside else None
        k += 1
        if not found:
            out.append(line)
            continue
        indent, names, text = found.groups()
        rest = []
        while k < len(lines) and lines[k].startswith(indent + " "):
            rest.append(lines[k])
            k += 1
        for name in names.split(", "):
            out += [f"{indent}{name}: {text}", *rest]
    return out


class Docstrings:
    """The two event handlers; what the first puts aside the second puts back."""

    def __init__(self) -> None:
        self._aside: dict[str, list[str]] = {}

    def before(
        self, app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
    ) -> None:
        """Makes reStructuredText of plain text."""
        text = [escaped(line) for line in joined("\n".join(lines)).split("\n")]
        lines[:] = each_attribute(text)
        if what in VALUES:
            self._aside[name] = list(lines)
            lines[:] = []

    def after(
        self, app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
    ) -> None:
        """Puts the text of properties and attributes back."""
        if name in self._aside:
            lines[:] = self._aside.pop(name)


def named_defaults(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str
) -> tuple[str, str] | None:
    """Default values that are built-in functions, by their names."""
    if not signature:
        return None
    return re.sub(r"<built-in function (\w+)>", r"\1", signature), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    docstrings = Docstrings()
    app.connect("autodoc-process-docstring", docstrings.before, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-docstring", docstrings.after, priority=AFTER_NAPOLEON)
    app.connect("autodoc-process-signature", named_defaults)
    return {"parallel_read_safe": True}
