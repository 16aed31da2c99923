"""Solves the heat equation on a grid split over a mesh and checks the result and the halos.

python -m apps.heat --mesh "rows:2;cols:2" --size 256 --steps 100               simulated ranks
python -m meshmpi.launch -n 4 -m apps.heat --mesh "rows:2;cols:2" --size 256x192
python -m apps.heat --dims 3 --mesh "rows:2;cols:2;planes:2" --size 32 --boundary fixed --order 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import meshmpi as mm
from apps.heat.formulas import default_layout
from apps.heat.model import BOUNDARIES, METHODS, SECOND_DIFFERENCE, Problem
from apps.heat.run import Result, on_one_rank, run, total
from meshmpi.runtime.world import world_size

TOLERANCE = {"float64": 1e-13, "float32": 1e-5}
"""Largest difference of temperatures by convolution, relative to the initial 1: a product of patches may add up in
another order for another size of block.  By shifts every cell is the same expression wherever it
is, and the temperatures must be equal to the last bit."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.heat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--mesh", default="rows:2;cols:2", help="(default %(default)s)")
    add("--layout", help="dims x, y, z to axes (default: one each, in order)")
    add("--dims", type=int, default=2, help="of the grid, where --size is one number (default 2)")
    add("--size", default="256", help="cells: 256, or 256x192, or 64x64x48 (default %(default)s)")
    add("--steps", type=int, default=100, help="time steps (default %(default)s)")
    add("--boundary", default="periodic", choices=BOUNDARIES, help="(default %(default)s)")
    add("--order", type=int, default=2, choices=tuple(SECOND_DIFFERENCE), help="(default 2)")
    add("--method", default="shift", choices=METHODS, help="(default %(default)s)")
    add("--dtype", default="float64", choices=tuple(TOLERANCE))
    add("--kernels", default="auto", choices=("auto", "native", "numpy"))
    add("--no-check", action="store_true", help="do not repeat the run on one rank")
    add("--picture", help="file of a picture of the end; needs matplotlib")
    return parser.parse_args(arguments)


def problem_of(options: argparse.Namespace) -> Problem:
    """What the options ask for."""
    sizes = tuple(int(n) for n in options.size.split("x"))
    if len(sizes) == 1:
        sizes *= options.dims
    return Problem(sizes, options.boundary, options.order, options.method, options.dtype)


def save_picture(u: np.ndarray, file: str, title: str) -> str:
    """Draws u (its middle layer in 3-D); returns what happened."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    while u.ndim > 2:
        u = u[..., u.shape[-1] // 2]
    figure = Figure(figsize=(6, 5))
    axes = figure.add_subplot(title=title, xlabel="y", ylabel="x")
    image = axes.imshow(u.reshape(u.shape[0], -1), cmap="inferno", interpolation="nearest")
    figure.colorbar(image, label="temperature")
    figure.savefig(file, dpi=120)
    return f"picture: {file}"


def difference(problem: Problem, result: Result, options: argparse.Namespace) -> tuple[str, bool]:
    """How the temperatures differ from those of one rank, and whether that is right."""
    one = on_one_rank(problem, options.steps, options.kernels)
    if np.array_equal(one, result.u):
        return "temperatures are bit-equal to those of one rank", True
    most = float(np.max(np.abs(one - result.u)))
    allowed = 0.0 if problem.method == "shift" else TOLERANCE[problem.dtype]
    return f"temperatures differ from those of one rank by {most:.1e}, {allowed} allowed", (most <= allowed)


def halo_text(result: Result) -> str:
    """Formula, prediction and account of the first rank and of the busiest of this process."""
    shown = {h.rank: h for h in (result.halos[0], max(result.halos, key=lambda h: h.counted))}
    lines = [f"  {'halo bytes per step':24}{'formula':>12}{'predicted':>12}{'accounted':>12}"]
    for h in shown.values():
        lines.append(f"  {f'rank {h.rank}':24}{h.formula:>12,}{h.predicted:>12,}{h.counted:>12,}")
    return "\n".join([*lines, f"  predicted for the busiest rank: {result.busiest:,}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and prints; 0 when halos agree on every rank and temperatures are those of one rank."""
    options = parsed(arguments)
    problem = problem_of(options)
    make: Any = mm.Mesh if world_size() > 1 else mm.SimulatedMesh
    mesh = make(options.mesh)
    layout = options.layout
    if layout is None:
        layout = default_layout(problem, mesh.shape)
    result = run(problem, mesh, layout, options.steps, options.kernels)
    verdict, right = ("not compared with one rank", True)
    if not options.no_check:
        verdict, right = difference(problem, result, options)
    wrong_halos = total(mesh, sum(not h.agrees for h in result.halos))
    wrong_ranks = total(mesh, int(not right))
    if mesh.rank == 0:
        kind = "simulated" if isinstance(mesh.counters, list) else "real"
        grid = " x ".join(map(str, problem.sizes))
        title = f"{grid}, {problem.boundary}, order {problem.order}, {options.steps} steps"
        rate = np.prod(problem.sizes, dtype=float) * options.steps / result.seconds
        print(f"{title}, by {problem.method}; '{layout}' on {mesh.shape}: {kind} ranks")
        print(halo_text(result))
        print(f"  halos of {wrong_halos} ranks DIFFER" if wrong_halos else "  all ranks agree")
        print(f"  {rate:.3g} cell updates per second")
        print(f"  {verdict}; mean {result.u.mean():.9g}, hottest {result.u.max():.9g}")
        if options.picture:
            print(" ", save_picture(result.u, options.picture, title))
    return 1 if wrong_halos or wrong_ranks else 0


if __name__ == "__main__":
    sys.exit(main())
