"""Every bad input: which error, what its message says, and that nothing was communicated before.

The template: the problem with names and numbers, the cure, the tensor and the line that made it.
Bad input to a running job (mesh size, graphs that differ) is in tests/mpirun; corpora, checkpoints
and configuration in tests/train.
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


class SilentMesh(mm.SimulatedMesh):
    """A mesh on which any collective is a failure of the test."""

    def _refuse(self, *args: object, **options: object) -> None:
        raise AssertionError("communicated before the error")

    all_reduce = all_gather = reduce_scatter = all_to_all = shift = _refuse


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


def _model():
    x = mm.placeholder("x", "batch:4;io:6")
    w = mm.get_variable("w", "io:6;hidden:8")
    return mm.reduce_sum(mm.einsum([x, w], "batch:4;hidden:8"))


def _compile(graph: mm.Graph, loss: mm.Tensor, layout: str = "", **options: object):
    return mm.compile(graph, SilentMesh("rows:2;cols:2"), layout, fetches=[loss], **options)


# -- building a graph ------------------------------------------------------------------------------


def test_dimension_name_twice(graph):
    refused(ShapeError, lambda: mm.placeholder("x", "a:4;a:5"), "'a'", "2 times", "own name")
    x = mm.placeholder("x", "a:4;b:5")
    refused(ShapeError, lambda: mm.rename(x, {"a": "b"}), "'b'", "2 times")


def test_sizes_that_disagree(graph):
    x, y = mm.placeholder("x", "a:4;b:5"), mm.placeholder("y", "b:6")
    e = refused(ShapeError, lambda: x + y, "'b'", "5", "6", "[a=4, b=5]", "mm.rename_dimension()")
    assert f"{HERE}:{line() - 1}" in str(e)
    refused(ShapeError, lambda: mm.einsum([x, y], []), "einsum", "'b'", "5", "6")


def test_unknown_output_dimension_is_suggested(graph):
    x, w = mm.placeholder("x", "batch:8;d_ff:32"), mm.placeholder("w", "d_ff:32;d_model:16")
    e = refused(
        ShapeError,
        lambda: mm.einsum([x, w], "batch:8;d_modell:16"),
        "'d_modell'",
        "(16)",
        "[batch=8, d_ff=32]",
        "Did you mean 'd_model'?",
    )
    assert f"{HERE}:{line() - 6}" in str(e)
    refused(ShapeError, lambda: mm.reduce_sum(x, reduced_dim="bach"), "'bach'", "Did you mean 'batch'?")
    refused(ShapeError, lambda: mm.reduce_sum(x, output_shape="d_f:32"), "d_f=32", "'d_ff'")
    refused(ShapeError, lambda: mm.rename(x, {"d_f": "y"}), "'d_f'", "'d_ff'")


def test_data_types_that_disagree(graph):
    x, i = mm.placeholder("x", "a:4"), mm.placeholder("i", "a:4", "int32")
    refused(ShapeError, lambda: x + i, "float32 and int32", "mm.cast")
    refused(ShapeError, lambda: mm.einsum([x, i], []), "float32 and int32", "mm.cast")
    refused(ShapeError, lambda: i + 0.5, "0.5", "int32", "mm.cast")
    refused(ShapeError, lambda: mm.exp(i), "int32", "mm.cast")
    refused(ShapeError, lambda: mm.reduce_mean(i), "int32", "mm.cast")
    refused(ShapeError, lambda: mm.reduce_any(x), "float32", "bool")
    refused(ShapeError, lambda: mm.where(x, x, x), "not bool")
    refused(ShapeError, lambda: mm.gather(x, x, "a"), "integer")
    refused(ShapeError, lambda: mm.placeholder("z", "a:4", "float16"), "'float16'", "bfloat16")


def test_structural_mistakes(graph):
    x = mm.placeholder("x", "a:4;b:6")
    refused(ShapeError, lambda: mm.reshape(x, "c:25"), "24", "25")
    refused(ShapeError, lambda: mm.transpose(x, "a:4;c:6"), "[a=4, c=6]", "[a=4, b=6]")
    refused(ShapeError, lambda: mm.slice(x, 3, 4, "b"), "[3:7:1]", "'b'", "6")
    refused(ShapeError, lambda: mm.split(x, "b", 4), "'b'", "6", "4")
    refused(ShapeError, lambda: mm.split(x, "b", [1, 2]), "3", "'b'", "6")
    refused(ShapeError, lambda: mm.pad(x, [-1, 0], "b"), "-1", "mm.slice()")
    refused(ShapeError, lambda: mm.concat([x, mm.placeholder("y", "a:5;b:6")], "b"), "[a=5, b=6]", "'b'")
    refused(ShapeError, lambda: mm.top_k(x, "b", mm.Dimension("k", 7)), "k=7", "6", "'b'")
    refused(ShapeError, lambda: mm.replace_dimensions(x, ["b", "a"], mm.Dimension("m", 24)), "adjacent")


def test_arrays_do_not_mix_with_tensors(graph):
    x = mm.placeholder("x", "a:4")
    refused(ShapeError, lambda: x + np.zeros(4), "ndarray", "mm.placeholder")
    refused(ShapeError, lambda: np.ones(4) * x, "ndarray")
    assert (np.float64(2.0) * x).shape == x.shape
    with pytest.raises(TypeError, match=r"mm\.where"):
        bool(x > 0)


def test_names_taken_twice(graph):
    mm.placeholder("x", "a:4")
    first = line() - 1
    e = refused(ShapeError, lambda: mm.placeholder("x", "a:4"), "'x'", "exists")
    assert f"{HERE}:{first}" in str(e)
    mm.get_variable("w", "a:4")
    made = f"{HERE}:{line() - 1}"
    other = lambda: mm.get_variable("w", "a:5")  # noqa: E731
    refused(VariableError, other, "'w'", "[a=4]", "[a=5]", "mm.scope", made)
    refused(VariableError, lambda: mm.get_variable("w", "a:4", "float64"), "float32", "float64")


def test_tensors_of_two_graphs(graph):
    x = mm.placeholder("x", "a:4")
    with mm.Graph():
        y = mm.placeholder("y", "a:4")
        refused(ShapeError, lambda: x + y, "another graph", "mm.Graph()")
    refused(ShapeError, lambda: _compile(graph, y), "another graph")


def test_no_graph_at_all():
    refused(ShapeError, lambda: mm.placeholder("x", "a:4"), "no graph", "with mm.Graph()")


def test_assignments(graph):
    w, x = mm.get_variable("w", "a:4"), mm.placeholder("x", "a:4;b:2")
    refused(ShapeError, lambda: mm.assign(x, x), "not the value of a variable", "mm.get_variable()")
    e = refused(ShapeError, lambda: mm.assign(w, x), "'w'", "[a=4]", "[a=4, b=2]")
    assert f"{HERE}:{line() - 1}" in str(e)


def test_a_variable_updated_twice_in_a_step(graph):
    w = mm.get_variable("w", "a:4")
    updates = [mm.assign(w, w + 1.0), mm.assign(w, w * 2.0)]
    made = f"{HERE}:{line() - 1}"
    refused(VariableError, lambda: _compile(graph, w, updates=updates), "'w'", "twice", made)


def test_gradient_seed_of_another_shape(graph):
    x = mm.placeholder("x", "a:4")
    refused(ShapeError, lambda: mm.gradients(x * 2.0, [x], [mm.ones("a:5")]), "[a=5]", "[a=4]")


# -- layouts ---------------------------------------------------------------------------------------


def test_unknown_mesh_axis(graph):
    loss = _model()
    refused(
        LayoutError,
        lambda: _compile(graph, loss, "batch:row"),
        "'batch'",
        "'row'",
        "{rows: 2, cols: 2}",
        "Did you mean 'rows'?",
    )


def test_unknown_dimension(graph):
    loss = _model()
    refused(
        LayoutError,
        lambda: _compile(graph, loss, "bacth:rows"),
        "'bacth'",
        "no tensor",
        "Did you mean 'batch'?",
        "'bacth?'",
    )
    _compile(graph, loss, "bacth?:rows")


def test_two_dimensions_on_one_axis(graph):
    x = mm.placeholder("x", "batch:4;io:6")
    made = line() - 1
    loss = mm.reduce_sum(x)
    e = refused(
        LayoutError,
        lambda: _compile(graph, loss, "batch:cols;io:rows+cols"),
        "[batch=4, io=6]",
        "'cols'",
        "size 2",
        "'batch'",
        "'io'",
        "mm.rename",
    )
    assert f"{HERE}:{made}" in str(e)


def test_malformed_layouts(graph):
    loss = _model()
    refused(LayoutError, lambda: _compile(graph, loss, "batch"), "'batch'", "no colon")
    refused(LayoutError, lambda: _compile(graph, loss, "batch:rows;batch:cols"), "'batch'", "2 times")
    refused(LayoutError, lambda: _compile(graph, loss, "batch:rows+rows"), "'rows'", "twice")


def test_storage_and_constraints(graph):
    x = mm.placeholder("x", "a:4;b:6")
    refused(LayoutError, lambda: mm.constrain(x, "c:rows"), "'c'", "[a=4, b=6]")
    y = mm.constrain(x, "a:row") * 1.0
    refused(LayoutError, lambda: _compile(graph, y), "'row'", "Did you mean 'rows'?")
    w = mm.get_variable("w", "a:4;b:6", storage="a:rows")
    made = f"{HERE}:{line() - 1}"
    refused(LayoutError, lambda: _compile(graph, w, "b:rows"), "'rows'", "'a'", "'b'", made)
    refused(LayoutError, lambda: _compile(graph, w, storage="z:rows"), "'z'", "no tensor")


def test_bad_mesh_shapes():
    refused(MeshError, lambda: mm.SimulatedMesh("rows:2;rows:2"), "'rows'", "2 times")
    refused(MeshError, lambda: mm.SimulatedMesh("rows"), "'rows'", "no colon")


# -- running a step --------------------------------------------------------------------------------


@pytest.fixture
def step(graph):
    x = mm.placeholder("x", "batch:4;io:6")
    i = mm.placeholder("i", "batch:4", "int32")
    w = mm.get_variable("w", "io:6")
    y = mm.reduce_sum(mm.einsum([x, w], "batch:4") * mm.cast(i, "float32"))
    return mm.compile(graph, SilentMesh("rows:2;cols:2"), "batch:rows", fetches=[y])


X, INDEX = np.zeros((4, 6), np.float32), np.zeros(4, np.int32)


def test_missing_feed(step):
    refused(FeedError, lambda: step(x=X), "'i'", "int32[batch=4]", "not fed", "step(")


def test_unknown_feed(step):
    refused(FeedError, lambda: step(x=X, i=INDEX, y=X), "'y'", "no placeholder")
    refused(FeedError, lambda: step({"xx": X, "i": INDEX}), "'xx'", "Did you mean 'x'?")


def test_misshapen_feed(step):
    refused(FeedError, lambda: step(x=X.T, i=INDEX), "'x'", "(6, 4)", "(4, 6)")
    refused(FeedError, lambda: step(x=X[0], i=INDEX), "'x'", "(6,)", "(4, 6)")


def test_feed_of_another_type(step):
    refused(FeedError, lambda: step(x=X, i=INDEX.astype(np.float32)), "'i'", "float32", "int32", "astype")
    refused(FeedError, lambda: step(x=X.astype(np.int64), i=INDEX), "'x'", "int64", "float32")


def test_unknown_variable(step):
    refused(VariableError, lambda: step.variables["ww"], "'ww'", "Did you mean 'w'?")
    refused(VariableError, lambda: step.assign({"v": INDEX}), "'v'")
    refused(VariableError, lambda: step.assign({"w": np.zeros(7)}), "'w'", "[io=6]", "(7,)")


def test_initializer_of_another_shape(graph):
    refused(VariableError, lambda: mm.get_variable("w", "a:4", initializer=np.zeros(5)), "'w'", "(5,)", "[a=4]")


def test_what_is_not_a_tensor_cannot_be_fetched(graph):
    x = mm.placeholder("x", "a:4")
    refused(ShapeError, lambda: mm.compile(graph, SilentMesh("rows:2"), fetches=["x"]), "'x'", "not a tensor")
    assert x.shape.names == ("a",)


def test_two_programs_share_variables_only_in_one_layout(graph):
    w = mm.get_variable("w", "a:4")
    mesh = SilentMesh("rows:2;cols:2")
    first = mm.compile(graph, mesh, "a:rows", fetches=[w])
    mm.compile(graph, mesh, "a:rows", fetches=[w * 2.0], variables=first.variables)
    shared = first.variables
    refused(
        VariableError,
        lambda: mm.compile(graph, mesh, "a:cols", fetches=[w], variables=shared),
        "'w'",
        "a=4/rows",
        "a=4/cols",
    )


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
