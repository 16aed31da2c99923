"""mm.interpret against the oracle; prints, breakpoints and the search for what is not finite."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

import meshmpi as mm
from apps.two_layer.model import Sizes, build, feeds
from meshmpi.checking import interpret
from tests import oracle
from tests.ops.build import UNEVEN
from tests.ops.build import build as build_case
from tests.ops.cases import CASES
from tests.ops.run import SEED, compare

NAMES = [
    "softmax_by_hand",
    "einsum_of_three",
    "gather",
    "top_k",
    "random_numbers",
    "rename",
    "casts",
    "constrained_and_whole",
    "put_rows",
    "conv_of_a_constrained_value",
    "custom_gradient",
    "recompute_grad",
    "scatter_add",
    "cumsum_of_constrained",
    "step_number",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_oracle_says(name: str):
    case = next(c for c in CASES if c.name == name)
    b = build_case(case, UNEVEN)
    keys = [*b.outputs, *b.gradients.values()]
    want = oracle.evaluate(b.graph, keys, b.feeds, b.variables, 1, SEED)
    got = interpret(b.graph, b.feeds, keys, seed=SEED, step=1)
    wide = interpret(b.graph, b.feeds, keys, seed=SEED, step=1, float64=True)
    for t, w in zip(keys, want, strict=True):
        compare(got[t], w, t.dtype, case.tolerance, t.name)
        compare(wide[t], w, t.dtype, 1e-12, t.name)


def test_float64_is_more_exact_than_the_types_of_the_graph():
    b = build(Sizes(6, 5, 7))
    fed, keys = feeds(Sizes(6, 5, 7), 0), [b.loss]
    start = {
        n: np.random.default_rng(3).standard_normal(v.shape.sizes).astype("float32")
        for n, v in b.graph.variables.items()
    }
    (want,) = oracle.evaluate(b.graph, keys, fed, start)
    narrow = interpret(b.graph, fed, keys, variables=start)[b.loss]
    wide = interpret(b.graph, fed, keys, variables=start, float64=True)[b.loss]
    assert wide.dtype == np.float64
    assert narrow.dtype == np.float32
    assert abs(wide / want - 1) < 1e-14 < abs(float(narrow) / want - 1)


def test_updates_are_what_a_step_leaves():
    b = build(Sizes(6, 5, 7))
    fed = feeds(Sizes(6, 5, 7), 0)
    got = interpret(b.graph, fed, [b.loss], updates=b.updates)
    step = mm.compile(b.graph, mm.SimulatedMesh("all:1"), fetches=[b.loss], updates=b.updates, kernels="numpy")
    step(fed)
    for name in ("w", "bias", "v"):
        np.testing.assert_allclose(got[name], step.variables[name], rtol=1e-6, atol=1e-7)


def small() -> tuple:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:3")
        y = mm.log(x)
        z = mm.reduce_sum(y * 2.0)
    return graph, x, y, z


def line_of(t: mm.Tensor) -> str:
    return f"test_interpret.py:{t.source.line}"


def test_prints_by_line_name_and_tensor(capsys):
    graph, _, y, z = small()
    got = interpret(graph, {"x": [1, 1, 1]}, {"total": z}, prints=["x", line_of(y), z])
    assert got["total"] == got[z] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("x float32[a=3], test_interpret.py:")
    assert lines[0].endswith("[1., 1., 1.]")
    assert lines[1].startswith("log float32[a=3]")
    assert lines[2].endswith(": 0.")
    large = interpret(graph, {"x": [1, 2, 4]}, [y])[y]
    np.testing.assert_allclose(large, np.log([1, 2, 4]), rtol=1e-6)


def test_breakpoints_stop_where_the_user_says(monkeypatch):
    graph, _, _, z = small()
    seen = []
    stops = {line_of(z): seen.append}
    interpret(graph, {"x": [1, 2, 4]}, [z], breakpoints=stops)
    assert [c.tensor.name for c in seen] == ["multiply", "reduce_sum"]  # both are made there
    assert seen[0].tensor.source.line == z.source.line
    (given,) = seen[0].inputs.values()
    np.testing.assert_array_equal(given * 2, seen[0].value)
    calls = []
    monkeypatch.setattr(builtins, "breakpoint", lambda: calls.append(1))
    interpret(graph, {"x": [1, 2, 4]}, [z], breakpoints=["log"])
    assert calls == [1]


def test_places_that_are_none_are_refused_with_the_nearest():
    graph, *_ = small()
    with pytest.raises(mm.ShapeError, match="Did you mean 'log'"):
        interpret(graph, {"x": [1, 2, 4]}, prints=["lgo"])


def test_the_first_value_that_is_not_finite_is_named():
    graph, _, y, z = small()
    with pytest.raises(mm.RangeError) as e:
        interpret(graph, {"x": [1, 0, -1]}, [z], check_finite=True)
    text = str(e.value)
    assert "tensor log [a=3] has 2 elements that are not finite, the first -inf at [a=1]" in text
    assert "x in [-1, 1]" in text
    assert line_of(y) in text
    assert interpret(graph, {"x": [1, 0, 1]}, [z])[z] == -np.inf


def test_feeds_are_checked():
    graph, _, _, z = small()
    with pytest.raises(mm.FeedError, match=r"'x' float32\[a=3\] is not fed"):
        interpret(graph, {}, [z])
    with pytest.raises(mm.FeedError, match=r"shape \(2,\)"):
        interpret(graph, {"x": [1, 2]}, [z])
