"""Cheap values are computed again in the fused kernels that use them: less memory, less traffic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes.pipeline import PASSES, optimize
from meshmpi.compiler.passes.rematerialise import rematerialise
from meshmpi.errors import LayoutError
from meshmpi.ir.program import Program
from meshmpi.ir.verify import verify
from meshmpi.kernels.native import available
from meshmpi.runtime.compiled import predict_cost
from tests.layouts import legal_layouts
from tests.passes.hand import run

SHAPE = mm.MeshShape("rows:2;cols:3")
ROWS, D, HIDDEN = 14, 9, 11
MODELS: dict[str, Callable[[mm.Tensor], mm.Tensor]] = {}


def model(f: Callable[[mm.Tensor], mm.Tensor]) -> Callable[[mm.Tensor], mm.Tensor]:
    MODELS[f.__name__] = f
    return f


def _times(x: mm.Tensor, name: str, dim: mm.Dimension) -> mm.Tensor:
    w = mm.get_variable(name, [x.shape[-1], dim], "float64")
    return mm.einsum([x, w], mm.Shape([*x.shape[:-1], dim]))


@model
def normalisation(x: mm.Tensor) -> mm.Tensor:
    mean = mm.reduce_mean(x, reduced_dim="d")
    centred = x - mean
    scale = mm.rsqrt(mm.reduce_mean(mm.square(centred), reduced_dim="d") + 1e-6)
    return _times(centred * scale, "w", mm.Dimension("hidden", HIDDEN))


@model
def activation(x: mm.Tensor) -> mm.Tensor:
    h = _times(x, "v", mm.Dimension("hidden", HIDDEN))
    return _times(mm.gelu(h), "w", x.shape[-1])


@model
def dropped_out(x: mm.Tensor) -> mm.Tensor:
    h = _times(x, "v", mm.Dimension("hidden", HIDDEN))
    return _times(mm.dropout(mm.relu(h), True, rate=0.4), "w", x.shape[-1])


@model
def gated(x: mm.Tensor) -> mm.Tensor:
    hidden = mm.Dimension("hidden", HIDDEN)
    a, b = _times(x, "a", hidden), _times(x, "b", hidden)
    return _times(mm.sigmoid(a) * a * b, "w", x.shape[-1])


def built(name: str) -> tuple[mm.Graph, dict[str, mm.Tensor], dict[str, np.ndarray]]:
    with mm.Graph() as graph:
        x = mm.placeholder("x", [mm.Dimension("n", ROWS), mm.Dimension("d", D)], "float64")
        y = MODELS[name](x)
        loss = mm.reduce_sum(mm.square(mm.sin(y)))
        fetches = {"loss": loss, "dx": mm.gradients([loss], [x])[0]}
    return graph, fetches, {"x": np.random.default_rng(1).normal(size=(ROWS, D))}


def before(p: Program) -> Program:
    return optimize(p, tuple(f for f in PASSES if f is not rematerialise))


def moved_bytes(p: Program) -> int:
    """Read and written by maps and fused kernels."""
    local = [i for i in p.instructions if i.kind in ("map", "fused", "reduce")]
    values = [v for i in local for v in (*i.inputs, *i.outputs)]
    return sum(p.types[v].max_bytes(p.mesh) for v in values)


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_with_less_memory_and_traffic(name: str):
    graph, fetches, feeds = built(name)
    changed = 0
    for layout in legal_layouts(graph, SHAPE, 8):
        try:
            p = mm.plan(graph, SHAPE, layout, fetches=fetches, optimize=False, seed=2).program
        except LayoutError:
            continue
        p = before(p)
        q = rematerialise(p)
        verify(q)
        want, got = run(p, fetches, feeds), run(q, fetches, feeds)
        for n in want:
            np.testing.assert_allclose(got[n], want[n], rtol=1e-11, atol=1e-11)
        if q is not p:
            changed += 1
            assert moved_bytes(q) < moved_bytes(p)
            assert predict_cost(q).memory["arena"] <= predict_cost(p).memory["arena"]
        assert predict_cost(q).bytes_sent == predict_cost(p).bytes_sent
    assert changed


@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize("name", MODELS)
def test_generated_kernels(name: str):
    graph, fetches, feeds = built(name)
    p = mm.plan(graph, "rows:1", fetches=fetches, seed=2).program
    want, got = run(p, fetches, feeds), run(p, fetches, feeds, "native")
    for n in want:
        np.testing.assert_allclose(got[n], want[n], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("last", ["sum", "prod", "max"])
@pytest.mark.parametrize("inner", ["sum", "max"])
def test_what_a_reduction_makes_stays(inner: str, last: str):
    """A reader cannot make it again: it has the shape of the maps beside it, but sums once."""
    reduce = {"sum": mm.reduce_sum, "prod": mm.reduce_prod, "max": mm.reduce_max}
    with mm.Graph() as graph:
        v = mm.placeholder("v", "d:8;t:2", "float64")
        s = reduce[inner](v, reduced_dim="t")
        y = reduce[last](mm.square(s) + 1)
        fetches = {"y": y, "dv": mm.gradients([y], [v])[0]}
    feeds = {"v": np.random.default_rng(1).normal(size=(8, 2))}
    p = mm.plan(graph, "", fetches=fetches, optimize=False).program
    want, got = run(p, fetches, feeds), run(optimize(p), fetches, feeds)
    for n in want:
        np.testing.assert_allclose(got[n], want[n], rtol=1e-11, atol=1e-11)


def _stored(p: Program, *dims: str) -> list[str]:
    """Kinds of the instructions that make stored values of these dims."""
    return [
        i.kind
        for i in p.instructions
        for v in i.outputs
        if p.types[v].shape.names == dims and i.kind not in ("feed", "read", "view")
    ]


def test_a_normalisation_keeps_its_rows_only():
    graph, fetches, _ = built("normalisation")
    p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
    lean, stored = mm.plan(graph, "rows:1", fetches=fetches).program, before(p)
    # The operand of a product, and the gradients of it and of x; no centred array beside them.
    assert len(_stored(lean, "n", "d")) < len(_stored(stored, "n", "d"))


def test_no_reduction_and_no_product_runs_twice():
    for name in MODELS:
        graph, fetches, _ = built(name)
        p = before(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)
        q = rematerialise(p)
        for kind in ("reduce", "contract"):
            assert q.counts().get(kind) == p.counts().get(kind)


def test_slow_functions_do_not_run_again():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "n:14;d:9", "float64")
        w = mm.get_variable("w", "d:9;e:5", "float64")
        y = mm.exp(mm.sin(mm.tanh(mm.cos(x))))
        loss = mm.reduce_sum(mm.square(mm.sin(mm.einsum([y, w], "n:14;e:5"))))
        fetches = {"loss": loss, "dx": mm.gradients([loss], [x])[0]}
    p = before(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)
    flops = [predict_cost(q).flops for q in (p, rematerialise(p))]
    assert flops[1] <= 1.1 * flops[0]


def test_running_the_pass_again_changes_nothing():
    for name in MODELS:
        graph, fetches, _ = built(name)
        p = mm.plan(graph, SHAPE, "n:rows", fetches=fetches).program
        assert rematerialise(p).text() == p.text()
