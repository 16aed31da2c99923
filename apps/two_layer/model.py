"""The example's graph: y = relu(x w + bias) v, one step of gradient descent on mean (y - t)^2.

Nothing here knows a mesh or a layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import meshmpi as mm


class Sizes(NamedTuple):
    """Global sizes of the three dimensions."""

    batch: int = 64
    io: int = 32
    hidden: int = 128


class TwoLayer(NamedTuple):
    """The graph, what a step returns, and what it updates.

    ``input_gradient`` is None where x is an input of the whole network, whose gradient nobody
    needs; inside a deeper network it is what the layers before these two continue with.
    """

    graph: mm.Graph
    loss: mm.Tensor
    input_gradient: mm.Tensor | None
    updates: list[mm.Update]

    @property
    def fetches(self) -> list[mm.Tensor]:
        return [t for t in (self.loss, self.input_gradient) if t is not None]


def build(sizes: Sizes, input_gradient: bool = True, dtype: str = "float32") -> TwoLayer:
    """Builds the graph of one training step.

    Args:
        sizes: Global sizes.
        input_gradient: Whether the gradient with respect to x is wanted too.
    """
    batch, io, hidden = (mm.Dimension(name, size) for name, size in sizes._asdict().items())
    with mm.Graph() as graph:
        x = mm.placeholder("x", [batch, io], dtype)
        t = mm.placeholder("t", [batch, io], dtype)
        w = mm.get_variable("w", [io, hidden], dtype)
        bias = mm.get_variable("bias", [hidden], dtype, initializer=mm.zeros_initializer())
        v = mm.get_variable("v", [hidden, io], dtype)

        h = mm.relu(mm.einsum([x, w], [batch, hidden]) + bias)
        y = mm.einsum([h, v], [batch, io])
        loss = mm.reduce_mean(mm.square(y - t))

        wanted = [w, bias, v] + ([x] if input_gradient else [])
        dw, dbias, dv, *dx = mm.gradients([loss], wanted)
        pairs = [(dw, w), (dbias, bias), (dv, v)]
        updates = mm.optimize.SGD(0.125).apply_gradients(pairs)
    return TwoLayer(graph, loss, dx[0] if dx else None, updates)


def feeds(sizes: Sizes, step: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The global x and t of one step, the same on every rank."""
    rng = np.random.default_rng(step)
    shape = (sizes.batch, sizes.io)
    return {name: rng.standard_normal(shape).astype(dtype) for name in ("x", "t")}
