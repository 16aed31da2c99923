"""Multiplies in one layout and puts formula, prediction and count side by side.

Knows no MPI: the mesh may be simulated or real.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import meshmpi as mm
from apps.matmul.formulas import Formulas, Sizes, Volume, formulas
from apps.two_layer.measure import Line
from meshmpi.ir.flops import local_flops
from meshmpi.ir.scalar import ITEM_BYTES


class Measurement(NamedTuple):
    """One layout's formulas and comparison.

    Attributes:
        lines: Formula, prediction and count of every quantity.
        error: Largest difference of C, dA and dB from NumPy's, relative to the largest element.
    """

    layout: mm.Layout
    formulas: Formulas
    lines: list[Line]
    error: float


def build(sizes: Sizes, dtype: str) -> tuple[mm.Graph, list[mm.Tensor]]:
    """The graph, and C, dA and dB.  A, B and dC are fed; nothing here knows a mesh or a layout."""
    i, j, k = (mm.Dimension(name, n) for name, n in sizes._asdict().items())
    with mm.Graph() as graph:
        a = mm.placeholder("A", [i, j], dtype)
        b = mm.placeholder("B", [j, k], dtype)
        dc = mm.placeholder("dC", [i, k], dtype)
        c = mm.einsum([a, b], [i, k])
        da, db = mm.gradients([c], [a, b], grad_ys=[dc])
    return graph, [c, da, db]


def measure(sizes: Sizes, mesh: Any, layout: str, *, steps: int = 2, dtype: str = "float64") -> Measurement:
    """Runs ``steps`` steps and compares.

    Args:
        sizes: Global sizes.
        mesh: A new mm.Mesh or mm.SimulatedMesh; its counters start at 0.
        layout: Computation layout.
        steps: Steps to run; counts are divided by it.

    Raises:
        LayoutError: The layout is illegal for this product.
    """
    graph, fetches = build(sizes, dtype)
    step = mm.compile(graph, mesh, layout, fetches=fetches)
    rng = np.random.default_rng(0)
    shapes = {"A": sizes[:2], "B": sizes[1:], "dC": (sizes.i, sizes.k)}
    feeds = {n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}
    for _ in range(steps):
        results = step(feeds)
    # Counted before results are gathered, which sends more.
    expected = formulas(sizes, mm.Layout(layout), mesh.shape, ITEM_BYTES[dtype])
    lines = [*_local_lines(step, expected, steps), *_communication_lines(step, expected, steps)]
    a, b, dc = (x.astype("float64") for x in feeds.values())
    wanted = [a @ b, dc @ b.T, a.T @ dc]
    errors = [np.max(np.abs(results[t].numpy() - y)) / np.max(np.abs(y)) for t, y in zip(fetches, wanted, strict=True)]
    return Measurement(mm.Layout(layout), expected, lines, float(max(errors)))


def _local_lines(step: Any, expected: Formulas, steps: int) -> list[Line]:
    program = step.program
    products = sum(local_flops(i, program) for i in program.instructions if i.kind == "contract")
    counted = step.counted_flops["contract"] // steps
    held = {name: int(np.prod(np.ptp(step.feed_block(name), axis=1))) for name in program.feeds}
    return [
        Line("FLOP", expected.flops, products, counted),
        *(
            Line(f"elements of {name} kept", n, program.feeds[name].max_elements(program.mesh), held[name])
            for name, n in expected.kept_elements.items()
        ),
    ]


def _communication_lines(step: Any, expected: Formulas, steps: int) -> list[Line]:
    counters = step.mesh.counters
    if isinstance(counters, list):  # of a simulated mesh: by rank; 0 has the largest blocks
        counters = counters[0]
    assert set(step.program.values()) | set(counters) <= {"all_reduce"}, "only all_reduces are due"
    predicted, rows = step.program.values().get("all_reduce", {}), counters.get("all_reduce", {})
    due: dict[str, Volume] = {"+".join(v.over): v for v in expected.volumes if v.over}
    lines = []
    for over in dict.fromkeys([*due, *predicted, *rows]):
        volume, row = due.get(over), rows.get(over, [0, 0, 0])
        name = volume.product.name if volume else "?"
        elements = volume.elements if volume else 0
        title = f"elements of {name} all-reduced over {over}"
        lines.append(Line(title, elements, predicted.get(over, 0), row[1] // steps))
    sent = sum(v.bytes_sent for v in expected.volumes)
    counted = sum(row[2] for row in rows.values()) // steps
    return [*lines, Line("bytes sent", sent, step.cost.bytes_sent, counted)]
