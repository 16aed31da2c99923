"""What a row of the catalogue is, and how its program is run."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import meshmpi as mm

FILE = "model.py"
"""The name under which programs of the catalogue are run."""
MESH = "rows:2;cols:2"
HERE = "  # here"
"""Ends the line that the message has to name."""


def words(text: str) -> set[str]:
    """Words and numbers, and ``?`` and ``=``, which alone can cure too."""
    return set(re.findall(r"\w+|[?=]", text))


@dataclass(frozen=True)
class Mistake:
    """A program with one mistake in it, and the five parts that the message has to have.

    Attributes:
        title: What the user did, for a heading.
        program: Run inside ``with mm.Graph() as graph:``, with ``np``, ``mm`` and a simulated
            ``mesh`` of {rows: 2, cols: 2}, in an empty folder.  The line that the message has to
            name ends in ``# here``.
        says: ``"KIND: what | rule | why | remedy"``: the class of the error, and words of the message that name
            the thing it is about, as the user called it; which rule, axis or dimension it breaks; the numbers or
            names that show it; and what to do instead.
        cure: Replacements in the program, by which it runs; one of the words that they put in
            stands in the remedy.
        hint: Such a word where the remedy describes the cure and does not spell it.
    """

    title: str
    program: str
    says: str
    cure: tuple[tuple[str, str], ...]
    hint: str = ""

    @property
    def kind(self) -> str:
        return self.says.partition(": ")[0]

    @property
    def parts(self) -> list[str]:
        """What, rule, why, remedy."""
        return self.says.partition(": ")[2].split(" | ")

    @property
    def text(self) -> str:
        return self.program.strip("\n") + "\n"

    @property
    def cured(self) -> str:
        text = self.text
        for old, new in self.cure:
            assert old in text, f"{self.title}: {old!r} is not in the program"
            text = text.replace(old, new)
        return text

    @property
    def new_words(self) -> set[str]:
        """The words of what the cure puts in."""
        return set[str]().union(*(words(new) for _, new in self.cure))

    @property
    def line(self) -> int:
        """Number of the line that the message has to name."""
        marked = [n for n, line in enumerate(self.text.splitlines(), 1) if line.endswith(HERE)]
        (line,) = marked
        return line


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    old = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(old)


def run(text: str, folder: Path, mesh: mm.SimulatedMesh | None = None) -> dict[str, Any]:
    """Runs a program of the catalogue in an empty folder; returns its names."""
    names: dict[str, Any] = {"__name__": "model", "np": np, "mm": mm, "mesh": mesh or mm.SimulatedMesh(MESH)}
    code = compile(text, FILE, "exec")
    with _inside(folder), mm.Graph() as graph, contextlib.redirect_stdout(io.StringIO()):
        names["graph"] = graph
        exec(code, names)
    return names


def error_of(mistake: Mistake, folder: Path) -> Exception | None:
    """The error of its program, which communicates nothing before; or None."""
    mesh = mm.SimulatedMesh(MESH)
    try:
        run(mistake.text, folder, mesh)
    except Exception as error:
        assert not any(mesh.counters), "communicated before the error"
        return error
    return None
