"""The picture of README and start page is what the code draws, and what layouts do."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

from docs import draw_idea
from tests.docs.pages import DOCS, ROOT
from tests.drawing.test_blocks import seen_in


@pytest.mark.parametrize("name", draw_idea.LOOKS)
def test_the_picture_is_current(name: str):
    drawn = draw_idea.picture(draw_idea.LOOKS[name])
    there = (draw_idea.FOLDER / f"idea_{name}.svg").read_text()
    assert sorted(seen_in(there)) == sorted(seen_in(drawn.svg())), "the picture is old: python -m docs.draw_idea"
    assert "rank 3: ((4, 8), (3, 6))" in drawn.text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_show_both_backgrounds(page: str):
    shown = re.findall(r"[\w/]*figures/idea_\w+\.svg", (ROOT / page).read_text())
    assert {(DOCS / "figures" / path.rsplit("/")[-1]).exists() for path in shown} == {True}
    assert len(set(shown)) == len(draw_idea.LOOKS)
