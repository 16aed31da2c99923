"""docs/porting.md names everything the reference has, and nothing that meshmpi has not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from tests.ops.cases import CASES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "porting.md"
NAMES = Path(__file__).parent / "mesh_tensorflow_names.txt"


def rows(heading: str) -> list[list[str]]:
    """Cells of all table rows below a heading of level 2, without the heads of tables."""
    part = re.split(rf"^## {re.escape(heading)}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    part = re.split(r"^## ", part, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rules = [k for k, line in enumerate(lines) if set(line) <= set("|-")]
    heads = {k - 1 for k in rules} | set(rules)
    return [[cell.strip() for cell in line.strip("|").split("|")] for k, line in enumerate(lines) if k not in heads]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def reference_names() -> list[str]:
    lines = NAMES.read_text().splitlines()
    return [n for line in lines if not line.startswith("#") for n in line.split()]


def test_every_name_of_the_reference_is_there():
    told = {n for row in rows("Names") for span in code(row[0]) for n in re.findall(r"\w+", span)}
    missing = [n for n in reference_names() if n not in told]
    assert not missing, f"docs/porting.md does not say where {missing} are"


def test_no_name_is_told_that_the_reference_has_not():
    known = set(reference_names())
    told = [span for row in rows("Names") for span in code(row[0])]
    assert [n for n in told if n not in known] == []
    assert len(told) == len(dict.fromkeys(told)) >= 350, "each name stands once"


def test_what_is_said_not_to_be_there_is_not():
    homes = (mm, mm.optimize, mm.schedules, mm.transformer)
    lost = [n for row in rows("Names") if row[1] == "none" for n in code(row[0])]
    assert len(lost) > 40
    assert [n for n in lost if any(hasattr(home, n) for home in homes)] == []


def _resolves(name: str) -> bool:
    found = mm
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_every_meshmpi_name_exists():
    names = re.findall(r"\bmm(?:\.[A-Za-z_]\w*)+", PAGE.read_text())
    assert len(set(names)) > 150
    assert [n for n in dict.fromkeys(names) if not _resolves(n)] == []


def test_every_method_exists():
    """`mesh.x`, `step.x`, ... in the second column."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:2")
    mesh = mm.SimulatedMesh("rows:1")
    step = mm.compile(graph, mesh, fetches=[x])
    array = step(x=np.zeros(2, "float32"))[x]
    objects = {
        "mesh": mesh,
        "step": step,
        "graph": graph,
        "layout": mm.Layout("a:rows"),
        "array": array,
        "shape": x.shape,
    }
    found = 0
    for row in rows("Names"):
        for span in code(row[1]):
            for owner, path in re.findall(r"\b(\w+)((?:\.\w+)+)", span):
                if owner not in objects:
                    continue
                value = objects[owner]
                for part in path.split(".")[1:]:
                    assert hasattr(value, part), f"{span}: no {part}"
                    value = getattr(value, part)
                found += 1
    assert found > 10


def test_every_difference_has_its_proof():
    found = rows("Intended differences")
    assert len(found) >= 23
    cases = {c.name for c in CASES}
    for reference, _, proofs in found:
        named = code(proofs)
        assert named, f"nothing proves: {reference}"
        for proof in named:
            if "::" not in proof:
                assert f"row `{proof}`" in proofs and proof in cases, f"no row {proof}"
                continue
            file, test = proof.split("::")
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), proof


@pytest.mark.parametrize("layout", ["a:rows;c:rows", "a:rows+cols;c:cols", "a:rows;c:cols"])
def test_dims_that_no_tensor_holds_together_may_share_an_axis(layout: str):
    """einsum(ab, bc -> a): the reference refuses a and c on one axis."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:5;b:4", "float64")
        w = mm.placeholder("w", "b:4;c:7", "float64")
        y = mm.einsum([x, w], "a:5")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((5, 4)), "w": rng.standard_normal((4, 7))}
    step = mm.compile(graph, mm.SimulatedMesh("rows:2;cols:3"), layout, fetches=[y])
    wanted = np.einsum("ab,bc->a", feeds["x"], feeds["w"])
    np.testing.assert_allclose(step(feeds)[y].numpy(), wanted, rtol=1e-13)
