"""Docstrings are plain text; what the site makes of them."""

from __future__ import annotations

import pytest

pytest.importorskip("sphinx", reason="the extra docs is not installed")

from docs.site_docstrings import each_attribute, escaped, joined
from docs.site_notebooks import as_markdown
from docs.site_reference import describe
from docs.traffic import traffic


@pytest.mark.parametrize(
    ("plain", "marked"),
    [
        ("|x| * 2", r"\|x\| \* 2"),
        ("body(*inputs) and *this*", r"body(\*inputs) and *this*"),
        ("the `all_to_all`s of it", r"the ``all_to_all``\ s of it"),
        ("as `conv2d` does", "as :py:obj:`conv2d <meshmpi.conv2d>` does"),
        ("``a * b`` stays", "``a * b`` stays"),
        ("see `step.cost`", "see ``step.cost``"),
        (">>> a * b | c", ">>> a * b | c"),
    ],
)
def test_plain_text(plain: str, marked: str):
    assert escaped(plain) == marked


def test_names_over_two_lines_are_joined():
    assert joined("    x, y,\n        z: Text.\n") == "    x, y, z: Text.\n"
    assert joined("    a, b and c,\n    d: no") == "    a, b and c,\n    d: no"


def test_attributes_get_an_entry_each():
    lines = ["Attributes:", "    mesh, layout: Texts,", "        as given.", "    n: Number."]
    assert each_attribute(lines) == [
        "Attributes:",
        "    mesh: Texts,",
        "        as given.",
        "    layout: Texts,",
        "        as given.",
        "    n: Number.",
    ]
    assert each_attribute(["Args:", "    a, b: Text."]) == ["Args:", "    a, b: Text."]


def test_an_example_says_shapes_and_traffic():
    code = "einsum([x, w], [a, c])"
    (text,) = [line for line in describe(code, traffic(code)) if code in line]
    assert "makes [a=8, c=16] for x [a=8, b=12], w [b=12, c=16]" in text
    assert "**b**: all_reduce 128" in text and "With gradients" in text
    assert "no traffic, whatever is split" in " ".join(describe("exp(x)", traffic("exp(x)")))


def test_a_notebook_as_a_page():
    picture = {"data": {"image/svg+xml": ["<svg>\n", "\n", "</svg>"]}, "output_type": "x"}
    printed = {"output_type": "stream", "text": ["1\n"]}
    page = as_markdown(
        {
            "cells": [
                {"cell_type": "markdown", "source": ["# Title\n", "text"]},
                {"cell_type": "code", "source": "print(1)", "outputs": [printed, picture]},
            ]
        }
    )
    assert page == (
        "# Title\ntext\n\n````python\nprint(1)\n````\n\n````text\n1\n````\n\n"
        '<div class="picture">\n<svg>\n</svg>\n</div>\n'
    )
