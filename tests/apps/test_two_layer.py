"""The paper's section 8 example: formulas, predictions and counts agree exactly in every layout."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.two_layer.__main__ import ILLEGAL, legal_layouts, main
from apps.two_layer.formulas import formulas
from apps.two_layer.measure import measure
from apps.two_layer.model import Sizes, build, feeds
from meshmpi.launch.launch import launch

ROOT = Path(__file__).parent.parent.parent
EVEN, UNEVEN = Sizes(8, 16, 32), Sizes(7, 11, 9)
OTHER_LAYOUTS = [
    ("x", "rows:2;cols:2", "batch:rows+cols"),
    ("x", "rows:2;cols:2", "hidden:cols+rows"),
    ("x", "rows:2;cols:3", "io:cols"),
    ("x", "rows:2;cols:3", "io:rows;hidden:cols"),
    ("x", "rows:2;cols:2;planes:2", "batch:planes+rows;hidden:cols"),
]
LAYOUTS = [c for n in (1, 6, 8, 12) for c in legal_layouts(n)] + OTHER_LAYOUTS


@pytest.mark.parametrize("input_gradient", [True, False])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
@pytest.mark.parametrize(("row", "mesh", "layout"), LAYOUTS)
def test_formulas_predictions_and_counts_agree_exactly(row, mesh, layout, sizes, input_gradient):
    m = measure(sizes, mm.SimulatedMesh(mesh), layout, steps=2, input_gradient=input_gradient, dtype="float64")
    for line in m.lines:
        assert line.predicted == line.counted, line
        assert line.formula in (None, line.predicted), line
    assert sum(line.formula is not None for line in m.lines) >= 3


def test_the_values_that_the_paper_counts():
    """Table 1 for b=8, io=16, h=32, as the reference's own counters give it."""

    def values(mesh, layout, input_gradient=True):
        return formulas(EVEN, mm.Layout(layout), mm.MeshShape(mesh), input_gradient).values

    assert values("all:2", "") == {}
    assert values("all:2", "batch:all") == {"all": 2 * 16 * 32 + 32 + 1}
    assert values("all:2", "hidden:all") == {"all": 2 * 8 * 16}
    assert values("all:2", "hidden:all", input_gradient=False) == {"all": 8 * 16}
    three = values("rows:2;cols:2;planes:2", "batch:rows;hidden:cols;io:planes", False)
    assert three == {"cols": 32, "rows": 256 + 16, "planes": 128, "rows+planes": 1}
    # The reference counts over all 8 processors: weights, y, h and its gradient, loss, bias.
    assert 8 * sum(three.values()) == 2048 + 256 + 1024 + 8 + 128


def train_in_numpy(sizes: Sizes, variables: dict[str, np.ndarray], steps: int) -> list[float]:
    """The same training, written down once more."""
    w, bias, v = (variables[name].astype("float64") for name in ("w", "bias", "v"))
    losses = []
    for n in range(steps):
        f = feeds(sizes, n, "float64")
        before = f["x"] @ w + bias
        h = np.maximum(before, 0)
        wrong = h @ v - f["t"]
        losses.append(np.mean(wrong**2))
        dy = 2 * wrong / wrong.size
        dbefore = (dy @ v.T) * (before > 0)
        w, bias, v = (w - 0.125 * f["x"].T @ dbefore, bias - 0.125 * dbefore.sum(0), v - 0.125 * h.T @ dy)
    return losses


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
def test_losses_are_those_of_plain_numpy_in_every_layout(sizes):
    model = build(sizes, dtype="float64")
    initial = dict(mm.compile(model.graph, mm.SimulatedMesh(""), fetches=[model.loss], updates=[]).variables)
    expected = train_in_numpy(sizes, initial, steps=4)
    for _, mesh, layout in LAYOUTS:
        m = measure(sizes, mm.SimulatedMesh(mesh), layout, steps=4, dtype="float64")
        np.testing.assert_allclose(m.losses, expected, rtol=1e-13)


def test_losses_are_bitwise_equal_where_no_sum_is_rounded():
    """On multiples of 1/4 every product and sum is exact, so that their order cannot matter."""
    rng = np.random.default_rng(0)
    losses = set()
    for _, mesh, layout in LAYOUTS:
        model = build(EVEN, dtype="float64")
        step = mm.compile(model.graph, mm.SimulatedMesh(mesh), layout, fetches=model.fetches, updates=[])
        rng = np.random.default_rng(0)
        quarters = {n: rng.integers(-8, 9, s) / 4 for n, s in (("w", (16, 32)), ("v", (32, 16)))}
        step.assign(quarters)
        data = {n: rng.integers(-8, 9, (8, 16)) / 4 for n in ("x", "t")}
        losses.add(step(data)[model.loss])
    assert len(losses) == 1


@pytest.mark.parametrize("layout", ILLEGAL)
def test_illegal_layouts_are_refused(layout):
    with pytest.raises(mm.LayoutError) as e:
        measure(EVEN, mm.SimulatedMesh("all:8"), layout)
    assert "would be split twice" in str(e.value) or "Did you mean" in str(e.value)


def test_command_on_a_simulated_mesh(capsys):
    assert main(["--ranks", "8", "--batch", "8", "--io", "16", "--hidden", "32"]) == 0
    out = capsys.readouterr().out
    assert "b/n" in out and "agree exactly" in out and out.count("LayoutError") == len(ILLEGAL)
    assert "DIFFER" not in out


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_command_on_real_ranks(n):
    arguments = ["-m", "apps.two_layer", "--batch", "9", "--io", "10", "--hidden", "12"]
    done = launch(n, arguments, timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agree exactly") == 1 and "DIFFER" not in done.stdout
    assert re.search(rf"{8 if n == 1 else n} (real|simulated) ranks", done.stdout)
    assert ("real" in done.stdout.splitlines()[0]) == (n > 1)
