"""compile(debug=True): an index outside its dimension raises; else it reads zeros or is dropped."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import RangeError
from meshmpi.kernels.native import available

KERNELS = ["numpy", pytest.param("native", marks=pytest.mark.skipif(not available(), reason="cc"))]
LAYOUTS = ["", "b:r", "v:r", "v:c;b:r", "v:r+c"]
GOOD = np.array([[0, 4, 2], [3, 1, 1], [0, 0, 4], [2, 2, 2]], np.int32)


def _lookup(may_miss: bool = False):
    with mm.Graph() as graph:
        table = mm.placeholder("table", "v:5;d:2")
        ids = mm.placeholder("ids", "b:4;k:3", "int32")
        y = mm.gather(table, ids, "v", may_miss)
        z = mm.scatter_add(y, ids, mm.Dimension("v", 5), may_miss=may_miss)
    return graph, y, z


def _run(graph: mm.Graph, fetches: list, layout: str, kernels: str, ids: np.ndarray, **options):
    step = mm.compile(graph, mm.SimulatedMesh("r:2;c:2"), layout, fetches=fetches, kernels=kernels, **options)
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    feeds = {"table": table, "ids": ids}
    got = step({n: a for n, a in feeds.items() if n in step.program.feeds})
    return [got[t].numpy() for t in fetches]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_indices_give_the_same(layout: str, kernels: str):
    graph, y, z = _lookup()
    plain = _run(graph, [y, z], layout, kernels, GOOD)
    checked = _run(graph, [y, z], layout, kernels, GOOD, debug=True)
    assert all(np.array_equal(a, b) for a, b in zip(plain, checked, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrong", [5, -1, 1 << 30])
@pytest.mark.parametrize("optimize", [True, False])
def test_a_wrong_index_is_named(layout: str, kernels: str, wrong: int, optimize: bool):
    ids = GOOD.copy()
    ids[2, 1] = wrong
    graph, y, _ = _lookup()
    with pytest.raises(RangeError) as caught:
        _run(graph, [y], layout, kernels, ids, debug=True, optimize=optimize)
    text = str(caught.value)
    assert f"gather: index {wrong} at [b=2, k=1] of 'ids' is outside dimension 'v' (5)" in text
    assert "Give 0 to 4" in text and "test_debug.py" in text
    (plain,) = _run(graph, [y], layout, kernels, ids, optimize=optimize)
    assert not plain[2, 1].any() and plain[3].any()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["", "v:r", "rows:c", "v:r;rows:c", "rows:r+c"])
def test_scatter_add_is_checked(layout: str, kernels: str):
    with mm.Graph() as graph:
        x, ids = mm.placeholder("table", "v:5;d:2"), mm.placeholder("ids", "v:5", "int32")
        z = mm.scatter_add(x, ids, mm.Dimension("rows", 3))
    ids_outside = np.array([0, 1, 2, 3, 0], np.int32)
    message = r"scatter_add: index 3 at \[v=3\] of 'ids' is outside dimension 'rows' \(3\)"
    with pytest.raises(RangeError, match=message):
        _run(graph, [z], layout, kernels, ids_outside, debug=True)
    (plain,) = _run(graph, [z], layout, kernels, ids_outside)
    np.testing.assert_array_equal(plain, [[8, 10], [2, 3], [4, 5]])


def test_batches_are_checked_and_named_by_global_position():
    with mm.Graph() as graph:
        x, ids = mm.placeholder("table", "v:5;d:2"), mm.placeholder("ids", "v:5;k:2", "int32")
        y = mm.gather(x, ids, "d")
    index = np.zeros((5, 2), np.int32)
    index[4, 1] = 2
    with pytest.raises(RangeError, match=r"index 2 at \[v=4, k=1\] of 'ids' is outside .* \(2\)"):
        _run(graph, [y], "v:r", "numpy", index, debug=True)


def test_what_may_miss_is_not_checked():
    graph, y, z = _lookup(may_miss=True)
    ids = GOOD - 3
    plain, checked = (_run(graph, [y, z], "v:c;b:r", "numpy", ids, debug=debug) for debug in (False, True))
    assert all(np.array_equal(a, b) for a, b in zip(plain, checked, strict=True))
    with mm.Graph() as graph:
        x, ids = mm.placeholder("table", "v:5;d:2"), mm.placeholder("ids", "d:2", "int32")
        y = mm.dynamic_shift(x, ids, "v", wrap=False)
        (g,) = mm.gradients(mm.reduce_sum(y * y), [x])
    (got,) = _run(graph, [g], "v:c", "numpy", np.array([1, -7], np.int32), debug=True)
    assert not got[:, 1].any() and got[:4, 0].any()
