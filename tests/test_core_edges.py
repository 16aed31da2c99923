"""Corners of graph, lowering, passes and runtime that the table of operations does not reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

import meshmpi as mm

MESH = "rows:2;cols:3"
A, B, C = mm.Dimension("a", 5), mm.Dimension("b", 6), mm.Dimension("c", 4)


def array(*sizes: int) -> np.ndarray:
    return np.random.default_rng(sum(sizes)).standard_normal(sizes).astype("float32")


def results(
    graph: mm.Graph,
    layout: str,
    fetches: Sequence[mm.Tensor],
    feeds: Mapping[str, object],
    updates: Sequence[mm.Update] = (),
    names: Sequence[str] = (),
    optimize: bool = True,
    storage: str | None = None,
    mesh: str = MESH,
) -> list[np.ndarray]:
    """Fetches and variables after two steps."""
    step = mm.compile(
        graph,
        mm.SimulatedMesh(mesh),
        layout,
        fetches=fetches,
        updates=updates,
        optimize=optimize,
        storage=storage,
        kernels="numpy",
    )
    step(feeds)
    got = step(feeds)
    values = [np.asarray(v.numpy() if isinstance(v, mm.ShardedArray) else v) for v in got.values()]
    return values + [step.variables[n] for n in names]


@pytest.mark.parametrize("optimize", [False, True])
def test_a_sum_is_pending_in_all_inputs_of_a_map_or_in_none(optimize: bool) -> None:
    """The minimum cut once left one operand of an addition pending and the other finished."""
    i, j, k, n = (mm.Dimension(d, s) for d, s in (("i", 4), ("j", 6), ("k", 5), ("l", 3)))
    with mm.Graph() as graph:
        a, b, c = (mm.placeholder("a", [i, j]), mm.placeholder("b", [j, k]), mm.placeholder("c", [k, i, n]))
        ys = [mm.einsum([a, b, c], [n]), mm.einsum([a, b, c], [i, k]), mm.einsum([a, a], [i])]
        ys += mm.gradients(mm.add_n([mm.reduce_sum(y) for y in ys]), [a, b, c])
    feeds = {"a": array(4, 6), "b": array(6, 5), "c": array(5, 4, 3)}
    want = results(graph, "", ys, feeds)
    for layout in ("j:rows;l:cols", "i:rows;j:cols", "j:rows;k:cols"):
        for x, y in zip(want, results(graph, layout, ys, feeds, optimize=optimize), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["", "a:rows", "a:cols+rows"])
def test_fetched_variable_has_the_value_before_the_update(layout: str) -> None:
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", [A]), mm.get_variable("w", [A], initializer=array(5))
        update = mm.assign(w, w + x)
    fed = array(5) * 3
    got_x, got_w, after = results(graph, layout, [x, w], {"x": fed}, [update], ["w"])
    np.testing.assert_array_equal(got_x, fed)
    np.testing.assert_allclose(got_w, array(5) + fed, rtol=1e-6)
    np.testing.assert_allclose(after, got_w + fed, rtol=1e-6)


@pytest.mark.parametrize("layout", ["a:rows", "a:rows;b:cols", "b:rows+cols"])
def test_variables_rotate_under_new_names(layout: str) -> None:
    other = mm.Dimension("b", 5)
    with mm.Graph() as graph:
        p, q = (mm.get_variable(n, [A], initializer=array(5) + k) for k, n in enumerate("pq"))
        r = mm.get_variable("r", [other], initializer=array(5) + 2)
        updates = [mm.assign(p, q), mm.assign(q, mm.rename(r, {"b": "a"})), mm.assign(r, mm.rename(p, {"a": "b"}))]
    got = results(graph, layout, [], {}, updates, ["p", "q", "r"])
    for value, k in zip(got, (2, 0, 1), strict=True):
        np.testing.assert_array_equal(value, array(5) + k)


def test_one_fetch_twice_and_by_name() -> None:
    with mm.Graph() as graph:
        y = mm.placeholder("x", [A]) * 2.0
    assert len(results(graph, "a:rows", [y, y], {"x": array(5)})) == 1
    step = mm.compile(graph, mm.SimulatedMesh(MESH), "a:rows", fetches={"p": y, "q": y})
    got = step(x=array(5))
    assert got["p"] is got["q"] is got[y]
    with pytest.raises(KeyError, match="was not fetched; fetched: p, q"):
        got["r"]


def test_gradient_of_a_tensor_that_is_both_x_and_y() -> None:
    with mm.Graph() as graph:
        x = mm.placeholder("x", [A])
        y = mm.square(x)
        z = mm.reduce_sum(y)
        gs = mm.gradients([y, z], [y, x, z])
        assert mm.gradients(y, [mm.placeholder("unrelated", [])]) == [None]
    fed = array(5)
    dy, dx, dz = results(graph, "a:rows", gs, {"x": fed})
    np.testing.assert_allclose(dy, np.full(5, 2))
    np.testing.assert_allclose(dx, 4 * fed, rtol=1e-6)
    assert dz == 1


@pytest.mark.parametrize("layout", ["a:rows", "b:cols", "a:rows;b:cols", "b:cols+rows", "d:rows+cols"])
@pytest.mark.parametrize("storage", [None, "b?:rows", "d?:cols", "b?:cols+rows"])
def test_uneven_and_empty_blocks_with_storage_rules(layout: str, storage: str | None) -> None:
    one, two = mm.Dimension("a", 1), mm.Dimension("d", 2)
    with mm.Graph() as graph:
        x, w = (mm.placeholder("x", [one, B]), mm.get_variable("w", [B, two], initializer=array(6, 2)))
        h = mm.softmax(mm.einsum([x, w], [one, two]), two)
        loss = mm.reduce_mean(mm.square(h - 0.25)) + mm.reduce_max(w) * 0.1
        updates = mm.optimize.Adam(1e-2).minimize(loss)
    feeds = {"x": array(1, 6)}
    want = results(graph, "", [loss, h], feeds, updates, ["w"], optimize=False)
    got = results(graph, layout, [loss, h], feeds, updates, ["w"], storage=storage)
    for x, y in zip(want, got, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("layout", ["a:rows", "a:cols+rows", "b:rows;a:cols"])
def test_reductions_of_narrow_types_over_split_dims(dtype: str, layout: str) -> None:
    with mm.Graph() as graph:
        x = mm.placeholder("x", [A, B], dtype)
        ys = (
            [mm.reduce_any(x, reduced_dim="a"), mm.reduce_all(x)]
            if dtype == "bool"
            else [mm.reduce_sum(x, reduced_dim="a"), mm.reduce_max(x), mm.reduce_min(x, reduced_dim="b")]
        )
    fed = np.arange(30).reshape(5, 6) % 8
    feeds = {"x": fed > 3 if dtype == "bool" else fed.astype("float32" if dtype == "bfloat16" else dtype)}
    want = results(graph, "", ys, feeds, optimize=False)
    for x, y in zip(want, results(graph, layout, ys, feeds), strict=True):
        np.testing.assert_array_equal(x.astype("float64"), y.astype("float64"))


def _graph_errors() -> list[tuple[str, type[mm.MeshmpiError], Callable[[mm.Tensor], object], str]]:
    return [
        ("concat", mm.ShapeError, lambda x: mm.concat([], "a"), "there are no tensors"),
        ("add_n", mm.ShapeError, lambda x: mm.add_n([]), "there are no tensors"),
        ("ys", mm.ShapeError, lambda x: mm.gradients([], [x]), "there are no ys"),
        ("grad_ys", mm.ShapeError, lambda x: mm.gradients(x, [x], []), "1 ys and 0 grad_ys"),
        ("pad", mm.ShapeError, lambda x: mm.pad(x, [1], "a"), "are 1 numbers"),
        ("logical", mm.ShapeError, lambda x: mm.logical_not(x), "data type float32"),
        ("bool", mm.ShapeError, lambda x: (x > 0) * 2, "the input is bool"),
        ("int", mm.ShapeError, lambda x: mm.constant(1.5, (), "int32"), "1.5 does not fit"),
        ("uint8", mm.ShapeError, lambda x: mm.cast(x, "uint8") + 256, "256 does not fit"),
        ("size", mm.ShapeError, lambda x: mm.einsum([x, x], [("a", 6)]), "has size 6, and 5 in"),
        ("fetched", mm.ShapeError, lambda x: mm.plan(x.graph, MESH, fetches={"x": "x"}), "not a tensor"),
        ("update", mm.ShapeError, lambda x: mm.plan(x.graph, MESH, updates=[x]), "update"),
        ("mesh", mm.MeshError, lambda x: mm.compile(x.graph, MESH, fetches=[x]), "not a mesh"),
        ("axes", mm.MeshError, lambda x: mm.plan(x.graph, "rows:2;rows:3"), "its own name"),
    ]


@pytest.mark.parametrize(
    ("kind", "build", "text"), [c[1:] for c in _graph_errors()], ids=[c[0] for c in _graph_errors()]
)
def test_errors_say_what_is_wrong(kind: type[mm.MeshmpiError], build: Callable[[mm.Tensor], object], text: str) -> None:
    with mm.Graph():
        x = mm.placeholder("x", [A])
        with pytest.raises(kind, match=text) as caught:
            build(x)
    assert caught.value.remedy


def test_lowering_and_passes_are_linear_in_layers() -> None:
    """Instructions a layer are constant, and so is what is sent."""

    def planned(layers: int) -> tuple[int, int]:
        with mm.Graph() as graph:
            h = mm.placeholder("x", [A, B])
            for k in range(layers):
                h = h + mm.tanh(
                    mm.einsum([h, mm.get_variable(f"w{k}", [B, C])], [A, C]) @ mm.get_variable(f"v{k}", [C, B])
                )
            loss = mm.reduce_mean(mm.square(h))
            updates = mm.optimize.SGD(0.1).minimize(loss)
        p = mm.plan(graph, MESH, "a:rows;c:cols", fetches=[loss], updates=updates)
        return len(p.program.instructions), p.cost.bytes_sent

    (n2, b2), (n4, b4), (n6, b6) = (planned(k) for k in (2, 4, 6))
    assert n6 - n4 == n4 - n2
    assert b6 - b4 == b4 - b2


def test_gradients_by_something_that_is_no_tensor():
    with mm.Graph():
        w = mm.get_variable("w", "a:3")
        with pytest.raises(mm.ShapeError, match="is not a Variable or a tensor.*get_variable"):
            mm.gradients(mm.reduce_sum(w), ["w"])
