"""A network whose gradients are reduced over the batch, for the tests of overlapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes import messages, pipeline

BATCH, WIDTH, LAYERS = 12, 10, 4


def everything_counts(patch: pytest.MonkeyPatch) -> None:
    """Messages of any size are started early."""
    patch.setattr(messages, "SMALLEST_BYTES", 0)
    patch.setattr(pipeline, "SMALLEST_BYTES", 0)


def network() -> tuple[mm.Graph, mm.Tensor, list[mm.Update]]:
    batch = mm.Dimension("batch", BATCH)
    with mm.Graph() as graph:
        x = h = mm.placeholder("x", [batch, mm.Dimension("d0", WIDTH)], "float64")
        for k in range(LAYERS):
            w = mm.get_variable(f"w{k}", [mm.Dimension(f"d{k}", WIDTH), mm.Dimension(f"d{k + 1}", WIDTH)], "float64")
            h = mm.tanh(mm.einsum([h, w], [batch, mm.Dimension(f"d{k + 1}", WIDTH)]))
        loss = mm.reduce_mean(mm.square(h)) + mm.reduce_mean(x)
        updates = mm.optimize.SGD(0.1).minimize(loss)
    return graph, loss, updates


def losses(mesh: Any, layout: str, steps: int = 4, **options: Any) -> tuple[list[float], Any]:
    graph, loss, updates = network()
    step = mm.compile(graph, mesh, layout, fetches=[loss], updates=updates, **options)
    data = np.random.default_rng(0).standard_normal((BATCH, WIDTH))
    return [step(x=data)[loss] for _ in range(steps)], step
