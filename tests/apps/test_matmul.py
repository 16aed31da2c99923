"""The paper's Appendix B: volumes by formula, prediction and count agree in every partitioning."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshmpi as mm
from apps.matmul.__main__ import main
from apps.matmul.formulas import Sizes, formulas, partitionings
from apps.matmul.measure import measure
from meshmpi.launch.launch import launch

ROOT = Path(__file__).parent.parent.parent
EVEN, UNEVEN = Sizes(16, 24, 8), Sizes(7, 11, 9)
CUBE = "rows:2;cols:2;planes:2"
MESHES = [CUBE, "rows:2;cols:3", "all:6", "rows:3;cols:2;planes:2"]


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])
@pytest.mark.parametrize("mesh", MESHES)
def test_formulas_predictions_and_counts_agree_exactly(mesh: str, sizes: Sizes):
    for name, layout in partitionings(mm.MeshShape(mesh)):
        m = measure(sizes, mm.SimulatedMesh(mesh), layout)
        for line in m.lines:
            assert line.formula == line.predicted == line.counted, f"{name}: {line}"
        assert len(m.lines) == 5 + sum(bool(v.over) for v in m.formulas.volumes)
        assert m.error < 1e-13, name


@pytest.mark.parametrize("layout", ["i:cols+rows", "j:planes;k:rows", "i:planes;j:cols;k:rows"])
def test_any_other_layout_agrees_too(layout: str):
    m = measure(UNEVEN, mm.SimulatedMesh(CUBE), layout, dtype="float32")
    assert all(line.agrees for line in m.lines), m.lines
    assert m.error < 1e-5


def test_volumes_of_the_2x2x2_mesh_in_numbers():
    """Elements reduced per rank for i = 16, j = 24, k = 8, worked out on paper."""

    def elements(layout: str) -> list[int]:
        found = formulas(EVEN, mm.Layout(layout), mm.MeshShape(CUBE), 8)
        return [v.elements for v in found.volumes]  # of C [i, k], dA [i, j], dB [j, k]

    every = "rows+cols+planes"
    assert elements("") == [0, 0, 0]
    assert elements(f"i:{every}") == [0, 0, 24 * 8]
    assert elements(f"j:{every}") == [16 * 8, 0, 0]
    assert elements(f"k:{every}") == [0, 16 * 24, 0]
    assert elements("i:rows;k:cols+planes") == [0, (16 // 2) * 24, 24 * (8 // 4)]
    assert elements("i:rows;j:cols+planes") == [(16 // 2) * 8, 0, (24 // 4) * 8]
    assert elements("j:rows;k:cols+planes") == [16 * (8 // 4), 16 * (24 // 2), 0]
    assert elements("i:rows;j:cols;k:planes") == [8 * 4, 8 * 12, 12 * 4]


def test_bytes_are_those_of_a_ring():
    volumes = formulas(EVEN, mm.Layout("i:rows;k:cols+planes"), mm.MeshShape(CUBE), 8).volumes
    assert [(v.ranks, v.bytes_sent) for v in volumes] == [(1, 0), (4, 2 * 3 * 192 * 8 // 4), (2, 2 * 1 * 48 * 8 // 2)]


def test_more_dimensions_send_less():
    """On a cube of equal sizes: 1-D sends 2 (n - 1) / n s^2, 2-D and 3-D ever less."""
    s = 64
    sent = {
        name: sum(v.bytes_sent for v in formulas(Sizes(s, s, s), mm.Layout(layout), mm.MeshShape(CUBE), 8).volumes)
        for name, layout in partitionings(mm.MeshShape(CUBE))
    }
    assert sent["1-D, i split"] == 2 * 7 * s * s * 8 // 8
    assert sent["3-D"] == 3 * (s // 2) ** 2 * 8
    assert sent["3-D"] < sent["2-D, j whole"] < sent["1-D, i split"]


def test_command_on_a_simulated_mesh(capsys):
    assert main(["--i", "12", "--j", "10", "--k", "9"]) == 0
    out = capsys.readouterr().out
    assert out.count("replicated over") == 3 + 6 + 3 and "agree exactly" in out
    assert "DIFFER" not in out and "8 simulated ranks" in out


@pytest.mark.matrix
@pytest.mark.parametrize(("n", "mesh"), [(8, CUBE), (6, "rows:2;cols:3")])
def test_command_on_real_ranks(n: int, mesh: str):
    arguments = ["-m", "apps.matmul", "--mesh", mesh, "--i", "9", "--j", "14", "--k", "10"]
    done = launch(n, arguments, timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agree exactly") == 1 and "DIFFER" not in done.stdout
    assert f"{n} real ranks" in done.stdout
