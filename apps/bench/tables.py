"""What a bench found: tables, as Markdown and as JSON.  Knows nothing of how it was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Cell = str | float | int | None


class Table(NamedTuple):
    """One table of results.

    Attributes:
        name: Short, for the JSON file and for plots.
        title: What is measured, with the unit.
        columns: Their titles; the first says what a row is.
        rows: A cell that could not be measured is None.
        notes: What a reader must know, and what was left out, each one line.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table with its title above and its notes below."""
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines.append(_line(self.columns))
            lines.append("|" + "---|" * len(self.columns))
            lines += [_line([shown(cell) for cell in row]) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def column(self, title: str) -> list[Cell]:
        """The cells below a title."""
        return [row[list(self.columns).index(title)] for row in self.rows]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def shown(cell: Cell) -> str:
    """A cell as text; numbers with three or four digits."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if cell == 0 or not 0.001 <= abs(cell) < 1e6:
        return f"{cell:.3g}"
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def write(folder: Path, tables: Sequence[Table], about: dict[str, Any]) -> None:
    """Writes ``bench.md`` and ``bench.json``.

    Args:
        folder: Where; made if it is not there.
        tables: In the order of the page.
        about: Machine, versions and settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = ["# meshmpi's bench", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    page = "\n".join(head) + "\n" + "\n".join(table.markdown() for table in tables)
    (folder / "bench.md").write_text(page, encoding="utf-8")
    found = {"about": about, "tables": [table._asdict() for table in tables]}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
