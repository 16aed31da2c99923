"""Arguments whose meaning is plain though another kind is written: taken, and meant so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshmpi as mm


@pytest.fixture
def graph():
    with mm.Graph() as graph:
        yield graph


def in_a_graph(test: Callable[[mm.Graph], None]) -> None:
    """Runs one of these tests without pytest, under a seeded bug."""
    with mm.Graph() as graph:
        test(graph)


def test_a_variable_read_in_two_types_has_one_gradient():
    with mm.Graph() as graph:
        wide = mm.get_variable("w", "a:3", initializer=np.ones(3))
        with mm.scope("", reuse=True):
            narrow = mm.get_variable("w", "a:3", mm.VariableDType("float32", "bfloat16"))
        loss = mm.reduce_sum(wide * 2.0) + mm.reduce_sum(mm.cast(narrow, "float32") * 3.0)
        (by_variable,) = mm.gradients([loss], graph.trainable_variables)
        (by_tensor,) = mm.gradients(loss, wide)
    step = mm.compile(graph, mm.SimulatedMesh("r:1"), fetches=[by_variable, by_tensor])
    out = step()
    assert (np.asarray(out[by_variable]) == 5.0).all() and (np.asarray(out[by_tensor]) == 2.0).all()


def test_variables_stand_for_their_values(graph):
    w = mm.get_variable("w", "a:3")
    variable = graph.variables["w"]
    assert variable.value is w
    assert (mm.tanh(variable)).shape == w.shape and mm.concat([variable, w], "a").shape.size == 6
    step = mm.compile(graph, mm.SimulatedMesh("r:1"), fetches=variable)
    assert step()[w].shape == (3,)


def test_one_tensor_for_a_list_of_one(graph):
    x = mm.placeholder("x", "a:3;b:2")
    assert mm.add_n(x) is x
    (y,) = mm.repeat(mm.tanh, 2, x, shared_variables=True)
    assert y.shape == x.shape
    assert mm.reduce_sum(x, reduced_dim=["a"]).shape == mm.reduce_sum(x, reduced_dim="a").shape
    assert mm.softmax(x, ["a"]).shape == x.shape
    assert mm.recompute_grad(mm.tanh, x).shape == x.shape


def test_names_mean_the_dimensions_of_the_tensors_given(graph):
    x, w = mm.placeholder("x", "a:3;b:2"), mm.placeholder("w", "b:2;c:5")
    mm.placeholder("other", "a:7")
    assert mm.einsum([x, w], ["a", "c"]).shape == mm.Shape("a:3;c:5")
    assert mm.einsum([x, w], "c a").shape == mm.Shape("c:5;a:3")
    assert mm.reduce_sum(x, output_shape="a").shape == mm.Shape("a:3")
    assert mm.range("c").shape == mm.Shape("c:5")
    assert mm.dense(x, "d:4").shape == mm.Shape("a:3;d:4")
    with pytest.raises(mm.ArgumentError, match=r"mm\.Dimension\('a', size\)"):
        mm.range("a")  # 3 or 7


def test_data_types_of_numpy_and_python(graph):
    pairs = [
        (np.int32, "int32"),
        (np.dtype("int64"), "int64"),
        (float, "float32"),
        (int, "int32"),
        (bool, "bool"),
        (np.float64, "float64"),
        ("bfloat16", "bfloat16"),
    ]
    import ml_dtypes

    for k, (given, name) in enumerate([*pairs, (ml_dtypes.bfloat16, "bfloat16")]):
        assert mm.placeholder(f"x{k}", "a:3", given).dtype == name
        assert mm.zeros("a:3", dtype=given).dtype == name
        if name != "bool":
            types = mm.VariableDType(given, given)
            assert mm.get_variable(f"v{k}", "a:3", types).dtype == name
    x = mm.placeholder("x", "a:3")
    assert mm.dense(mm.cast(x, np.float64), "d:2", variable_dtype=np.float64).dtype == "float64"


def test_lists_that_a_function_fills_are_the_callers_own(graph):
    def fill(xs: list[mm.Tensor], names: dict[str, mm.Tensor]) -> None:
        xs.append(xs[0])
        names["y"] = xs[0]

    fill.__annotations__.update(xs="list[Tensor]", names="dict[str, Tensor]")
    from meshmpi.graph.arguments import checked

    x = mm.placeholder("x", "a:3")
    xs, names = [x], {"x": x}
    checked(fill)(xs, names)
    assert xs == [x, x] and list(names) == ["x", "y"]


def test_meshes_and_their_shapes_stand_for_their_texts(graph):
    x = mm.placeholder("x", "a:4")
    mesh = mm.SimulatedMesh(mm.MeshShape("rows:2"))
    assert mm.SimulatedMesh(mesh).shape == mesh.shape == mm.SimulatedMesh("{rows: 2}").shape
    for given in ("rows:2", mesh, mesh.shape, str(mesh.shape), {"rows": 2}, [("rows", 2)]):
        assert mm.plan(graph, given, "a:rows", fetches=x).program.mesh == mesh.shape
    best = mm.search_layouts(graph, 2, fetches=[x], seconds=0.2).best
    assert mm.SimulatedMesh(best.mesh).size == 2
    assert mm.Shape(str(x.shape)) == x.shape


def test_functions_of_numpy_that_mean_the_same(graph):
    x = mm.placeholder("x", "a:4")
    assert np.exp(x).operation.base_name == "exp" and np.maximum(x, 0).dtype == "float32"
    assert (np.float32(2) * x).shape == x.shape and np.isfinite(x).dtype == "bool"
    for wrong in (lambda: np.sum(x), lambda: np.ones(4) * x, lambda: np.arctan(x), lambda: np.exp(x, out=np.ones(4))):
        with pytest.raises(mm.ArgumentError):
            wrong()


@pytest.mark.parametrize("layout", ["", "a:rows"])
def test_results_take_part_in_arithmetic(graph, layout: str):
    x = mm.placeholder("x", "a:4")
    y = x * 2.0
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), layout, fetches=[y])
    out = step(np.arange(4.0))[y]
    assert (out + 1).tolist() == [1, 3, 5, 7] and (2 - out).tolist() == [2, 0, -2, -4]
    assert np.sum(out) == 12 and np.mean(out) == 3 and (out == out).all()
    assert np.exp(out).shape == (4,) and (out @ out) == 56


def test_variables_are_written_by_name(graph):
    w = mm.get_variable("w", "a:4")
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), "a:rows", fetches=[w])
    step.variables["w"] = np.arange(4.0)
    assert step()[w].numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(mm.VariableError, match="Did you mean 'w'"):
        step.variables["ww"] = np.arange(4)


def test_a_blank_in_a_layout_is_pointed_at():
    text = "d_ff:model heads:model"
    with pytest.raises(mm.LayoutError, match="character 11") as caught:
        mm.Layout(text)
    assert text[11 - 1] == " " and "'d_ff:model;heads:model'" in caught.value.remedy
    assert len(mm.Layout("d_ff:model;heads:model").rules) == 2
    assert mm.Layout("batch : rows , heads: cols").axes("heads") == ("cols",)


def test_functions_of_users_are_called_with_what_they_take(graph):
    x = mm.placeholder("x", "a:4")
    for wrong in (
        lambda: mm.repeat(lambda: x, 2, x, shared_variables=True),
        lambda: mm.dense(x, "d:2", activation=lambda a, b: a),
        lambda: mm.cwise(lambda a, b: a, [x]),
        lambda: mm.recompute_grad(lambda: x, [x]),
    ):
        with pytest.raises(mm.ArgumentError, match="is called with 1 argument"):
            wrong()
