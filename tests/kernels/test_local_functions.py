"""local_function: what its function gets and returns, and what debug mode finds of its declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshmpi as mm

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
W = np.array([0.5, 2.0, -1.0], np.float32)
SAME = ("batch:5;length:3", "float32")


def run(
    fn: Callable[..., Any],
    outputs: Any = (SAME,),
    batch_dims: Any = ("batch",),
    gradient: Any = None,
    debug: bool = True,
    layout: str = "batch:rows",
    optimize: bool = True,
) -> list[Any]:
    """The results of ``fn(x, w)`` on two ranks, and with a gradient those of x and w too."""
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "batch:5;length:3"), mm.placeholder("w", "length:3")
        made = mm.local_function(fn, [x, w], outputs, batch_dims, gradient=gradient)
        fetched = made if isinstance(made, list) else [made]
        if gradient is not None:
            fetched += [d for d in mm.gradients([mm.reduce_sum(mm.sin(fetched[0]))], [x, w]) if d is not None]
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), layout, fetches=fetched, debug=debug, optimize=optimize)
    return [step(x=X, w=W)[t] for t in fetched]


def error(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(mm.ProgramError) as raised:
        run(fn, *args, **options)
    assert "test_local_functions.py" in str(raised.value), "the user's line"
    return str(raised.value)


def test_it_gets_its_part_of_batch_dims_contiguous_and_in_order():
    seen = []

    def fn(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        seen.append((x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable, w.shape))
        return x * w

    (y,) = run(fn, debug=False)
    np.testing.assert_array_equal(y.numpy(), X * W)
    assert seen == [((n, 3), np.float32, True, False, (3,)) for n in (3, 2)]


def test_what_is_no_batch_dim_is_whole_on_every_rank():
    seen = []
    (y,) = run(lambda x, w: (seen.append(x.shape), x - x.mean(0))[1], batch_dims=(), debug=False)
    assert seen == [(5, 3)] * 2
    np.testing.assert_allclose(y.numpy(), X - X.mean(0), rtol=1e-6)


def test_a_rank_without_a_part_does_not_call_it():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:1;length:3")
        y, total = mm.local_function(lambda x: (x + x.min(), x.sum(0)), [x], [x, ("length:3", "float32")], "batch")
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), "batch:rows", fetches=[y, total], debug=True)
    results = step(x=X[:1])
    np.testing.assert_array_equal(results[total].numpy(), X[0])
    np.testing.assert_array_equal(results[y].numpy(), X[:1] + X[:1].min())


def test_it_gets_the_types_it_was_declared_with_when_the_rest_is_float64():
    seen = []

    def fn(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        seen.append(x.dtype)
        return x * w

    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "batch:5;length:3"), mm.placeholder("w", "length:3")
        y = mm.local_function(fn, [x, w], [x], "batch")
    found = mm.interpret(graph, {"x": X, "w": W}, [y], float64=True)
    assert found[y].dtype == np.float64 and seen == [np.float32]
    assert mm.verify(graph, mesh=["rows:2;cols:2", "rows:3"], fetches=[y]).ok


def test_layouts_that_compute_something_else_are_found():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:5;length:3")
        y = mm.local_function(lambda x: x - x.mean(0), [x], [x], "batch")  # batch is no batch dim of it
    report = mm.verify(graph, mesh="rows:2", fetches=[y])
    assert [str(c.layout) for c in report.wrong] == ["batch:rows"]


def test_equal_functions_are_computed_once_and_different_ones_of_one_name_are_not():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:5;length:3")
        made = [mm.local_function(lambda x, k=k: x + k, [x], [x], "batch") for k in (1, 2)]
        made += [mm.local_function(np.sort, [x], [x], "batch") for _ in range(2)]
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), fetches=made)
    results = step(x=X)
    for k, y in enumerate(made[:2], 1):
        np.testing.assert_array_equal(results[y].numpy(), X + k)
    assert step.program.counts()["local_function"] == 3


def test_flops_are_counted_and_priced():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;length:3")
        y = mm.local_function(np.sort, [x], [x], "batch", flops=1000)
    plan = mm.plan(graph, "rows:2", "batch:rows", fetches=[y])
    assert plan.cost.flops == 3 * 3 * 1000
    machine = mm.load_machine("tpuv2")
    seconds = mm.predict_time(plan.program, machine).seconds
    assert seconds > mm.predict_time(mm.plan(_sorted_free(), "rows:2", "batch:rows").program, machine).seconds


def _sorted_free() -> mm.Graph:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;length:3")
        mm.local_function(np.sort, [x], [x], "batch")
    return graph


@pytest.mark.parametrize("optimize", [False, True])
def test_its_gradient_is_summed_over_ranks(optimize: bool):
    def gradient(xs: Any, ys: Any, dys: Any) -> Any:
        return dys[0] * xs[1], (dys[0] * xs[0]).sum(0)

    _, dx, dw = run(lambda x, w: x * w, gradient=gradient, optimize=optimize)
    slope = np.cos(X * W)
    np.testing.assert_allclose(dx.numpy(), slope * W, rtol=1e-5)
    np.testing.assert_allclose(dw.numpy(), (slope * X).sum(0), rtol=1e-5)


def test_no_gradient_of_an_input_is_zeros():
    _, dx, dw = run(lambda x, w: x + 0 * w, gradient=lambda xs, ys, dys: (dys[0], None))
    assert not dw.numpy().any() and dx.numpy().any()


def test_wrong_gradients_are_found_in_debug_mode():
    words = error(lambda x, w: x * w, gradient=lambda xs, ys, dys: (dys[0] * xs[1], (dys[0] * xs[1]).sum(0)))
    assert "the gradient by input 1" in words and "central differences" in words
    run(lambda x, w: x * w, gradient=lambda xs, ys, dys: (dys[0], dys[0].sum(0)), debug=False)
    words = error(lambda x, w: x * w, gradient=lambda xs, ys, dys: dys[0], debug=False)
    assert "gradients for 2 inputs" in words


def test_a_wrong_batch_dim_is_found_in_debug_mode():
    assert "'batch', side by side, differs" in error(lambda x, w: x - x.mean(0))
    assert "'batch', added up, differs" in error(lambda x, w: x.max(0), [("length:3", "float32")])
    assert run(lambda x, w: x.sum(0), [("length:3", "float32")])


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda x, w: x.sum(1), "result 0 has the shape (3,), declared is float32[batch=3, length=3]"),
        (lambda x, w: x.astype(complex), "result 0 is complex128, declared is float32"),
        (lambda x, w: (x, x), "returned 2 results, 1 are declared"),
        (lambda x, w: None, "result 0 is None"),
        (lambda x, w: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda x, w: x.__setitem__(0, 1), "assignment destination is read-only"),
    ],
    ids=["shape", "type", "number", "none", "raises", "writes"],
)
def test_what_does_not_fit_its_declaration_is_told(fn: Callable[..., Any], words: str):
    assert words in error(fn, debug=False)


@pytest.mark.parametrize(
    "outputs, options, words",
    [
        (["batch:5"], {}, "which is not"),
        ([SAME], {"batch_dims": "bath"}, "no input and no result has the batch dimension 'bath'"),
        ([("batch:4", "float32")], {}, "dimension 'batch' has sizes 5 and 4"),
        ([("length:3", "bool")], {"batch_dims": "batch"}, "so that it would be summed"),
        ([("free:3", "float32")], {"batch_dims": "free"}, "no input has the batch dimension 'free'"),
    ],
    ids=["type", "name", "size", "bool", "free"],
)
def test_wrong_declarations(outputs: Any, options: dict[str, Any], words: str):
    with mm.Graph():
        x = mm.placeholder("x", "batch:5;length:3")
        with pytest.raises(mm.ShapeError, match=words):
            mm.local_function(lambda x: x, [x], outputs, **options)


def test_a_missing_gradient_and_a_wrong_number_of_arguments_are_told_while_the_graph_is_built():
    with mm.Graph():
        x = mm.placeholder("x", "batch:5;length:3")
        y = mm.local_function(np.sort, [x], [x])
        with pytest.raises(mm.ShapeError, match="has no gradient"):
            mm.gradients([y], [x])
        with pytest.raises(mm.ArgumentError, match="takes 1 array"):
            mm.local_function(lambda a, b: a, [x], [x])
