"""Makes feeds for a graph if the user gave none: random values, legal as indices."""

from __future__ import annotations

import numpy as np

from meshmpi.graph import Graph, Tensor
from meshmpi.graph.ops.elementwise import Elementwise
from meshmpi.graph.ops.indexing import Gather, ScatterAdd
from meshmpi.graph.ops.positions import Range
from meshmpi.ir.scalar import FLOATS


def random_feeds(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Placeholder name -> array of its shape and type.

    Floats are normal numbers; bools are even odds; integers lie in [0, n), n being the smallest
    dimension that they, or integers computed from them elementwise, index, and 2 where they index
    none.
    """
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, t in graph.placeholders.items():
        if t.dtype in FLOATS:
            out[name] = rng.standard_normal(t.shape.sizes).astype("float32")
        elif t.dtype == "bool":
            out[name] = rng.integers(0, 2, t.shape.sizes).astype(bool)
        else:
            out[name] = rng.integers(0, indexed(graph, t), t.shape.sizes).astype(t.dtype)
    return out


def indexed(graph: Graph, index: Tensor) -> int:
    """The size of the smallest dimension that ``index``, or whole numbers made of it, addresses."""
    reached: dict[Tensor, None] = {index: None}
    sizes: list[int] = []
    for operation in graph.operations:
        if not any(x in reached for x in operation.inputs):
            continue
        if isinstance(operation, Gather) and operation.inputs[1] in reached:
            sizes.append(operation.inputs[0].shape.dim(operation.dim).size)
        elif isinstance(operation, ScatterAdd) and operation.inputs[1] in reached:
            sizes.append(operation.dim.size)
        elif isinstance(operation, Elementwise) and operation.output.dtype == "bool":
            others = [x for x in operation.inputs if x not in reached]
            sizes += [x.shape[0].size for x in others if isinstance(x.operation, Range)]
        for t in operation.outputs:
            if t.dtype == index.dtype:
                reached[t] = None
    return min(sizes, default=2)
