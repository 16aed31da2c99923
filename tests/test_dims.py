"""Names and sizes: shapes, block ranges, mesh shapes, layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmpi.dims import Dimension, Layout, MeshShape, Shape, block_range
from meshmpi.errors import LayoutError, MeshError, ShapeError

MESH = MeshShape("rows:2;cols:3")


@pytest.mark.parametrize(
    "given",
    [
        "a:4;b:8",
        "a:4,b:8",
        " a:4 ; b:8 ; ",
        [("a", 4), ("b", 8)],
        [Dimension("a", 4), ("b", np.int64(8))],
        Shape("a:4;b:8"),
    ],
)
def test_shape_accepts_strings_pairs_and_dimensions(given):
    shape = Shape(given)
    assert shape == (Dimension("a", 4), Dimension("b", 8))
    assert (shape.names, shape.sizes, shape.size, shape.ndims) == (("a", "b"), (4, 8), 32, 2)
    assert str(shape) == "[a=4, b=8]"
    assert all(type(d.size) is int for d in shape)


def test_empty_shape_has_one_element():
    assert Shape() == Shape("") == Shape([]) and Shape().size == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a:4;a:4", ["'a'", "2 times"]),
        ([("a", 4), ("a", 5)], ["'a'", "2 times"]),
        ("a", ["'a'", "no colon"]),
        ("a:x", ["'a'", "'x'"]),
        ("a:0", ["'a'", "0"]),
        ("a:-1", ["'a'", "-1"]),
        ([("a", 2.5)], ["'a'", "2.5"]),
        ([("a", True)], ["'a'", "True"]),
        ([5], ["5", "dimension"]),
        ([("a b", 2)], ["'a b'", "name"]),
        ([("", 2)], ["''", "name"]),
    ],
)
def test_bad_shapes_are_refused(given, words):
    with pytest.raises(ShapeError) as e:
        Shape(given)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_shape_operations():
    shape = Shape("a:4;b:8;c:2")
    assert shape.position("b") == 1 and shape.find("z") == -1
    assert shape.without(["b"]) == Shape("a:4;c:2")
    assert shape.renamed("b", "d") == Shape("a:4;d:8;c:2")
    assert shape + Shape("d:1") == Shape("a:4;b:8;c:2;d:1")
    assert Shape("a:4") + [Dimension("b", 2)] == Shape("a:4;b:2")
    with pytest.raises(ShapeError, match="2 times"):
        shape.renamed("b", "a")
    with pytest.raises(ShapeError, match="Did you mean 'length'"):
        Shape("length:4").position("lenght")


@given(n=st.integers(0, 50), blocks=st.integers(1, 12))
def test_block_ranges_tile_the_dimension(n, blocks):
    ranges = [block_range(n, blocks, i) for i in range(blocks)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(n))
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    assert sizes.count(max(sizes)) == n % blocks or n % blocks == 0


def test_ranks_are_row_major():
    assert MESH.size == 6 and MESH.names == ("rows", "cols") and str(MESH) == "{rows: 2, cols: 3}"
    assert MESH.coordinates(4) == {"rows": 1, "cols": 1}
    assert [MESH.rank(MESH.coordinates(r)) for r in range(6)] == list(range(6))


def test_groups_differ_only_in_their_axes():
    assert MESH.group(4, ["cols"]) == (3, 4, 5)
    assert MESH.groups(["rows"]) == ((0, 3), (1, 4), (2, 5))
    assert MESH.groups(["rows", "cols"]) == MESH.groups(["cols", "rows"]) == (tuple(range(6)),)
    assert MESH.groups([]) == tuple((r,) for r in range(6))


def test_block_index_depends_on_the_order_of_axes():
    here = {"rows": 1, "cols": 2}
    assert MESH.block_index(("rows", "cols"), here) == 5
    assert MESH.block_index(("cols", "rows"), here) == 5
    here = {"rows": 1, "cols": 0}
    assert MESH.block_index(("rows", "cols"), here) == 3
    assert MESH.block_index(("cols", "rows"), here) == 1
    assert MESH.in_mesh_order(["cols", "rows", "cols"]) == ("rows", "cols")


@pytest.mark.parametrize("given", ["rows:2;cols:3", {"rows": 2, "cols": 3}, [("rows", 2), ("cols", 3)], MESH])
def test_mesh_shape_accepts(given):
    assert MeshShape(given) == MESH and hash(MeshShape(given)) == hash(MESH)
    assert eval(repr(MESH)) == MESH


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rows:2;rows:3", ["mesh axis 'rows'", "2 times"]),
        ("rows:0", ["mesh axis 'rows'", "0"]),
        ("rows", ["'rows'", "no colon"]),
        ([("rows", "two")], ["'rows'", "'two'"]),
    ],
)
def test_bad_mesh_shapes_are_refused(given, words):
    with pytest.raises(MeshError) as e:
        MeshShape(given)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_unknown_axis_is_named_with_a_suggestion():
    with pytest.raises(MeshError, match=r"mesh \{rows: 2, cols: 3\} has no axis 'row'. Did you mean 'rows'\?"):
        MESH.axis_size("row")


@pytest.mark.parametrize(
    "given",
    [
        "batch:rows;heads:cols+rows",
        "batch:rows, heads:cols+rows",
        {"batch": "rows", "heads": ("cols", "rows")},
        [("batch", ["rows"]), ("heads", "cols+rows")],
    ],
)
def test_layout_accepts(given):
    layout = Layout(given)
    assert layout.axes("batch") == ("rows",) and layout.axes("heads") == ("cols", "rows")
    assert layout.axes("other") == () and "batch" in layout and "other" not in layout
    assert str(layout) == "batch:rows;heads:cols+rows" and Layout(str(layout)) == layout


def test_layout_of_nothing_and_whole_and_optional_rules():
    assert list(Layout("")) == list(Layout(None)) == list(Layout({})) == []
    assert Layout("length:").axes("length") == () and "length" in Layout("length:")
    optional = Layout("d_ff?:cols")
    assert optional.axes("d_ff") == ("cols",) and str(optional) == "d_ff?:cols"
    optional.check(MESH, ["batch"])
    assert Layout(optional) == optional


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("batch:rows;batch:cols", ["'batch'", "2 times"]),
        ("batch:rows+rows", ["'batch'", "'rows'", "twice"]),
        ("batch", ["'batch'", "no colon"]),
        ("batch:row", ["'batch'", "'row'", "{rows: 2, cols: 3}", "Did you mean 'rows'?"]),
        ("bach:rows", ["'bach'", "no tensor", "Did you mean 'batch'?", "'bach?'"]),
    ],
)
def test_bad_layouts_are_refused(rules, words):
    with pytest.raises(LayoutError) as e:
        Layout(rules).check(MESH, ["batch", "heads"])
    assert all(w in str(e.value) for w in words), str(e.value)
