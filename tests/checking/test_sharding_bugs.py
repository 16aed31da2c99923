"""Published wrong results of other frameworks: the same computation, in many layouts, against plain NumPy.

One function for each row of docs/sharding_bugs.md: it builds a graph with sizes that the mesh does not
divide, and returns the feeds and what NumPy computes.  Each case runs in layouts of two simulated meshes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshmpi as mm
from tests.docs.pages import DOCS
from tests.layouts import legal_layouts

MESHES = ["rows:2;cols:2", "rows:3;cols:2"]
LAYOUTS = 8
"""Of each mesh; the sample covers every choice of axes for every dimension first."""


class Case(NamedTuple):
    """What a row computes."""

    feeds: Mapping[str, np.ndarray]
    expected: Mapping[mm.Tensor, Any]
    updates: tuple[mm.Update, ...] = ()
    variables: Mapping[str, np.ndarray] = {}
    """Their values after the step."""


CASES: dict[str, Callable[[], Case]] = {}
"""Repository and number of the thread -> the function that builds the case."""


def row(*threads: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Registers a case for the threads that report it."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        for thread in threads:
            CASES[thread] = build
        return build

    return register


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of both signs, the same in every run."""
    return np.random.default_rng(seed).standard_normal(shape)


def feed(name: str, shape: str) -> mm.Tensor:
    return mm.placeholder(name, shape, "float64")


@row("pytorch/pytorch 179502")
def view_of_a_split_tensor() -> Case:
    x, array = feed("x", "a:12;b:8"), numbers(12, 8)
    return Case({"x": array}, {mm.reshape(x, "c:16;d:6"): array.reshape(16, 6)})


@row("pytorch/pytorch 172812", "pytorch/pytorch 144109")
def blocks_of_unequal_size() -> Case:
    x, array = feed("x", "a:5;b:14"), numbers(5, 14)
    return Case({"x": array}, {mm.square(x): array**2})


@row("pytorch/pytorch 161368")
def positions_in_a_dimension_over_two_axes() -> Case:
    few, many = mm.Dimension("few", 2), mm.Dimension("many", 7)
    x = feed("x", "few:2;many:7")
    here = mm.range(few, "float64") * 10 + mm.range(many, "float64")
    array = numbers(2, 7)
    return Case({"x": array}, {x + here: array + 10 * np.arange(2)[:, None] + np.arange(7)})


@row("pytorch/pytorch 162692")
def mean_of_blocks_of_unequal_size() -> Case:
    x, y = feed("x", "a:3;b:4"), feed("y", "c:1;b:4")
    a, b = np.arange(12.0).reshape(3, 4), numbers(1, 4)
    means = {mm.reduce_mean(x): a.mean(), mm.reduce_mean(y): b.mean()}
    return Case({"x": a, "y": b}, {**means, mm.reduce_mean(x, reduced_dim="a"): a.mean(0)})


@row("pytorch/pytorch 163193")
def number_added_to_a_sum() -> Case:
    x, array = feed("x", "a:10"), np.arange(10.0)
    total = mm.reduce_sum(x)
    return Case({"x": array}, {total + 10: 55.0, 10 - total: -35.0})


@row("pytorch/pytorch 147180", "pytorch/pytorch 153603")
def sum_times_several_numbers() -> Case:
    x, array = feed("x", "a:7;b:5"), numbers(7, 5)
    total = mm.reduce_sum(x, reduced_dim="a")
    return Case({"x": array}, {total * k: array.sum(0) * k for k in (-5, 2, 3)})


@row("pytorch/pytorch 149768")
def clipping_by_a_norm() -> Case:
    x, w = feed("x", "a:7;b:5"), feed("w", "b:5")
    a, b = numbers(7, 5), numbers(5, seed=1)
    (clipped, other), norm = mm.clip_by_global_norm([x, w], 0.5)
    length = np.sqrt((a**2).sum() + (b**2).sum())
    return Case({"x": a, "w": b}, {clipped: a * 0.5 / length, other: b * 0.5 / length, norm: length})


