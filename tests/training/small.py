"""A small network with dropout, and its data by blocks."""

from __future__ import annotations

import numpy as np

import meshmpi as mm


def network(mesh, layout: str = "batch:all", rate: float = 0.05, more=()):
    """A compiled training step, whose first fetch is the loss, and the flag of its optimizer."""
    batch, inputs, hidden = mm.Dimension("batch", 12), mm.Dimension("inputs", 6), mm.Dimension("hidden", 10)
    with mm.Graph() as graph:
        x, t = mm.placeholder("x", [batch, inputs]), mm.placeholder("t", [batch, inputs])
        w, v = mm.get_variable("w", [inputs, hidden]), mm.get_variable("v", [hidden, inputs])
        y = mm.dropout(mm.relu(mm.einsum([x, w], [batch, hidden])), True, 0.8)
        error = mm.square(mm.einsum([y, v], [batch, inputs]) - t)
        loss, largest = mm.reduce_mean(error), mm.reduce_max(error)
        optimizer = mm.optimize.Adam(rate)
        updates = optimizer.minimize(loss, watch=[loss])
    fetches = {"loss": loss, "largest": largest, "finite": optimizer.finite, "error": error}
    return mm.compile(graph, mesh, layout, fetches=fetches, updates=updates, seed=3), optimizer.finite


def batch(number: int) -> dict[str, np.ndarray]:
    """The whole batch of a step."""
    x = np.random.default_rng(number).standard_normal((12, 6)).astype(np.float32)
    return {"x": x, "t": x[:, ::-1].copy()}


class Rows:
    """A reader: each rank is given its blocks."""

    def __init__(self, digest: str = "rows") -> None:
        self.digest, self.asked = digest, list[int]()

    def feeds(self, step: int, held):
        self.asked.append(step)
        ranges = {name: tuple(slice(*r) for r in block or ()) for name, block in held.items()}
        return {name: array[ranges[name]] for name, array in batch(step).items()}
