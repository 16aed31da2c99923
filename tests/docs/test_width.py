"""Code on pages is not wider than the column of the site; output and messages are wrapped there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, blocks_of, name_of

WIDEST = 100
"""Characters, as in docs/ruff.toml."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_fits_the_page(page: Path):
    wide = [
        f"{name_of(page)}:{block.line + n}: {len(line)} characters: {line}"
        for block in blocks_of(page)
        if block.info[0] != "text"
        for n, line in enumerate(block.text.splitlines())
        if len(line) > WIDEST
    ]
    assert not wide, "\n".join(wide)


def test_output_is_wrapped_on_the_site():
    style = (DOCS / "_static/site.css").read_text()
    assert ".highlight-text pre { white-space: pre-wrap;" in style
