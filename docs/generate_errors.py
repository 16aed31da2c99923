"""Writes the catalogue in docs/errors.md: each mistake, what is said of it, what cures it.

python -m docs.generate_errors            writes docs/errors.md
python -m docs.generate_errors --check    fails when docs/errors.md is not what would be written

The mistakes are those of tests/errors/catalogue, where the cures are tried; the messages come from
running the programs here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.errors.catalogue import CATALOGUE
from tests.errors.catalogue.mistake import HERE, Mistake, error_of

PAGE = Path(__file__).parent / "errors.md"
BEGIN, END = "<!-- catalogue: python -m docs.generate_errors -->", "<!-- end of the catalogue -->"


def _message(row: Mistake) -> str:
    with tempfile.TemporaryDirectory() as folder:
        error = error_of(row, Path(folder))
    return f"{type(error).__name__}: {error}"


def _changes(row: Mistake) -> Iterator[str]:
    """The lines that the cure changes, as a diff."""
    import difflib

    before, after = (text.replace(HERE, "").splitlines() for text in (row.text, row.cured))
    for line in list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]:
        if not line.startswith("@@"):
            yield line


def _entry(row: Mistake) -> str:
    parts = [f"#### {row.title}", f"```py\n{row.text.replace(HERE, '')}```"]
    parts.append(f"```text\n{_message(row)}\n```")
    parts.append("\n".join(["```diff", *_changes(row), "```"]))
    return "\n\n".join(parts)


def catalogue() -> str:
    """The generated part of the page."""
    parts = [BEGIN]
    for family, rows in CATALOGUE.items():
        parts.append(f"### {family}")
        parts.extend(_entry(row) for row in rows)
    return "\n\n".join([*parts, END])


def page() -> str:
    """The page with a fresh catalogue; the rest as it is written there."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + catalogue() + after


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the page is out of date")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
        return 0
    if made == PAGE.read_text():
        return 0
    sys.stderr.write(f"{PAGE} is out of date: run python -m docs.generate_errors\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
