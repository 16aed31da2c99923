"""Runs the heat equation and compares: temperatures with one rank, halos with the formula.

Knows no MPI: the mesh may be simulated or real.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

import meshmpi as mm
from apps.heat.formulas import halo_elements
from apps.heat.model import Problem, build
from meshmpi.compiler.cost import bytes_by_collective
from meshmpi.ir.scalar import ITEM_BYTES


class Halo(NamedTuple):
    """Bytes that one rank sends in one step."""

    rank: int
    formula: int
    predicted: int
    counted: int

    @property
    def agrees(self) -> bool:
        return self.formula == self.predicted == self.counted


class Result(NamedTuple):
    """A finished run.

    Attributes:
        u: The temperatures at the end, whole.
        busiest: Bytes per step predicted for the rank that sends most.
    """

    u: np.ndarray
    halos: list[Halo]
    busiest: int
    seconds: float


def run(problem: Problem, mesh: Any, layout: str, steps: int, kernels: str = "auto") -> Result:
    """Runs ``steps`` time steps.

    Args:
        problem: What to compute.
        mesh: A new mm.Mesh or mm.SimulatedMesh; its counters start at 0.
        steps: Time steps, at least 1.
        kernels: As for `mm.compile`.

    Raises:
        LayoutError: The layout is illegal for this grid and mesh.
    """
    heat = build(problem)
    step = mm.compile(heat.graph, mesh, layout, fetches=[], updates=heat.updates, kernels=kernels)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    halos = [_halo(problem, step, mm.Layout(layout), rank, steps) for rank in _ranks(mesh)]
    return Result(step.variables["u"], halos, step.cost.bytes_sent, seconds)


def _ranks(mesh: Any) -> list[int]:
    """Ranks of this process: all of a simulated mesh."""
    return list(range(mesh.shape.size)) if isinstance(mesh.counters, list) else [mesh.rank]


def _halo(problem: Problem, step: Any, layout: mm.Layout, rank: int, steps: int) -> Halo:
    mesh = step.mesh
    counters = mesh.counters[rank] if isinstance(mesh.counters, list) else mesh.counters
    assert set(counters) <= {"shift"}, f"only halos are due, but {list(counters)} were sent"
    here = mesh.shape.coordinates(rank)
    formula = sum(halo_elements(problem, layout, mesh.shape, here).values())
    predicted = bytes_by_collective(step.program, here).get("shift", {})
    counted = sum(row[2] for row in counters.get("shift", {}).values())
    return Halo(rank, formula * ITEM_BYTES[problem.dtype], sum(predicted.values()), counted // steps)


def on_one_rank(problem: Problem, steps: int, kernels: str = "auto") -> np.ndarray:
    """The same temperatures, computed by this process alone."""
    return run(problem, mm.SimulatedMesh("all:1"), "", steps, kernels).u


def total(mesh: Any, number: int) -> int:
    """The sum of a number over all ranks of a real mesh; collective."""
    if isinstance(mesh.counters, list):
        return number
    sum_of_all = np.array([number])
    mesh.all_reduce(sum_of_all, mesh.shape.names)
    return int(sum_of_all[0])
