"""Every mistake of the catalogue: five parts in the message, and what it advises works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshmpi.errors import MeshmpiError
from tests.errors.catalogue import CATALOGUE
from tests.errors.catalogue.mistake import FILE, Mistake, error_of, run, words

ROWS = [row for rows in CATALOGUE.values() for row in rows]


def _parts(error: Exception) -> tuple[str, str, str]:
    """Problem, remedy, place; the operators of Python raise its own TypeError and KeyError."""
    if isinstance(error, MeshmpiError):
        return error.problem, error.remedy, error.where
    text, _, where = str(error).partition("\nin ")
    return text, text, where


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_a_mistake_is_told_in_five_parts_and_what_is_advised_works(row: Mistake, tmp_path: Path):
    for folder in ("wrong", "right"):
        (tmp_path / folder).mkdir()
    error = error_of(row, tmp_path / "wrong")
    assert error is not None, "no error"
    assert row.kind in [kind.__name__ for kind in type(error).__mro__], repr(error)
    problem, remedy, where = _parts(error)
    *of_problem, of_remedy = row.parts
    assert len(of_problem) == 3 and all(row.parts)
    for part in of_problem:
        assert part in problem, f"{part!r} is not in: {problem}"
    assert of_remedy in remedy, f"{of_remedy!r} is not in: {remedy}"
    if row.kind != "KeyError":
        assert f"{FILE}:{row.line}" in re.split(r"[\s,]+", where), f"{row.line} is not in: {where}"
        assert str(error).endswith(f"\nin {where}")
    # The program with the remedy applied runs, and the remedy came from the message.
    advised, new = words(remedy), row.new_words
    if row.hint:
        assert row.hint in new, f"{row.hint} is not among {sorted(new)}"
    else:
        assert new & advised, f"of the cure's {sorted(new)} none is in: {remedy}"
    run(row.cured, tmp_path / "right")


def test_the_catalogue_has_no_row_twice():
    assert len({row.title for row in ROWS}) == len({row.text for row in ROWS}) == len(ROWS)
