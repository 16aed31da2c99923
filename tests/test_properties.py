"""Properties of moving blocks over random meshes and layouts; the examples are the same in each run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshmpi as mm
from meshmpi.dims import Axes
from meshmpi.ir.program import LocalType
from tests.layouts import legal, options
from tests.ops.run import result_array

MESHES = ["rows:2", "rows:3", "rows:2;cols:3", "rows:3;cols:2", "rows:1;cols:4", "rows:2;cols:2;planes:2", "rows:5"]
meshes = st.sampled_from(MESHES).map(mm.MeshShape)


@st.composite
def layouts(draw: st.DrawFn, mesh: mm.MeshShape, tensors: list[tuple[str, ...]], names: Sequence[str]) -> str:
    """A random legal layout: each dim in turn takes one of the choices that are still legal."""
    chosen: dict[str, Axes] = {}
    for name in draw(st.permutations(names)):
        fitting = [axes for axes in options(mesh) if legal({**chosen, name: axes}, tensors)]
        chosen[name] = draw(st.sampled_from(fitting))
    return ";".join(f"{n}?:{'+'.join(axes)}" for n, axes in chosen.items())


@given(data=st.data())
def test_any_layout_to_any_layout_by_renaming(data: st.DataObject):
    mesh = data.draw(meshes)
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    old, new = "abc"[: len(sizes)], "pqr"[: len(sizes)]
    layout = data.draw(layouts(mesh, [tuple(old), tuple(new)], old + new))
    with mm.Graph() as graph:
        x = mm.placeholder("x", list(zip(old, sizes, strict=True)), "int32")
        y = mm.rename(x, dict(zip(old, new, strict=True)))
    value = np.arange(x.shape.size, dtype=np.int32).reshape(sizes)
    for optimize in (False, True):
        step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[y], optimize=optimize)
        assert np.array_equal(step(x=value)[y].numpy(), value), f"{mesh} '{layout}' {sizes}"


@given(data=st.data())
def test_any_reshape_in_any_layout(data: st.DataObject):
    mesh = data.draw(meshes)
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))

    def grouped(names: str) -> mm.Shape:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(factors)), max_size=2)))
        bounds = [0, *cuts, len(factors)]
        sizes = [int(np.prod(factors[i:j])) for i, j in itertools.pairwise(bounds)]
        return mm.Shape(list(zip(names, sizes, strict=False)))

    old, new = grouped("abc"), grouped("pqr")
    layout = data.draw(layouts(mesh, [old.names, new.names], "".join(old.names + new.names)))
    with mm.Graph() as graph:
        x = mm.placeholder("x", old, "int32")
        y = mm.reshape(x, new)
    value = np.arange(old.size, dtype=np.int32).reshape(old.sizes)
    step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[y])
    got = step(x=value)[y]
    assert np.array_equal(result_array(got).ravel(), value.ravel()), f"{mesh} '{layout}' {old} -> {new}"


def _all_splits(mesh: mm.MeshShape, n: int) -> list[tuple[Axes, ...]]:
    found = itertools.product(options(mesh), repeat=n)
    return [s for s in found if len(flat := [a for axes in s for a in axes]) == len(dict.fromkeys(flat))]


@pytest.mark.parametrize("sizes", [(12, 6), (5, 7), (6, 3), (1, 4)])
def test_every_pair_of_layouts_by_constraint(sizes: tuple[int, int]):
    """All 121 ordered pairs of placements of a matrix on the 2x3 mesh, with the values exact."""
    mesh = mm.SimulatedMesh("rows:2;cols:3")
    value = np.arange(sizes[0] * sizes[1], dtype=np.int32).reshape(sizes)
    splits = _all_splits(mesh.shape, 2)
    assert len(splits) == 11
    for before in splits:
        with mm.Graph() as graph:
            x = mm.placeholder("x", [("a", sizes[0]), ("b", sizes[1])], "int32")
            first = mm.constrain(x, _rules(before)) + 1
            ys = [mm.constrain(first, _rules(after)) for after in splits]
        step = mm.compile(graph, mesh, fetches=ys)
        got = step(x=value)
        for y, after in zip(ys, splits, strict=True):
            assert got[y].type.splits == after
            assert np.array_equal(got[y].numpy(), value + 1), f"{before} -> {after} of {sizes}"


def _rules(splits: tuple[Axes, ...]) -> str:
    return ";".join(f"{n}:{'+'.join(axes)}" for n, axes in zip("ab", splits, strict=True))


@pytest.mark.parametrize("shape", ["rows:2;cols:3", "rows:2;cols:2;planes:2"])
@pytest.mark.parametrize("sizes", [(12, 24), (5, 7)])
def test_moves_reach_their_target_in_few_steps(shape: str, sizes: tuple[int, int]):
    from meshmpi.compiler.lowering.redistribute import moves

    mesh = mm.MeshShape(shape)
    for before, after in itertools.product(_all_splits(mesh, 2), repeat=2):
        t = LocalType(mm.Shape([("a", sizes[0]), ("b", sizes[1])]), "float32", before)
        steps = moves(mesh, t, after)
        for move in steps:
            t = move.result(mesh, t)
        assert t.splits == after
        assert len(steps) <= 4 + (sizes == (5, 7)), f"{before} -> {after}: {[s.kind for s in steps]}"
        if not any(before):
            assert [s.kind for s in steps] == ["take_shard"] * len(steps), "splitting needs no traffic"