@row("pytorch/pytorch 159856", "pytorch/pytorch 144054")
def norm_of_a_pending_sum() -> Case:
    x, w = feed("x", "a:7;b:5"), feed("w", "b:5;c:3")
    a, b = numbers(7, 5), numbers(5, 3, seed=1)
    y = mm.einsum([x, w], "a:7;c:3")
    return Case({"x": a, "w": b}, {mm.sqrt(mm.reduce_sum(mm.square(y))): np.linalg.norm(a @ b)})


@row("pytorch/pytorch 173936")
def argmax_over_a_split_dimension() -> Case:
    x, array = feed("x", "a:3;b:4"), np.array([[10, 5, 3, 8], [1, 2, 2, 1], [-4, -3, -2, -1]], float)
    return Case({"x": array}, {mm.argmax(x, "b"): array.argmax(1)})


@row("pytorch/pytorch 190746")
def gradient_of_log_softmax() -> Case:
    x, dy = feed("x", "a:3;vocab:7"), feed("dy", "a:3;vocab:7")
    a, b = numbers(3, 7), numbers(3, 7, seed=1)
    (gradient,) = mm.gradients([mm.reduce_sum(mm.log_softmax(x, "vocab") * dy)], [x])
    assert gradient is not None
    probabilities = np.exp(a) / np.exp(a).sum(1, keepdims=True)
    return Case({"x": a, "dy": b}, {gradient: b - probabilities * b.sum(1, keepdims=True)})


@row("pytorch/pytorch 191926")
def gradient_of_a_convolution_split_in_width() -> Case:
    x, w = feed("x", "n:2;width:8;in:3"), feed("w", "k:4;in:3;out:5")
    a, b = numbers(2, 8, 3), numbers(4, 3, 5, seed=1)
    y = mm.conv(x, w, [mm.ConvDims("width", "k", "across", stride=4)], "n:2;across:2;out:5")
    (gradient,) = mm.gradients([mm.reduce_sum(y)], [x])
    assert gradient is not None
    parts = a.reshape(2, 2, 4, 3)
    summed = np.tile(b.sum(2), (2, 1))
    return Case({"x": a, "w": b}, {y: np.einsum("npki,kio->npo", parts, b), gradient: np.tile(summed, (2, 1, 1))})


@row("pytorch/pytorch 103306", "pytorch/pytorch 115310")
def split_and_gathered_again() -> Case:
    x, array = feed("x", "a:5;b:10"), numbers(5, 10)
    return Case({"x": array}, {mm.rename(x, {"a": "_whole"}): array})


@row("pytorch/pytorch 166598")
def contraction_over_two_axes_in_either_order() -> Case:
    w = mm.get_variable("w", "k:4;_n:5", "float64", numbers(4, 5), storage="k:cols+rows")
    x, array = feed("x", "_m:3;k:4"), numbers(3, 4, seed=1)
    return Case({"x": array}, {mm.einsum([x, w], "_m:3;_n:5"): array @ numbers(4, 5)})


@row("pytorch/pytorch 172350", "jax-ml/jax 23052")
def scattered_updates() -> Case:
    x, table = feed("x", "i:4;c:5"), feed("table", "r:6;c:5")
    places = mm.placeholder("places", "i:4", "int32")
    added = table + mm.scatter_add(x, places, mm.Dimension("r", 6))
    put = mm.put(table, x, places, "r")
    a, t, where = numbers(4, 5), numbers(6, 5, seed=1), np.array([5, 0, 3, 2])
    sums, replaced = t.copy(), t.copy()
    np.add.at(sums, where, a)
    replaced[where] = a
    return Case({"x": a, "table": t, "places": where}, {added: sums, put: replaced})


@row("jax-ml/jax 21403")
def running_sum_of_a_split_dimension() -> Case:
    x, array = feed("x", "a:3;b:11"), np.ones((3, 11))
    return Case({"x": array}, {mm.cumsum(x, "b"): np.cumsum(array, 1)})


