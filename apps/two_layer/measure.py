"""Runs the example in one layout and puts formula, prediction and count side by side.

Knows no MPI: the mesh may be simulated or real.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import meshmpi as mm
from apps.two_layer.formulas import Formulas, formulas
from apps.two_layer.model import Sizes, build, feeds
from meshmpi.ir.flops import local_flops
from meshmpi.ir.scalar import ITEM_BYTES

CACHE_LINE_BYTES = 64
"""Blocks are kept in whole cache lines."""


class Line(NamedTuple):
    """One quantity per rank and step; the formula is None where the paper has none."""

    name: str
    formula: int | None
    predicted: int
    counted: int

    @property
    def agrees(self) -> bool:
        return self.predicted == self.counted and self.formula in (None, self.predicted)


class Measurement(NamedTuple):
    """One layout's formulas, comparison and losses."""

    layout: mm.Layout
    mesh: mm.MeshShape
    formulas: Formulas
    lines: list[Line]
    losses: list[float]


def measure(
    sizes: Sizes, mesh: Any, layout: str, *, steps: int = 3, input_gradient: bool = True, dtype: str = "float32"
) -> Measurement:
    """Trains ``steps`` steps and compares.

    Args:
        sizes: Global sizes of the example.
        mesh: A new mm.Mesh or mm.SimulatedMesh; its counters start at 0.
        layout: Computation layout.
        steps: Steps to run; counts are divided by it.
        input_gradient: As for `build`.

    Raises:
        LayoutError: The layout is illegal for this example.
    """
    model = build(sizes, input_gradient, dtype)
    step = mm.compile(model.graph, mesh, layout, fetches=model.fetches, updates=model.updates)
    losses = [step(feeds(sizes, n, dtype))[model.loss] for n in range(steps)]
    expected = formulas(sizes, mm.Layout(layout), mesh.shape, input_gradient)
    lines = [
        *_flop_lines(step, expected, steps),
        *_communication_lines(step, expected, steps),
        *_memory_lines(step, expected, dtype),
    ]
    return Measurement(mm.Layout(layout), mesh.shape, expected, lines, losses)


def _flop_lines(step: Any, expected: Formulas, steps: int) -> list[Line]:
    program, counted = step.program, step.counted_flops
    products = sum(local_flops(i, program) for i in program.instructions if i.kind == "contract")
    return [
        Line("FLOP of matrix products", expected.product_flops, products, counted["contract"] // steps),
        Line("FLOP, all", None, step.cost.flops, sum(counted.values()) // steps),
    ]


def _communication_lines(step: Any, expected: Formulas, steps: int) -> list[Line]:
    counters = step.mesh.counters
    if isinstance(counters, list):  # of a simulated mesh: by rank; 0 has the largest blocks
        counters = counters[0]
    assert set(step.program.values()) | set(counters) <= {"all_reduce"}, "only all_reduces are due"
    predicted, rows = step.program.values().get("all_reduce", {}), counters.get("all_reduce", {})
    over = dict.fromkeys([*expected.values, *predicted, *rows])
    lines = [
        Line(
            f"values all-reduced over {axes}",
            expected.values.get(axes, 0),
            predicted.get(axes, 0),
            rows.get(axes, [0, 0])[1] // steps,
        )
        for axes in over
    ]
    total = Line(
        "values all-reduced, all",
        sum(expected.values.values()),
        sum(predicted.values()),
        sum(row[1] for row in rows.values()) // steps,
    )
    sent = sum(row[2] for row in rows.values()) // steps
    totals = [] if len(lines) == 1 else [total]
    return [*lines, *totals, Line("bytes sent", None, step.cost.bytes_sent, sent)]


def _memory_lines(step: Any, expected: Formulas, dtype: str) -> list[Line]:
    def in_lines(elements: int) -> int:
        return -(-elements * ITEM_BYTES[dtype] // CACHE_LINE_BYTES) * CACHE_LINE_BYTES

    step_counter = CACHE_LINE_BYTES  # the optimizer's variable: one integer
    kept = sum(in_lines(n) for n in expected.kept_elements) + step_counter
    predicted, held = step.cost.memory, step.held_memory
    return [
        Line(
            "bytes of x, t, w, v, bias",
            kept,
            predicted["variables"] + predicted["feeds"],
            held["variables"] + held["feeds"],
        ),
        Line("bytes at the peak", None, step.cost.peak_memory, step.held_bytes),
    ]
