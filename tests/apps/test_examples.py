"""The examples give what plain NumPy gives, on one rank, simulated ranks and real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.examples import contraction, kmeans, power_iteration
from meshmpi.launch.launch import launch

FOLDER = Path(contraction.__file__).parent
ROOT = FOLDER.parent.parent
MOST_LINES = 30
MESHES = ["rows:1;cols:1", "rows:2;cols:2", "rows:3;cols:2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_contraction(mesh):
    rng = np.random.default_rng(0)
    ei, ea = rng.uniform(-2, -1, contraction.OCCUPIED), rng.uniform(1, 2, contraction.VIRTUAL)
    sizes = (contraction.AUXILIARY, contraction.OCCUPIED, contraction.VIRTUAL)
    b = rng.standard_normal(sizes) / 10
    direct = np.einsum("pia,pjb->iajb", b, b)
    exchange = direct.transpose(0, 3, 2, 1)
    gaps = ei[:, None, None, None] + ei[:, None] - ea[:, None, None] - ea
    expected = np.sum(direct * (2 * direct - exchange) / gaps)
    np.testing.assert_allclose(contraction.main(mm.SimulatedMesh(mesh)), expected, rtol=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_power_iteration(mesh):
    noise = np.random.default_rng(0).standard_normal((power_iteration.SIZE, power_iteration.SIZE))
    matrix = noise + noise.T + 30 * np.outer(noise[0], noise[0]) / power_iteration.SIZE
    expected = np.linalg.eigvalsh(matrix)
    assert abs(expected[-1]) > abs(expected[0])
    found = power_iteration.main(mm.SimulatedMesh(mesh))
    np.testing.assert_allclose(found, expected[-1], rtol=1e-9)


def test_kmeans_finds_the_clusters_in_every_mesh():
    spreads = [kmeans.main(mm.SimulatedMesh(mesh)) for mesh in MESHES]
    np.testing.assert_allclose(spreads, spreads[0], rtol=1e-12)
    # Each point is away from its centre by one standard deviation in every coordinate.
    variance = spreads[0] / (kmeans.POINTS * kmeans.COORDINATES)
    assert 0.8 < variance < 1.1


def test_examples_on_real_ranks():
    done = launch(4, ["-m", "apps.examples"], timeout_seconds=60, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["contraction", "power_iteration", "kmeans"]