@row("jax-ml/jax 24576")
def concatenation_of_split_tensors() -> Case:
    x, y = feed("x", "a:4"), mm.rename(feed("y", "long:12"), {"long": "a"})
    return Case({"x": np.ones(4), "y": np.ones(12)}, {mm.concat([x, y], "a"): np.ones(16)})


@row("jax-ml/jax 19271")
def top_k_of_a_split_dimension() -> Case:
    x, array = feed("x", "a:2;b:13"), numbers(2, 13)
    one, _ = mm.top_k(x, "b", mm.Dimension("k", 1))
    four, places = mm.top_k(x, "b", mm.Dimension("k4", 4))
    order = np.argsort(-array, 1)[:, :4]
    best = np.take_along_axis(array, order, 1)
    return Case({"x": array}, {one: best[:, :1], four: best, places: order})


@row("jax-ml/jax 18434")
def shift_and_set_the_last_row() -> Case:
    x, array = feed("x", "a:9;b:4"), numbers(9, 4)
    last = mm.equal(mm.range(mm.Dimension("a", 9)), 8)
    y = mm.where(last, 1.456, mm.shift(x, -1, "a", wrap=False))
    return Case({"x": array}, {y: np.vstack([array[1:], np.full((1, 4), 1.456)])})


@row("jax-ml/jax 3970")
def gradient_of_a_sum_over_the_batch() -> Case:
    w, data = feed("w", ""), feed("data", "batch:5")
    array = numbers(5)
    (gradient,) = mm.gradients([mm.reduce_sum((w * w + 1) * data)], [w])
    assert gradient is not None
    return Case({"w": np.array(1.5), "data": array}, {gradient: 3.0 * array.sum()})


@row("jax-ml/jax 20088")
def update_in_place_and_old_value() -> Case:
    w = mm.get_variable("w", "a:7;b:3", "float64", numbers(7, 3))
    update = mm.assign(w, mm.constrain(w * 2 + 1, ""))
    old = numbers(7, 3)
    return Case({}, {w + 0: old, mm.rename(w, {"a": "c"}): old}, (update,), {"w": old * 2 + 1})


def whole(result: Any) -> Any:
    """A fetch as an array or number."""
    return result.numpy() if isinstance(result, mm.ShardedArray) else result


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("thread", CASES)
def test_every_layout_computes_what_numpy_does(thread: str, mesh: str):
    with mm.Graph() as graph:
        case = CASES[thread]()
    layouts = legal_layouts(graph, mm.MeshShape(mesh), LAYOUTS)
    assert len(layouts) > 2
    for layout in layouts:
        step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[*case.expected], updates=case.updates)
        out = step(**case.feeds)
        for t, right in case.expected.items():
            np.testing.assert_allclose(whole(out[t]), right, rtol=1e-12, atol=1e-12, err_msg=f"{t.name} in '{layout}'")
        for name, right in case.variables.items():
            np.testing.assert_allclose(step.variables[name], right, rtol=1e-12, err_msg=f"{name} in '{layout}'")


@pytest.mark.parametrize("mesh", MESHES)
def test_random_numbers_do_not_depend_on_the_layout(mesh: str):
    """pytorch/pytorch 168058, jax-ml/jax 40232"""
    with mm.Graph() as graph:
        drawn = mm.random_normal("a:9;b:8")
        dropped = mm.dropout(mm.ones("a:9;b:8"), True, rate=0.5)
    results = []
    for layout in legal_layouts(graph, mm.MeshShape(mesh), LAYOUTS):
        out = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[drawn, dropped], seed=7)()
        results.append((out[drawn].numpy(), out[dropped].numpy()))
    assert len(results) > 3 and 0 < results[0][1].mean() < 2
    for one, other in itertools.pairwise(results):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_the_page_and_the_cases_have_the_same_threads():
    text = (DOCS / "sharding_bugs.md").read_text()
    linked = {f"{repo} {n}" for repo, n in re.findall(r"github\.com/([\w-]+/[\w-]+)/(?:issues|pull)/(\d+)", text)}
    source = test_random_numbers_do_not_depend_on_the_layout.__doc__ or ""
    assert linked == {*CASES, *source.split(", ")}
