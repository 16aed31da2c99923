"""Layouts that an error proposes are legal for the graph at hand: each is tried as it stands."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

import meshmpi as mm
from tests.errors.catalogue import CATALOGUE
from tests.errors.catalogue.mistake import Mistake, error_of

NAMES = "abcd"
PROPOSED = re.compile(r"Legal here: layout '([^']*)'(?: with storage '([^']*)')?\.")


def _planned(graph: mm.Graph, mesh: str, layout: str, storage: str = "") -> mm.LayoutError | None:
    try:
        mm.plan(graph, mesh, layout, storage=storage or None)
    except mm.LayoutError as error:
        return error
    return None


def _chain(stored: str = "") -> mm.Graph:
    """Tensors [a, b], [b, c], [c, d]: what cures one of them may break the next."""
    with mm.Graph() as graph:
        dims = [mm.Dimension(n, 4) for n in NAMES]
        pairs = itertools.pairwise(dims)
        xs = [mm.placeholder(f"x{k}", pair) for k, pair in enumerate(pairs)]
        w = mm.get_variable("w", dims[:2], storage=stored or None)
        mm.add_n([mm.reduce_sum(x) for x in [*xs, w]])
    return graph


@pytest.mark.parametrize("mesh", ["rows:2", "rows:2;cols:2", "rows:2;cols:2;planes:2"])
@pytest.mark.parametrize(("stored", "storage"), [("", ""), ("a:rows", ""), ("", "a:rows;b:rows")])
def test_every_proposal_is_legal(mesh: str, stored: str, storage: str):
    graph, refused, cured = _chain(stored), 0, 0
    axes = ["", "rows", "cols", "row", "rows+cols"]
    for chosen in list(itertools.product(axes, repeat=len(NAMES)))[::7]:
        layout = ";".join(f"{n}:{a}" for n, a in zip(NAMES, chosen, strict=True) if a)
        error = _planned(graph, mesh, layout, storage)
        if error is None:
            continue
        refused += 1
        found = PROPOSED.search(error.remedy)
        if found is not None:
            cured += 1
            kept = storage if found[2] is None else found[2]
            again = _planned(graph, mesh, found[1], kept)
            assert again is None, f"{layout}: {error}\nthen {again}"
    assert refused > 20
    assert cured > refused / 2, "most mistakes have a cure near by"


def test_two_errors_do_not_send_each_other_in_a_circle():
    error = _planned(_chain(), "rows:2;cols:2", "a:rows;b:rows;c:cols")
    assert error is not None and "Legal here: layout 'a:cols;b:rows;c:cols'" in error.remedy


def test_a_name_that_would_be_illegal_is_not_suggested():
    error = _planned(_chain(), "rows:2;cols:2", "a:row;b:rows")
    assert error is not None and "Did you mean" not in error.remedy
    error = _planned(_chain(), "rows:2;cols:2", "a:row;b:cols")
    assert error is not None and "Did you mean 'rows'? Legal here: layout 'a:rows" in error.remedy


@pytest.mark.parametrize("row", CATALOGUE["Layouts and meshes"], ids=lambda row: row.title)
def test_proposals_of_the_catalogue_work(row: Mistake, tmp_path):
    """The layout of the program replaced by the one that its error proposes: no LayoutError."""
    error = error_of(row, tmp_path)
    found = PROPOSED.search(getattr(error, "remedy", ""))
    if found is None:
        return
    texts = re.findall(r'(?:mesh|"rows:2;cols:2"), "([^"]*:[^"]*)"', row.text)
    assert texts, row.text
    cured = row.text.replace(f'"{texts[0]}"', f'"{found[1]}"')
    again = error_of(replace(row, program=cured), tmp_path)
    assert again is None, again
