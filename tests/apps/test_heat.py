"""The heat equation: bit-equal to one rank and to NumPy in every layout, halos as predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.heat.__main__ import main
from apps.heat.formulas import default_layout, halo_elements
from apps.heat.model import SECOND_DIFFERENCE, Problem, build, initial
from apps.heat.run import on_one_rank, run
from meshmpi.launch.launch import launch

ROOT = Path(__file__).parent.parent.parent
STEPS = 4
LAYOUTS = [
    ("rows:2;cols:2", "x:rows;y:cols"),
    ("rows:2;cols:3", "x:rows;y:cols"),
    ("rows:2;cols:3", "y:cols+rows"),
    ("rows:2;cols:3", "x:rows+cols"),
    ("rows:4;cols:1", "x:rows;y:cols"),
    ("rows:2;cols:2", "y:rows"),
]
GRIDS = [(12, 18), (13, 11), (5, 4)]
"""Even and uneven blocks; of the last some are empty, and thinner than what order 4 reads."""


def by_numpy(problem: Problem, steps: int) -> np.ndarray:
    """The same time steps on one array, written down once more."""
    u, reach = initial(problem).astype(np.float64), problem.reach
    weights = SECOND_DIFFERENCE[problem.order]
    for _ in range(steps):
        edge = {"mode": "wrap"} if problem.boundary == "periodic" else {"mode": "constant"}
        wide, y = np.pad(u, reach, **edge), np.zeros_like(u)
        for axis, n in enumerate(u.shape):
            for k, w in weights.items():
                for o in {k, -k}:
                    cut = [slice(reach, reach + m) for m in u.shape]
                    cut[axis] = slice(reach + o, reach + o + n)
                    y += w * wide[tuple(cut)]
        u = u + problem.rate * y
    return u


def check(problem: Problem, mesh: str, layout: str) -> None:
    result = run(problem, mm.SimulatedMesh(mesh), layout, STEPS, "numpy")
    one = on_one_rank(problem, STEPS, "numpy")
    if problem.method == "shift":
        assert np.array_equal(result.u, one), f"{problem} '{layout}'"
    np.testing.assert_allclose(result.u, one, rtol=0, atol=1e-14)
    np.testing.assert_allclose(result.u, by_numpy(problem, STEPS), rtol=0, atol=1e-13)
    for h in result.halos:
        assert h.agrees, f"{problem} '{layout}' on {mesh}: {h}"
    assert max(h.counted for h in result.halos) <= result.busiest


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("boundary", ["periodic", "fixed"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_two_dims_in_every_layout(mesh: str, layout: str, boundary: str, order: int):
    for sizes in GRIDS:
        check(Problem(sizes, boundary, order), mesh, layout)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("boundary", ["periodic", "fixed"])
@pytest.mark.parametrize("layout", ["x:rows;y:cols;z:planes", "z:cols+planes;x:rows", "y:planes"])
def test_three_dims(layout: str, boundary: str, order: int):
    for sizes in [(6, 8, 4), (5, 3, 7)]:
        check(Problem(sizes, boundary, order), "rows:2;cols:2;planes:2", layout)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_the_stencil_as_one_convolution(mesh: str, layout: str, order: int):
    for sizes in GRIDS:
        check(Problem(sizes, "fixed", order, "conv"), mesh, layout)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("layout", ["x:rows;y:cols;z:planes", "z:cols+planes;x:rows"])
def test_the_stencil_as_one_convolution_in_three_dims(layout: str, order: int):
    check(Problem((6, 5, 7), "fixed", order, "conv"), "rows:2;cols:2;planes:2", layout)


def test_halos_are_two_faces_per_split_dim_and_step():
    """Order 2, 24 x 12 cells over 2 x 3 ranks, periodic: worked out on paper."""
    problem, mesh = Problem((24, 12)), mm.MeshShape("rows:2;cols:3")
    layout = mm.Layout(default_layout(problem, mesh))
    for rank in range(6):
        sent = halo_elements(problem, layout, mesh, mesh.coordinates(rank))
        assert sent == {"rows": 2 * (12 // 3), "cols": 2 * (24 // 2)}
    wide = Problem((24, 12), order=4)
    sent = halo_elements(wide, layout, mesh, mesh.coordinates(0))
    assert sent == {"rows": 2 * (1 + 2) * 4, "cols": 2 * (1 + 2) * 12}


def test_a_fixed_boundary_sends_nothing_outwards():
    problem, mesh = Problem((24, 12), "fixed"), mm.MeshShape("rows:2;cols:3")
    layout = mm.Layout("x:rows;y:cols")
    corner = halo_elements(problem, layout, mesh, {"rows": 0, "cols": 0})
    middle = halo_elements(problem, layout, mesh, {"rows": 0, "cols": 1})
    assert corner == {"rows": 4, "cols": 12} and middle == {"rows": 4, "cols": 2 * 12}


@pytest.mark.parametrize("order", [2, 4])
def test_a_wave_decays_as_the_equation_says(order: int):
    """cos is an eigenvector of the periodic stencil: every step multiplies it by one number."""
    problem, steps = Problem((16, 12), order=order), 10
    waves = [np.cos(2 * np.pi * np.arange(n) / n) for n in problem.sizes]
    start = waves[0][:, None] * waves[1][None, :]
    weights = SECOND_DIFFERENCE[order]
    factor = 1 + problem.rate * sum(
        weights[0] + 2 * sum(w * np.cos(2 * np.pi * k / n) for k, w in weights.items() if k) for n in problem.sizes
    )
    heat = build(problem)
    step = mm.compile(heat.graph, mm.SimulatedMesh("rows:2;cols:3"), "x:rows;y:cols", fetches=[], updates=heat.updates)
    step.assign({"u": start})
    for _ in range(steps):
        step()
    np.testing.assert_allclose(step.variables["u"], factor**steps * start, atol=1e-14)


def test_temperatures_are_updated_in_place():
    """The arena holds the four shifted blocks of 32 x 32 numbers; the new ones overwrite u."""
    heat = build(Problem((64, 64)))
    plan = mm.plan(heat.graph, "rows:2;cols:2", "x:rows;y:cols", fetches=[], updates=heat.updates)
    block = 32 * 32 * 8
    assert plan.cost.memory["variables"] == block
    assert plan.cost.memory["arena"] == 4 * block


def test_a_convolution_has_no_periodic_boundary():
    with pytest.raises(mm.ConfigError, match="--method shift, or --boundary fixed"):
        main(["--method", "conv", "--size", "8", "--steps", "1"])


def test_command_on_a_simulated_mesh(capsys, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "heat.png"
    arguments = ["--mesh", "rows:2;cols:2;planes:2", "--size", "9x8x7", "--steps", "3"]
    assert main([*arguments, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "bit-equal" in out and "all ranks agree" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("n", "more"),
    [
        (4, ["--mesh", "rows:2;cols:2", "--size", "32"]),
        (4, ["--mesh", "rows:4", "--size", "6x5", "--order", "4", "--boundary", "fixed"]),
        (6, ["--mesh", "rows:2;cols:3", "--layout", "y:cols+rows", "--size", "10x13"]),
        (8, ["--mesh", "rows:2;cols:2;planes:2", "--size", "9x6x7", "--order", "4"]),
        (4, ["--mesh", "rows:2;cols:2", "--size", "11x9", "--method", "conv", "--boundary", "fixed"]),
    ],
)
def test_command_on_real_ranks(n: int, more: list[str]):
    arguments = ["-m", "apps.heat", "--steps", "5", *more]
    done = launch(n, arguments, timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ranks agree" in done.stdout and "real ranks" in done.stdout
    assert "bit-equal" in done.stdout or "conv" in more
