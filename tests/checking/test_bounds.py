"""Error bounds hold, and are not so wide that mistakes hide below them."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.checking import verify
from meshmpi.checking.verify import Truth
from meshmpi.runtime.simulated_mesh import MEANINGS


def truth(graph: mm.Graph, t: mm.Tensor, feeds: dict, precision: str = "own") -> Truth:
    return Truth(graph, {"t": t}, [], feeds, None, 0, precision, 0)


def bound_of(make, feeds: dict[str, np.ndarray], precision: str = "own"):
    with mm.Graph() as graph:
        xs = [mm.placeholder(n, f"a:{a.size}", "float32") for n, a in feeds.items()]
        y = make(*xs)
    return next((v, b) for t, v, b in truth(graph, y, feeds, precision).judged({}) if t is y)


def test_of_a_sum_it_is_the_textbook_one():
    x = np.random.default_rng(0).standard_normal(1000).astype("float32")
    value, bound = bound_of(mm.reduce_sum, {"x": x})
    u = 2.0**-24
    assert bound == pytest.approx((999 + 6) * u * np.abs(x.astype("f8")).sum(), rel=1e-9)
    # Worst orders stay below it; it is met within three orders of magnitude.
    orders = [np.sort(x), np.sort(x)[::-1], x]
    errors = [abs(float(np.add.accumulate(o)[-1]) - value) for o in orders]
    assert 1e-4 * bound < max(errors) < bound


def test_errors_are_carried_by_derivatives():
    x = np.array([0.5, 1.0, 3.0], "float32")
    _, of_double = bound_of(lambda a: mm.exp(a * 3.0), {"x": x})
    u, y = 2.0**-24, 3 * x.astype("f8")
    first_order = 8 * u * np.exp(y) + np.exp(y) * 8 * u * y
    np.testing.assert_allclose(of_double, first_order, rtol=1e-3)


def test_what_only_moves_or_compares_exact_numbers_is_exact():
    x = np.array([2.0, -1.0, 5.0], "float32")
    assert not bound_of(lambda a: mm.maximum(a, 0.0), {"x": x})[1].any()
    assert not bound_of(lambda a: mm.reduce_max(a), {"x": x})[1].any()
    assert bound_of(lambda a: mm.cast(mm.greater(a, 0.0), "float32"), {"x": x})[1].any()


def test_decisions_within_rounding_are_granted_and_others_are_not():
    x = np.array([1.0, 2.0, 3.0], "float32")

    def positive(a: mm.Tensor) -> mm.Tensor:
        third = a * (1 / 3) - 1 / 3  # 0 for a = 1, but only up to rounding
        return mm.cast(mm.greater(third, 0.0), "int32")

    _, bound = bound_of(positive, {"x": x})
    assert bound[0] == 1.0
    assert not bound[1:].any()


def test_small_mistakes_in_deep_graphs_are_no_rounding(monkeypatch):
    right = MEANINGS["all_reduce"]

    def wrong(group, by_rank):
        right(group, by_rank)
        for call in group:
            call.x *= 1 + 1e-12

    monkeypatch.setitem(MEANINGS, "all_reduce", wrong)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:8;b:8")
        w = mm.get_variable("w", "a:8;b:8")
        y = x
        for _ in range(12):  # bounds must not grow from layer to layer
            y = mm.tanh(mm.rename(mm.einsum([y, w], "b:8"), {"b": "b"}) + y)
        loss = mm.reduce_sum(y)
    assert not verify(graph, ["a:all"], "all:2", [loss]).ok
    monkeypatch.undo()
    assert verify(graph, ["a:all"], "all:2", [loss]).ok


def test_bfloat16_is_rounded_more():
    x = np.random.default_rng(0).standard_normal(64).astype("float32")

    def halves(a: mm.Tensor) -> mm.Tensor:
        return mm.reduce_sum(mm.cast(a, "bfloat16"))

    value, bound = bound_of(halves, {"x": x})
    with mm.Graph() as graph:
        y = halves(mm.placeholder("x", "a:64", "float32"))
    for k in (1, 2, 8):
        step = mm.compile(graph, mm.SimulatedMesh(f"all:{k}"), "a:all", fetches=[y])
        apart = abs(float(step(x=x)[y]) - value)
        assert apart < bound < 200 * 2**-8 * np.abs(x).sum()
