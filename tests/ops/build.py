"""What a row of the table of cases is made of: dimensions, fed tensors with data, variables.

It knows how graphs are built and nothing of how they are lowered or run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshmpi as mm
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.ir.scalar import FLOATS

EVEN = {"a": 12, "b": 24, "c": 12, "e": 6, "k": 12}
"""Sizes that every mesh of the tests divides (but for the dims that a case derives from them)."""
UNEVEN = {"a": 5, "b": 7, "c": 3, "e": 4, "k": 2}
"""Sizes that leave larger, smaller and empty blocks on 2, 3, 4 and 6 ranks."""


def data(kind: str, sizes: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Values of mixed sign unless the function asked for cannot take them."""
    if kind == "signed":
        return rng.uniform(-2, 2, sizes)
    if kind == "away":  # from 0
        return rng.uniform(0.5, 2, sizes) * rng.choice([-1.0, 1.0], sizes)
    if kind == "positive":
        return rng.uniform(0.5, 2, sizes)
    if kind == "ties":
        return rng.integers(-2, 3, sizes).astype(np.float64)
    if kind == "special":
        return rng.choice([np.nan, np.inf, -np.inf, 1.5, -2.0, 0.0], sizes)
    if kind == "bool":
        return rng.integers(0, 2, sizes).astype(bool)
    if kind == "whole":  # integers of mixed sign without 0
        return rng.integers(1, 6, sizes) * rng.choice([-1, 1], sizes)
    if kind == "natural":
        return rng.integers(0, 6, sizes)
    raise ValueError(kind)


class Builder:
    """Collects the feeds, variables and updates of one case while its graph is built.

    ``a, b, c, e, k`` are its dimensions.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.rng = np.random.default_rng(7)
        self.feeds: dict[str, np.ndarray] = {}
        self.variables: dict[str, np.ndarray] = {}
        self.updates: list[Update] = []
        self.sources: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> mm.Dimension:
        if len(name) == 1:
            return mm.Dimension(name, self.sizes[name])
        raise AttributeError(name)

    def shape(self, names: str) -> mm.Shape:
        """``"a b"`` -> [a, b]."""
        return mm.Shape([getattr(self, n) for n in names.split()])

    def feed(self, name: str, dims: str | mm.Shape, dtype: str = "float64", kind: str = "signed") -> Tensor:
        """A placeholder and its data, already rounded to its type."""
        shape = self.shape(dims) if isinstance(dims, str) else dims
        return self.feed_array(name, shape, dtype, data(kind, shape.sizes, self.rng))

    def feed_array(self, name: str, shape: mm.Shape, dtype: str, values: np.ndarray) -> Tensor:
        self.feeds[name] = rounded(np.asarray(values), dtype)
        self.sources[name] = mm.placeholder(name, shape, dtype)
        return self.sources[name]

    def index(self, name: str, dims: str, low: int, high: int) -> Tensor:
        """int32 in [low, high), so bounds beyond a dimension give indices outside it."""
        shape = self.shape(dims)
        return self.feed_array(name, shape, "int32", self.rng.integers(low, high, shape.sizes))

    def variable(self, name: str, dims: str, dtype: Any = "float64", **options: Any) -> Tensor:
        shape = self.shape(dims)
        master = dtype.master if isinstance(dtype, mm.VariableDType) else dtype
        kind = "signed" if master in FLOATS else "natural"
        self.variables[name] = rounded(data(kind, shape.sizes, self.rng), master)
        t = mm.get_variable(name, shape, dtype, initializer=self.variables[name], **options)
        self.sources[name] = t
        return t

    def assign(self, variable: Tensor, value: Tensor) -> None:
        self.updates.append(mm.assign(variable, value))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` in the NumPy type of ``dtype``."""
    if dtype == "bfloat16":
        import ml_dtypes

        return values.astype(ml_dtypes.bfloat16)
    return values.astype(dtype)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: Of the test.
        build: Makes the graph; returns the tensors to fetch.
        tolerance: Largest error, relative to the largest finite magnitude of the result and 1.
        smooth: Whether central differences say what the gradient is (not at ties).
        gradients: Whether gradients are taken at all.
        refuses: Whether some layouts contradict the case's own constraints, so that LayoutError
            is a right answer to them.
        limit: Most layouts a mesh is tried with, below the caller's own limit; for big graphs.
    """

    name: str
    build: Callable[[Builder], Sequence[Tensor]]
    tolerance: float = 1e-12
    smooth: bool = True
    gradients: bool = True
    refuses: bool = False
    limit: int = 1000


@dataclass
class Built:
    """A case's graph for one choice of sizes, with gradients, and all it is run with."""

    case: Case
    graph: Graph
    outputs: list[Tensor]
    loss: Tensor | None
    gradients: dict[str, Tensor]
    updates: list[Update]
    feeds: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    sources: dict[str, Tensor]


def build(case: Case, sizes: Mapping[str, int]) -> Built:
    """The graph of ``case``; loss = sum of outputs times random numbers, and its gradients."""
    with mm.Graph() as graph:
        b = Builder(sizes)
        outputs = list(case.build(b))
        floats = [y for y in outputs if y.dtype in FLOATS]
        loss, grads = None, {}
        if case.gradients and floats:
            loss = _weighted_sum(b, floats)
            sources = {n: t for n, t in b.sources.items() if t.dtype in FLOATS and n[0] != "_"}
            found = zip(sources, mm.gradients(loss, list(sources.values())), strict=True)
            grads = {n: g for n, g in found if g is not None}
    return Built(case, graph, outputs, loss if grads else None, grads, b.updates, b.feeds, b.variables, b.sources)


def _weighted_sum(b: Builder, ys: Sequence[Tensor]) -> Tensor:
    total = None
    for i, y in enumerate(ys):
        weights = b.feed(f"_weights_{i}", y.shape, y.dtype)
        part = mm.cast(mm.reduce_sum(y * weights), "float64")
        total = part if total is None else total + part
    assert total is not None
    return total
