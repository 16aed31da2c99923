"""Loops, cwise, order and sampling beyond the table: errors, numbers of turns, frequencies."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError

B, C = mm.Dimension("b", 6), mm.Dimension("c", 4)
MESH = "r:2;c:3"


def run(fetches: list[mm.Tensor], layout: str = "", **feeds: np.ndarray) -> list[np.ndarray]:
    graph = fetches[0].graph
    step = mm.compile(graph, mm.SimulatedMesh(MESH), layout, fetches=fetches, kernels="numpy")
    got = step(feeds)
    return [np.asarray(v.numpy() if isinstance(v, mm.ShardedArray) else v) for v in got.values()]


@pytest.mark.parametrize("layout", ["", "b:r", "b:c+r"])
def test_a_while_loop_stops_row_by_row_and_has_the_gradient_of_its_turns(layout: str):
    # Collatz: how many turns to 1, and the factor that each start was multiplied by.
    start = np.array([1.0, 2.0, 3.0, 6.0, 7.0, 27.0])
    turns_of = [0, 1, 7, 8, 16, 20]  # 27 takes 111 turns: it stops at the most
    with mm.Graph():
        x = mm.placeholder("x", [B], "float64")

        def turn(y: mm.Tensor, n: mm.Tensor) -> tuple[mm.Tensor, mm.Tensor]:
            return mm.where(mm.equal(y % 2.0, 0.0), y / 2.0, 3.0 * y + 1.0), n + 1

        zero = mm.zeros([B], "int32")
        y, n = mm.while_loop(lambda y, n: mm.greater(y, 1.0), turn, [x, zero], max_steps=20)
        (g,) = mm.gradients(mm.reduce_sum(y), [x])
        assert g is not None
    ends, turns, slope = run([y, n, g], layout, x=start)
    assert list(turns) == turns_of
    assert list(ends[:5]) == [1] * 5 and ends[5] > 1
    for k, x0 in enumerate(start):
        value, factor = x0, 1.0
        for _ in range(turns_of[k]):
            even = value % 2 == 0
            value, factor = (value / 2, factor / 2) if even else (3 * value + 1, 3 * factor)
        assert (value, factor) == (ends[k], slope[k])


def test_variables_of_turns_are_shared_or_apart():
    with mm.Graph() as graph:
        x = mm.placeholder("x", [B])

        def turn(y: mm.Tensor) -> mm.Tensor:
            return y * mm.get_variable("scale", [B], initializer=mm.ones_initializer())

        mm.repeat(turn, 3, [x], shared_variables=True)
        assert list(graph.variables) == ["scale"]
        mm.repeat(turn, 2, [x], shared_variables=False, name="layer")
        assert list(graph.variables) == ["scale", "layer_0/scale", "layer_1/scale"]
        inputs, options = [x], {"max_steps": 2, "shared_variables": False, "name": "step"}
        mm.while_loop(lambda y: mm.reduce_all(y < 9.0), turn, inputs, **options)
        assert list(graph.variables)[3:] == ["step_0/scale", "step_1/scale"]


def test_loops_refuse_what_does_not_fit():
    with mm.Graph():
        x, wide = mm.placeholder("x", [B]), mm.placeholder("wide", [B, C])
        with pytest.raises(ShapeError, match="n is -1"):
            mm.repeat(lambda y: y, -1, [x], shared_variables=True)
        with pytest.raises(ShapeError, match="takes 1 tensors and returns 2"):
            mm.repeat(lambda y: (y, y), 2, [x], shared_variables=True)
        with pytest.raises(ShapeError, match="not a bool over dims"):
            mm.while_loop(lambda y: y, lambda y: y, [x], max_steps=2)
        with pytest.raises(ShapeError, match="not a bool over dims"):
            mm.while_loop(lambda y: mm.greater(wide, 0.0), lambda y: y, [x], max_steps=2)
        with pytest.raises(ShapeError, match="becomes float32"):
            mm.while_loop(lambda y: mm.reduce_any(y > 0.0), lambda y: y + wide, [x], max_steps=2)


def test_cwise_refuses_what_is_not_elementwise():
    with mm.Graph():
        x = mm.placeholder("x", [B])
        for function in (lambda t: mm.reduce_sum(t), lambda t: mm.shift(t, 1, B, True)):
            with pytest.raises(ShapeError, match="which is not elementwise"):
                mm.cwise(function, [x])
        with pytest.raises(ShapeError, match="returns several tensors"):
            mm.cwise(lambda t: (t, t), [x])


def test_order_refuses_what_is_not_there():
    with mm.Graph():
        x = mm.placeholder("x", [B, C])
        with pytest.raises(ShapeError, match="no element 4 among the 4 of 'c'"):
            mm.nth_largest_element(x, 4, "c")
        with pytest.raises(ShapeError, match="no element -1 among"):
            mm.nth_smallest_element(x, -1, "c")
        with pytest.raises(ShapeError, match="k=5 is more than the 4 elements of 'c'"):
            mm.top_k(x, "c", mm.Dimension("k", 5))
        with pytest.raises(ShapeError, match="the offset .* is not an integer tensor"):
            mm.dynamic_shift(x, mm.range(C), "c", wrap=True)
        with pytest.raises(ShapeError, match="the temperature is -0.5"):
            mm.sample_with_temperature(x, "c", -0.5)


def test_largest_and_smallest_of_nan_are_those_of_numpy():
    x = np.random.default_rng(0).choice([np.nan, np.inf, -np.inf, 1.0, 2.0], (6, 4))
    with mm.Graph():
        t = mm.placeholder("x", [B, C])
        fetches = [mm.argmax(t, "c"), mm.argmin(t, "b"), mm.top_1(t, "b")[0]]
    for layout in ("", "b:r", "c:c", "b:c+r"):
        highest, lowest, value = run(fetches, layout, x=x)
        np.testing.assert_array_equal(highest, x.argmax(1))
        np.testing.assert_array_equal(lowest, x.argmin(0))
        np.testing.assert_array_equal(value, x.max(0))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_samples_have_the_probabilities_of_the_softmax(temperature: float):
    logits = np.array([2.0, -1.0, 0.5, -np.inf])
    draws = 40_000
    with mm.Graph():
        many = mm.broadcast(mm.placeholder("x", [C]), [("draw", draws), C])
        index = mm.sample_with_temperature(many, "c", temperature)
    (drawn,) = run([index], "draw:r", x=logits)
    weights = np.exp(logits / temperature)
    wanted = weights / weights.sum()
    counted = np.bincount(drawn, minlength=4) / draws
    assert np.abs(counted - wanted).max() < 4 * np.sqrt(0.25 / draws)  # four standard deviations
    assert counted[3] == 0
