"""Bad input beyond the catalogue of mistakes: which error, what its message says, and whose line it names.

`tests/errors/catalogue` has a program for each common mistake, runs it and its cure, and proves that nothing was
communicated before.  Bad input to a running job (mesh size, graphs that differ) is in tests/mpirun; corpora,
checkpoints and configuration in tests/train.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import FeedError, LayoutError, MeshError, MeshmpiError, ProgramError, ShapeError, VariableError

HERE = Path(__file__).name


def line() -> int:
    """The caller's line number."""
    return sys._getframe(1).f_lineno


def refused(kind: type[MeshmpiError], build: Callable[[], object], *words: str) -> MeshmpiError:
    with pytest.raises(kind) as caught:
        build()
    message = str(caught.value)
    missing = [w for w in words if w not in message]
    assert not missing, f"{missing} not in: {message}"
    assert caught.value.problem.rstrip()[-1] in ".:", "the problem is not a sentence"
    return caught.value


@pytest.fixture
def graph():
    with mm.Graph() as graph:
        yield graph


def _compile(graph: mm.Graph, loss: mm.Tensor, layout: str = "", **options: object):
    return mm.compile(graph, mm.SimulatedMesh("rows:2;cols:2"), layout, fetches=[loss], **options)


def test_unknown_output_dimension_is_suggested(graph):
    x, w = mm.placeholder("x", "batch:8;d_ff:32"), mm.placeholder("w", "d_ff:32;d_model:16")
    e = refused(ShapeError, lambda: mm.einsum([x, w], "batch:8;d_modell:16"), "(16)", "Did you mean 'd_model'?")
    assert f"{HERE}:{line() - 1}" in str(e)
    refused(ShapeError, lambda: mm.reduce_sum(x, output_shape="d_f:32"), "d_f=32", "'d_ff'")


def test_data_types_and_arrays(graph):
    x = mm.placeholder("x", "a:4")
    refused(ShapeError, lambda: mm.reduce_any(x), "float32", "bool")
    refused(ShapeError, lambda: x + np.zeros(4), "ndarray", "mm.placeholder")
    refused(ShapeError, lambda: np.ones(4) * x, "ndarray")
    assert (np.float64(2.0) * x).shape == x.shape


def test_structural_mistakes(graph):
    x = mm.placeholder("x", "a:4;b:6")
    refused(ShapeError, lambda: mm.transpose(x, "a:4;c:6"), "[a=4, c=6]", "[a=4, b=6]")
    refused(ShapeError, lambda: mm.concat([x, mm.placeholder("y", "a:5;b:6")], "b"), "[a=5, b=6]", "'b'")
    refused(ShapeError, lambda: mm.replace_dimensions(x, ["b", "a"], mm.Dimension("m", 24)), "adjacent")


def test_the_line_that_made_it_is_named(graph):
    mm.placeholder("x", "a:4")
    first = line() - 1
    e = refused(ShapeError, lambda: mm.placeholder("x", "a:4"), "'x'", "exists")
    assert f"{HERE}:{first}" in str(e)
    w, x = mm.get_variable("w", "a:4"), mm.placeholder("y", "a:4;b:2")
    made = f"{HERE}:{line() - 1}"
    refused(VariableError, lambda: mm.get_variable("w", "a:5"), "'w'", "[a=4]", "[a=5]", "mm.scope", made)
    refused(ShapeError, lambda: mm.assign(x, x), "not the value of a variable", "mm.get_variable()")
    updates = [mm.assign(w, w + 1.0), mm.assign(w, w * 2.0)]
    made = f"{HERE}:{line() - 1}"
    refused(VariableError, lambda: _compile(graph, w, updates=updates), "'w'", "twice", made)


def test_optional_rules_and_storage(graph):
    w = mm.get_variable("w", "a:4;b:6", storage="a:rows")
    made = f"{HERE}:{line() - 1}"
    refused(LayoutError, lambda: _compile(graph, w, "b:rows"), "'rows'", "'a'", "'b'", made)
    refused(LayoutError, lambda: _compile(graph, w, storage="z:rows"), "'z'", "no tensor")
    _compile(graph, w, "z?:rows")
    y = mm.constrain(mm.placeholder("x", "a:4;b:6"), "a:row") * 1.0
    refused(LayoutError, lambda: _compile(graph, y), "'row'", "Did you mean 'rows'?")


def test_feeds_and_variables_of_a_step(graph):
    x, w = mm.placeholder("x", "batch:4;io:6"), mm.get_variable("w", "io:6")
    step = _compile(graph, mm.einsum([x, w], "batch:4"), "batch:rows")
    fed = np.zeros((4, 6), np.float32)
    refused(FeedError, lambda: step(x=fed, y=fed), "'y'", "no placeholder")
    refused(FeedError, lambda: step(x=fed[0]), "'x'", "(6,)", "(4, 6)")
    refused(FeedError, lambda: step(x=fed.astype(np.int64)), "'x'", "int64", "float32")
    refused(VariableError, lambda: step.assign({"v": fed}), "'v'")
    refused(VariableError, lambda: step.assign({"w": np.zeros(7)}), "'w'", "[io=6]", "(7,)")


def test_two_programs_share_variables_in_one_layout(graph):
    w = mm.get_variable("w", "a:4")
    shared = _compile(graph, w, "a:rows").variables
    _compile(graph, w * 2.0, "a:rows", variables=shared)
    refused(VariableError, lambda: _compile(graph, w, "a:cols", variables=shared), "'w'", "a=4/rows", "a=4/cols")


def test_all_errors_are_of_one_family():
    kinds = [LayoutError, ShapeError, MeshError, ProgramError, FeedError, VariableError]
    assert all(issubclass(k, MeshmpiError) for k in kinds)
    e = MeshmpiError("a is 1.", "Make it 2.", "x made at f.py:3")
    assert str(e) == f"a is 1. Make it 2.\nin x made at f.py:3, used at {__file__}:{line() - 1}"


def test_an_error_travels_between_ranks_as_it_is():
    """Errors of one rank are sent to the others, by pickle, and raised there."""
    for error in (LayoutError("a.", "b.", "x made at f.py:3"), ShapeError("a.", "b.")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert (again.problem, again.remedy, again.where) == ("a.", "b.", error.where)


def test_both_lines_are_told_where_a_tensor_was_made_elsewhere(graph):
    x = mm.placeholder("x", "a:4;b:2")
    made = line() - 1
    e = refused(LayoutError, lambda: _compile(graph, x, "a:rows;b:rows"), "'rows'")
    assert e.where == f"x made at {__file__}:{made}, used at {_compile_line()}"


def _compile_line() -> str:
    return f"{__file__}:{_compile.__code__.co_firstlineno + 1}"


def test_code_that_dataclasses_write_is_not_the_users():
    from meshmpi.transformer.decoding.decoding import Sampling

    e = refused(mm.ConfigError, lambda: Sampling(temperature=-1.0), "-1.0")
    assert e.where == f"the call at {__file__}:{line() - 1}"


def test_a_message_lists_a_few_inputs_only(graph):
    xs = [mm.placeholder(f"x{k}", f"a:4;b{k}:2") for k in range(6)]
    e = refused(ShapeError, lambda: mm.einsum([*xs, mm.placeholder("y", "a:5")], []), "'a'")
    assert "x0 float32[a=4, b0=2]" in e.where and "x3" in e.where and "x4" not in e.where
    assert "and 3 more" in e.where
