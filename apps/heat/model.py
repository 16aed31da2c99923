"""The explicit heat equation: u <- u + rate * (sum over dims of the second difference of u).

With the rate kappa dt / h^2 this is Euler's method in time and central differences of order 2 or 4
in space.  Beyond the grid the temperature goes on from the other end (periodic), or is 0 (fixed).
Nothing here knows a mesh or a layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import meshmpi as mm

DIMS = ("x", "y", "z")
SECOND_DIFFERENCE = {2: {0: -2.0, 1: 1.0}, 4: {0: -5 / 2, 1: 4 / 3, 2: -1 / 12}}
"""Order of accuracy -> distance -> weight of the cells so far away, on either side."""
BOUNDARIES, METHODS = ("periodic", "fixed"), ("shift", "conv")


class Problem(NamedTuple):
    """What is computed.

    Attributes:
        sizes: Cells along each dim.
        boundary: periodic or fixed.
        order: Order of accuracy in space, 2 or 4: cells up to 1 or 2 away are read.
        method: shift: one `mm.shift` for each neighbour; conv: one `mm.conv` with the stencil as
            its filter (fixed boundary only, as what lies outside counts as 0).
    """

    sizes: tuple[int, ...]
    boundary: str = "periodic"
    order: int = 2
    method: str = "shift"
    dtype: str = "float64"

    @property
    def reach(self) -> int:
        """How far away the farthest cell is that an update reads."""
        return max(SECOND_DIFFERENCE[self.order])

    @property
    def offsets(self) -> list[int]:
        """Distances of the cells along one dim that are moved to their neighbours."""
        return [s * k for k in range(1, self.reach + 1) for s in (1, -1)]

    @property
    def rate(self) -> float:
        """kappa dt / h^2, three quarters of the largest that is stable."""
        weights = SECOND_DIFFERENCE[self.order]
        steepest = abs(weights[0] + 2 * sum(w * (-1) ** k for k, w in weights.items() if k))
        return 0.75 * 2 / (steepest * len(self.sizes))

    def check(self) -> None:
        """Raises ConfigError for a problem that there is not."""
        if not 1 <= len(self.sizes) <= len(DIMS) or min(self.sizes) < 1:
            raise mm.ConfigError(f"the grid is {self.sizes}.", f"Give 1 to {len(DIMS)} sizes of at least 1 cell.")
        choices = (
            ("boundary", self.boundary, BOUNDARIES),
            ("method", self.method, METHODS),
            ("order", self.order, tuple(SECOND_DIFFERENCE)),
        )
        for what, value, known in choices:
            if value not in known:
                raise mm.ConfigError(f"the {what} is {value!r}.", f"Use one of {', '.join(map(str, known))}.")
        if (self.method, self.boundary) == ("conv", "periodic"):
            raise mm.ConfigError(
                "a convolution counts what lies outside of the grid as 0, and the boundary is periodic.",
                "Use --method shift, or --boundary fixed.",
            )


class Heat(NamedTuple):
    """The graph of one time step: the temperatures before it, and what it updates."""

    graph: mm.Graph
    u: mm.Tensor
    updates: list[mm.Update]


def build(problem: Problem) -> Heat:
    """The graph of one time step; ``u`` is a variable that is updated in place."""
    problem.check()
    dims = [mm.Dimension(n, size) for n, size in zip(DIMS, problem.sizes, strict=False)]
    with mm.Graph() as graph:
        u = mm.get_variable("u", dims, problem.dtype, initializer=initial(problem), trainable=False)
        make = _by_shift if problem.method == "shift" else _by_conv
        updates = [mm.assign(u, make(problem, u))]
    return Heat(graph, u, updates)


def _by_shift(problem: Problem, u: mm.Tensor) -> mm.Tensor:
    weights, rate = SECOND_DIFFERENCE[problem.order], problem.rate
    wrap = problem.boundary == "periodic"
    y = (1.0 + rate * len(problem.sizes) * weights[0]) * u
    for dim in u.shape:
        for k in problem.offsets:
            y = y + rate * weights[abs(k)] * mm.shift(u, k, dim, wrap=wrap)
    return y


def _by_conv(problem: Problem, u: mm.Tensor) -> mm.Tensor:
    reach = problem.reach
    taps = [mm.Dimension(f"{d.name}_tap", 2 * reach + 1) for d in u.shape]
    stencil = mm.get_variable("stencil", taps, problem.dtype, initializer=stencil_array(problem), trainable=False)
    slides = [mm.ConvDims(d.name, tap.name, d.name, before=reach) for d, tap in zip(u.shape, taps, strict=True)]
    return mm.conv(u, stencil, slides, u.shape)


def stencil_array(problem: Problem) -> np.ndarray:
    """Weights of all cells within reach, the cell itself in the middle."""
    n, reach, weights = len(problem.sizes), problem.reach, SECOND_DIFFERENCE[problem.order]
    array = np.zeros([2 * reach + 1] * n, problem.dtype)
    centre = [reach] * n
    array[tuple(centre)] = 1.0 + problem.rate * n * weights[0]
    for axis in range(n):
        for k in problem.offsets:
            cell = list(centre)
            cell[axis] += k
            array[tuple(cell)] = problem.rate * weights[abs(k)]
    return array


def initial(problem: Problem) -> np.ndarray:
    """Two hot balls of different sizes on a cold grid: nothing about them is symmetric."""
    grid = np.meshgrid(*((np.arange(n) + 0.5) / n for n in problem.sizes), indexing="ij")

    def ball(at: float, radius: float) -> np.ndarray:
        return sum((g - at) ** 2 for g in grid) < radius**2

    return (1.0 * ball(0.3, 0.2) + 0.5 * ball(0.7, 0.15)).astype(problem.dtype)
