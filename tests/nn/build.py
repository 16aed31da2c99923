"""What the tests of meshmpi.nn share: arrays for variables, evaluation, gradient checks, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import meshmpi as mm
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.autodiff import gradients
from meshmpi.ir.scalar import FLOATS
from tests.oracle import directional_derivative, evaluate

Arrays = dict[str, np.ndarray]


def random_variables(graph: Graph, seed: int = 0, scale: float = 0.5) -> Arrays:
    """Normal numbers for every floating-point variable, zeros for the others."""
    rng = np.random.default_rng(seed)
    out = {}
    for v in graph.variables.values():
        sizes = v.shape.sizes
        out[v.name] = rng.normal(0, scale, sizes) if v.dtype in FLOATS else np.zeros(sizes, v.dtype)
    return out


def value(x: Tensor, feeds: Arrays | None = None, variables: Arrays | None = None) -> np.ndarray:
    """The oracle's value of one tensor."""
    return evaluate(x.graph, [x], feeds or {}, variables or {})[0]


def check_gradients(
    y: Tensor,
    feeds: Arrays,
    variables: Arrays,
    wanted: Sequence[str] | None = None,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> None:
    """<direction, gradient> of a scalar against central differences, for feeds and variables.

    The tolerance covers the differences' own error (truncation 1e-10, rounding 1e-11, relative to
    third derivatives of order 10).
    """
    graph, rng = y.graph, np.random.default_rng(seed)
    inputs = dict(graph.placeholders)
    for v in graph.variables.values():
        inputs.update((v.name, t) for key, t in v._reads.items() if key != "stored")
    names = [n for n, t in inputs.items() if t.dtype in FLOATS and (wanted is None or n in wanted)]
    with graph:
        grads = gradients(y, [inputs[n] for n in names])
    assert names
    for name, g in zip(names, grads, strict=True):
        assert g is not None, name
        direction = rng.normal(size=g.shape.sizes)
        predicted = float(np.sum(direction * value(g, feeds, variables)))
        measured = directional_derivative(graph, y, name, direction, feeds, variables)
        assert abs(predicted - measured) <= tolerance * max(1.0, abs(measured)), name


def check_layouts(
    layouts: Sequence[str],
    wanted: Mapping[Tensor, np.ndarray],
    feeds: Arrays,
    variables: Arrays | None = None,
    rtol: float = 1e-11,
    atol: float = 1e-13,
) -> None:
    """The values wanted, in every layout of a simulated 2x3 mesh."""
    graph = next(iter(wanted)).graph
    for layout in layouts:
        step = mm.compile(graph, mm.SimulatedMesh("rows:2;cols:3"), layout, fetches=list(wanted))
        step.assign(variables or {})
        found = step(feeds)
        for t, expected in wanted.items():
            got = found[t].numpy() if t.shape else found[t]
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=layout)


def run_updates(
    updates: Sequence[Update], variables: Mapping[str, np.ndarray], feeds: Arrays, steps: int = 1
) -> Arrays:
    """Variables after some steps: all updates of a step read the values from before it."""
    now = dict(variables)
    graph = updates[0].value.graph
    for step in range(steps):
        values = evaluate(graph, [u.value for u in updates], feeds, now, step=step)
        now.update({u.variable.name: x for u, x in zip(updates, values, strict=True)})
    return now


def initial(graph: Graph) -> Arrays:
    """Zeros for every variable."""
    return {v.name: np.zeros(v.shape.sizes, v.dtype) for v in graph.variables.values()}
