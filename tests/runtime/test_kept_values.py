"""One rule of what a type can keep: for feeds, assignments, first values and checkpoints."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.checkpoint.tensor_header import make_header
from meshmpi.errors import CheckpointError, FeedError, VariableError
from meshmpi.transformer.pretrained.files import Checkpoint

SIZES = [("a", 3)]
REFUSED = {
    "float_into_int32": ("int32", np.array([1.7, 2.0, 3.0]), "data type float64"),
    "nan_into_int64": ("int64", np.array([np.nan, 2.0, 3.0]), "data type float64"),
    "whole_float_into_uint8": ("uint8", np.array([1.0, 2.0, 3.0], "f4"), "data type float32"),
    "beyond_int32": ("int32", np.array([0, 1, 2**31]), "values 0 to 2147483648"),
    "negative_into_uint8": ("uint8", np.array([-1, 1, 2]), "values -1 to 2"),
    "beyond_uint8": ("uint8", np.array([256, 1, 2], "i4"), "values 1 to 256"),
    "beyond_int64": ("int64", np.array([2**63, 1, 2], "u8"), "values 1 to 9223372036854775808"),
    "bool_into_int32": ("int32", np.array([True, False, True]), "data type bool"),
    "int_into_bool": ("bool", np.array([0, 1, 2]), "data type int64"),
    "float_into_bool": ("bool", np.array([0.0, 1.0, 0.5]), "data type float64"),
    "int_into_float": ("float32", np.array([0, 1, 2]), "data type int64"),
    "complex_into_float": ("float32", np.array([1j, 2.0, 3.0]), "data type complex128"),
    "text_into_int": ("int32", np.array(["1", "2", "3"]), "data type <U1"),
    "objects": ("float32", np.array([None, 1.0, 2.0]), "data type object"),
}
KEPT = {
    "narrow_int": ("int32", np.array([2**31 - 1, 0, -(2**31)])),
    "bytes": ("uint8", np.array([0, 255, 3], "i8")),
    "rounded": ("float32", np.array([0.1, np.nan, np.inf])),
    "half": ("bfloat16", np.array([0.5, 1.0, 2.0], "f2")),
    "bools": ("bool", np.array([True, False, True])),
}


def compiled(dtype, initializer=None):
    with mm.Graph() as graph:
        x = mm.placeholder("x", SIZES, dtype)
        v = mm.get_variable("v", SIZES, dtype, initializer, trainable=False)
        y = mm.where(mm.equal(x, x), x, v) if dtype != "bool" else mm.logical_and(x, v)
    return mm.compile(graph, mm.SimulatedMesh("r:1"), fetches=[y, v])


ROUTES = {
    "feed": (FeedError, lambda dtype, a: compiled(dtype)(x=a)),
    "assigned": (VariableError, lambda dtype, a: compiled(dtype).assign({"v": a})),
    "assigned_block": (VariableError, lambda dtype, a: compiled(dtype).assign({"v": mm.local(a)})),
    "first_value": (VariableError, compiled),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_type_cannot_keep_is_refused(name, route):
    dtype, array, why = REFUSED[name]
    error, take = ROUTES[route]
    with pytest.raises(error, match=why) as caught:
        take(dtype, array)
    assert dtype in caught.value.problem and "astype" in caught.value.remedy


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "objects"])
def test_a_first_value_is_refused_where_it_is_given(name):
    """An array or a list, before anything is compiled, with the user's line."""
    dtype, array, why = REFUSED[name]
    for first in (array, array.tolist()):
        with mm.Graph() as graph, pytest.raises(VariableError) as caught:
            mm.get_variable("v", SIZES, dtype, first)
        assert not graph.variables
        assert why in caught.value.problem or first is not array
        assert f"variable 'v' made at {__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "why"), [(np.ones(4, "f4"), "has shape (4,)"), ([[1.0], [1.0, 2.0]], "is not an array")]
)
def test_a_first_value_of_another_shape_is_refused_there_too(first, why):
    with mm.Graph(), pytest.raises(VariableError) as caught:
        mm.get_variable("v", SIZES, initializer=first)
    assert why in caught.value.problem and "(3,)" in caught.value.remedy


@pytest.mark.parametrize("name", KEPT)
def test_what_it_can_is_kept(name):
    dtype, array = KEPT[name]
    step = compiled(dtype, array)
    wanted = array.astype(step.variables["v"].dtype)
    np.testing.assert_array_equal(step.variables["v"], wanted)
    step.assign({"v": array[::-1]})
    np.testing.assert_array_equal(step.variables["v"], wanted[::-1])
    step(x=array)


def test_a_refused_assignment_writes_nothing():
    step = compiled("int32", np.array([1, 2, 3]))
    with pytest.raises(VariableError, match="data type float64"):
        step.assign({"v": np.array([0.5, 1.0, 2.0])})
    assert step.variables["v"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "initializer", "why"),
    [
        ("int32", mm.constant_initializer(1.7), "the value 1.7"),
        ("int32", mm.constant_initializer(float("nan")), "the value nan"),
        ("uint8", mm.constant_initializer(-1), "the value -1"),
        ("bool", mm.constant_initializer(2), "the value 2"),
        ("int64", mm.random_normal_initializer(), "numbers that are normal"),
        ("int32", mm.random_uniform_initializer(0, 10), "numbers that are uniform"),
    ],
)
def test_initializers_follow_the_same_rule(dtype, initializer, why):
    with mm.Graph(), pytest.raises(VariableError, match=why) as caught:
        mm.get_variable("v", SIZES, dtype, initializer)
    assert __file__ in str(caught.value)
    compiled(dtype, mm.ones_initializer())


@pytest.mark.parametrize(
    ("kind", "array", "dtype"), [("I64", np.arange(3), "float32"), ("F32", np.ones(3, "f4"), "int32")]
)
def test_weights_from_elsewhere_too(tmp_path, kind, array, dtype):
    header, _ = make_header({"w": (kind, [3])})
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + array.tobytes())
    with Checkpoint(path) as found, pytest.raises(CheckpointError, match=f"{dtype} is needed"):
        found.read("w", dtype=dtype)
