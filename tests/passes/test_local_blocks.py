"""Values of one global shape in different blocks: no loop nest takes them for equal.

Each graph below brings such values together: by a constraint, by how variables are stored, by a
dimension that has one name and two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.passes import pipeline, tiled_regions
from meshmpi.compiler.passes.tiled_regions import form_tiled_regions
from meshmpi.kernels.native import available
from meshmpi.runtime.compiled import CompiledStep

Made = tuple[list[mm.Tensor], Sequence]
"""What a graph fetches, and its updates."""
KERNELS = ["numpy", pytest.param("native", marks=pytest.mark.skipif(not available(), reason="no C compiler"))]


def constrained_sum(d: int = 3, b: int = 6) -> Made:
    x = mm.placeholder("x", [("d", d), ("b", b)], "float64")
    s = mm.reduce_sum(mm.constrain(x, "b:"), reduced_dim="b")
    return [mm.tanh(x * s)], ()


def column_sums() -> Made:
    x = mm.placeholder("x", [("d", 5), ("b", 7)], "float64")
    whole = mm.constrain(x, "b:;d:")
    return [mm.reduce_sum(whole * whole, reduced_dim="d"), mm.reduce_sum(x, reduced_dim="b")], ()


def gradients_of_both() -> Made:
    x = mm.placeholder("x", [("d", 4), ("b", 6)], "float64")
    y = mm.softmax(mm.constrain(x, "b:"), "b") * mm.constrain(mm.tanh(x), "d:r;b:")
    loss = mm.reduce_sum(mm.square(y))
    return [loss, *mm.gradients([loss], [x])], ()


def dropped_in_two_splits() -> Made:
    """One draw of random numbers covers one way to split them."""
    x = mm.placeholder("x", [("d", 6), ("b", 6)], "float64")
    y = mm.dropout(mm.constrain(x, "d:r;b:"), True, rate=0.4)
    z = mm.dropout(x, True, rate=0.4)
    return [y + z, mm.reduce_sum(y, reduced_dim="b"), mm.reduce_sum(z * x, reduced_dim="d")], ()


def _weights(*storage: str) -> list[mm.Tensor]:
    rng = np.random.default_rng(1)
    return [
        mm.get_variable(f"w{n}", [("d", 4), ("h", 6)], "float64", storage=s, initializer=rng.normal(size=(4, 6)))
        for n, s in enumerate(storage)
    ]


def stored_differently(optimizer: Callable[..., mm.optimize.Optimizer] | None = None) -> Made:
    ws = _weights("d:r;h:", "h:r;d:", "d:;h:")
    loss = mm.reduce_sum(mm.square(ws[0]) + mm.square(ws[1]) * 3.0 + ws[2] * ws[0])
    updates = () if optimizer is None else optimizer(clip_norm=1.0).minimize(loss)
    return [loss, mm.global_norm(ws)], updates


def products_of_two_sizes() -> Made:
    """Loops over scores whose products have a dimension of one name and two sizes."""
    q, k = (mm.placeholder(n, f"{a};x:4", "float64") for n, a in (("q", "a:20"), ("k", "b:24")))
    e = mm.exp(mm.einsum([q, k], "a:20;b:24"))
    v, u = (mm.placeholder(n, f"b:24;{d}", "float64") for n, d in (("v", "d:6"), ("u", "d:5")))
    return [mm.einsum([e, v], "a:20;d:6"), mm.einsum([e, mm.constrain(u, "d:r;b:")], "a:20;d:5")], ()


def scores_of_two_sizes() -> Made:
    """The same within one value: what it is summed over has two sizes."""
    s = []
    for n, x in (("s", 4), ("t", 7)):
        q = mm.placeholder(f"q{n}", f"a:20;x:{x}", "float64")
        k = mm.placeholder(f"k{n}", f"b:24;x:{x}", "float64")
        s.append(mm.einsum([q, k], "a:20;b:24"))
    v = mm.placeholder("v", "b:24;d:6", "float64")
    return [mm.einsum([mm.exp(s[0] + s[1]), v], "a:20;d:6")], ()


def scores_in_two_splits() -> Made:
    q, k = (mm.placeholder(n, f"{a};x:4", "float64") for n, a in (("q", "a:20"), ("k", "b:24")))
    v = mm.placeholder("v", "b:24;d:6", "float64")
    s = mm.einsum([q, k], "a:20;b:24")
    e, f = mm.exp(s), mm.exp(mm.constrain(s, "b:r;a:"))
    return [mm.einsum([e, v], "a:20;d:6"), mm.einsum([f, v], "a:20;d:6"), mm.reduce_sum(e * f)], ()


GRAPHS: dict[str, tuple[Callable[[], Made], Sequence[str]]] = {
    "constrained_sum": (constrained_sum, ["b:r", "d:r"]),
    "constrained_sum_64": (partial(constrained_sum, 64, 64), ["b:r"]),
    "column_sums": (column_sums, ["b:r", "d:r"]),
    "gradients_of_both": (gradients_of_both, ["", "b:r"]),
    "dropped_in_two_splits": (dropped_in_two_splits, ["", "b:r"]),
    "stored_differently": (stored_differently, [""]),
    "sgd_clips": (partial(stored_differently, partial(mm.optimize.SGD, 0.1)), [""]),
    "adam_clips": (partial(stored_differently, partial(mm.optimize.Adam, 0.1)), [""]),
    "products_of_two_sizes": (products_of_two_sizes, ["", "a:r"]),
    "scores_of_two_sizes": (scores_of_two_sizes, ["", "a:r", "b:r"]),
    "scores_in_two_splits": (scores_in_two_splits, ["", "a:r", "b:r"]),
}


def short_blocks(m: pytest.MonkeyPatch) -> None:
    """Loops over blocks of a few rows, also in small graphs."""
    small = partial(form_tiled_regions, cache_bytes=400)
    passes = tuple(small if f is form_tiled_regions else f for f in pipeline.PASSES)
    m.setattr(tiled_regions, "LEAST_ROWS", 4)
    m.setattr(pipeline, "PASSES", passes)


def run(made: Made, graph: mm.Graph, mesh: str, layout: str, kernels: str, optimize: bool) -> dict:
    """Fetches of two steps and what the variables are then, as whole arrays."""
    fetches, updates = made
    with pytest.MonkeyPatch.context() as m:
        short_blocks(m)
        step = mm.compile(
            graph,
            mm.SimulatedMesh(mesh),
            layout,
            fetches=fetches,
            updates=updates,
            kernels=kernels,
            optimize=optimize,
            seed=3,
        )
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(-1, 1, t.shape.sizes) for n, t in sorted(step.program.feeds.items())}
    out: dict = {}
    for number in range(2):
        got = step(feeds)
        out |= {f"{number} {t.name}": whole(got[t]) for t in fetches}
    return out | {n: whole(step.variables[n]) for n in step.program.variables}


def whole(x: object) -> np.ndarray:
    return np.asarray(x.numpy() if isinstance(x, mm.ShardedArray) else x)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", GRAPHS)
def test_passes_change_no_value(name: str, kernels: str):
    build, layouts = GRAPHS[name]
    with mm.Graph() as graph:
        made = build()
    want = run(made, graph, "r:1", "", "numpy", False)
    for mesh in ("r:2", "r:3", "r:5"):
        for layout in layouts:
            got = run(made, graph, mesh, layout, kernels, True)
            assert got.keys() == want.keys()
            for n, value in want.items():
                error = np.abs(got[n] - value).max() / max(1e-3, np.abs(value).max())
                assert error < 1e-12, f"{n} differs by {error:.2g} on {mesh} '{layout}'"


def test_there_are_tiled_regions_to_test(monkeypatch):
    short_blocks(monkeypatch)
    for build, mesh, layout in ((products_of_two_sizes, "r:2", ""), (scores_in_two_splits, "r:2", "b:r")):
        with mm.Graph() as graph:
            fetches, _ = build()
        assert "tiled" in mm.plan(graph, mesh, layout, fetches=fetches).program.counts()


@pytest.mark.skipif(not available(), reason="no C compiler")
def test_default_options_build_kernels_for_large_values():
    with mm.Graph() as graph:
        fetches, _ = constrained_sum(2048, 1024)
    step = mm.compile(graph, mm.SimulatedMesh("r:2"), "b:r", fetches=fetches)
    assert isinstance(step, CompiledStep)
    assert step._executor.native is not None
    x = np.random.default_rng(0).uniform(-1, 1, (2048, 1024))
    assert np.abs(step(x=x)[fetches[0]].numpy() - np.tanh(x * x.sum(1, keepdims=True))).max() < 1e-12
