"""The Vision Transformer: losses of every layout are those of one rank; the command trains, stops and goes on."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from apps.mnist.data import FILES
from apps.vit.__main__ import main
from apps.vit.model import PATCH, Config, build, patches
from meshmpi.training.metrics import read_metrics
from tests.apps.test_mnist import digits, idx

SMALL = Config(batch=6, layers=2, d_model=8, heads=4, d_ff=12, steps=3)


def losses(mesh: str, layout: str) -> list[float]:
    network, data = build(SMALL, 6, 8, is_training=True), digits(18, 8, 8)
    step = mm.compile(
        network.graph, mm.SimulatedMesh(mesh), layout, fetches=[network.loss], updates=network.updates, kernels="numpy"
    )
    rows = [slice(k, k + 6) for k in (0, 6, 12)]
    return [step(images=data.images[r], labels=data.labels[r])[network.loss] for r in rows]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("rows:2", "batch:rows"),
        ("rows:2;cols:2", "batch:rows;heads:cols;d_ff:cols"),
        ("rows:3", "patches:rows"),
        ("rows:2;cols:2", "d_model:cols;classes:rows"),
    ],
)
def test_losses_are_those_of_one_rank(mesh, layout):
    np.testing.assert_allclose(losses(mesh, layout), losses("all:1", ""), rtol=2e-5)


def test_a_patch_is_a_square_of_the_image():
    image = np.random.default_rng(0).integers(0, 256, (1, 8, 8)).astype(np.uint8)
    with mm.Graph() as graph:
        cut = patches(mm.placeholder("images", "batch:1;height:8;width:8", "uint8"), 8)
    found = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[cut])(images=image)[cut].numpy()
    for n in range(4):
        row, column = PATCH * (n // 2), PATCH * (n % 2)
        square = image[0, row : row + PATCH, column : column + PATCH]
        np.testing.assert_allclose(found[0, n], square.ravel() / 255, rtol=1e-6)


def test_the_command(tmp_path, capsys):
    parts = (digits(24, 8, 8), digits(12, 8, 8, seed=1))
    for name, array in zip(FILES, (*parts[0], *parts[1]), strict=True):
        (tmp_path / name).write_bytes(idx(array))
    sizes = ["--batch", "6", "--layers", "1", "--d-model", "8", "--heads", "2", "--d-ff", "8"]
    options = [*sizes, "--data", str(tmp_path), "--folder", str(tmp_path / "run"), "--resume", "auto"]
    assert main([*options, "--steps", "3"]) == 0
    assert main([*options, "--steps", "5"]) == 0
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5]
    assert all(0 <= r["accuracy"] <= 1 for r in records if "accuracy" in r)
    assert "resumed from" in capsys.readouterr().out
