"""docs/errors.md shows every mistake of the catalogue, with the message of today."""

from __future__ import annotations

from docs.generate_errors import PAGE, page
from tests.errors.catalogue import CATALOGUE


def test_the_page_is_current():
    assert page() == PAGE.read_text(), "run python -m docs.generate_errors"


def test_the_page_has_every_mistake():
    text = PAGE.read_text()
    for family, rows in CATALOGUE.items():
        assert f"### {family}\n" in text
        assert all(f"#### {row.title}\n" in text for row in rows)
