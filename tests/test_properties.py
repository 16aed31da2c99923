"""Properties over random graphs, meshes and layouts; the examples are the same in each run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import meshmpi as mm
from meshmpi.dims import Axes
from meshmpi.ir.program import LocalType
from meshmpi.kernels.native import available
from tests import oracle
from tests.chains import Chain
from tests.layouts import legal, options
from tests.ops.run import SEED, compare, result_array
from tests.passes.test_local_blocks import short_blocks, whole

MESHES = ["rows:2", "rows:3", "rows:2;cols:3", "rows:3;cols:2", "rows:1;cols:4", "rows:2;cols:2;planes:2", "rows:5"]
meshes = st.sampled_from(MESHES).map(mm.MeshShape)


EXAMPLES = max(200, settings.default.max_examples)
"""Random chains of einsums in a plain run."""


@st.composite
def layouts(draw: st.DrawFn, mesh: mm.MeshShape, tensors: list[tuple[str, ...]], names: Sequence[str]) -> str:
    """A random legal layout: each dim in turn takes one of the choices that are still legal."""
    chosen: dict[str, Axes] = {}
    for name in draw(st.permutations(names)):
        fitting = [axes for axes in options(mesh) if legal({**chosen, name: axes}, tensors)]
        chosen[name] = draw(st.sampled_from(fitting))
    return ";".join(f"{n}?:{'+'.join(axes)}" for n, axes in chosen.items())


def check_chain(data: st.DataObject, fetches: list, graph: mm.Graph, feeds: dict) -> None:
    """Runs a chain in a random layout of a random mesh and compares with NumPy in float64."""
    mesh = data.draw(meshes)
    layout = layout_of(data, graph, mesh)
    want = oracle.evaluate(graph, fetches, feeds)
    for optimize in data.draw(st.sampled_from([(True,), (False,), (False, True)])):
        step = mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=fetches, optimize=optimize, kernels="numpy")
        got = step({n: a for n, a in feeds.items() if n in step.program.feeds})
        for t, value in zip(fetches, want, strict=True):
            compare(result_array(got[t]), value, t.dtype, 1e-11, f"{mesh} '{layout}' {t}")


def layout_of(data: st.DataObject, graph: mm.Graph, mesh: mm.MeshShape) -> str:
    """A random legal layout of a graph."""
    tensors = [t.shape.names for o in graph.operations for t in o.outputs]
    names = [n for n in graph.dim_names if not n.startswith("_")]
    return data.draw(layouts(mesh, tensors, names))


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_random_einsum_chains(data: st.DataObject):
    with mm.Graph() as graph:
        chain = Chain(data.draw)
        for _ in range(data.draw(st.integers(1, 4))):
            chain.made.append(chain.einsum())
        fetches, feeds = chain.finish()
    check_chain(data, fetches, graph, feeds)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_random_chains_with_steps_along_split_dims(data: st.DataObject):
    with mm.Graph() as graph:
        chain = Chain(data.draw)
        for _ in range(data.draw(st.integers(1, 4))):
            step = data.draw(st.sampled_from([chain.einsum, chain.along_a_dim, chain.along_a_dim]))
            chain.made.append(step())
        fetches, feeds = chain.finish()
    check_chain(data, fetches, graph, feeds)


def trained(data: st.DataObject, graph: mm.Graph, chain: Chain) -> tuple[list, dict, list]:
    """A chain in which tensors are split in ways of their own: fetches, feeds, updates."""
    chain.variables()
    steps = [chain.mixed, chain.mixed, chain.constrained, chain.einsum, chain.along_a_dim]
    for _ in range(data.draw(st.integers(1, 4))):
        chain.made.append(data.draw(st.sampled_from(steps))())
    fetches, feeds = chain.finish()
    ws = chain.weights
    loss = fetches[1] + mm.add_n([mm.reduce_sum(mm.square(w)) for w in ws])
    clip = data.draw(st.sampled_from([None, 0.1, 1.0]))
    slots = mm.optimize.Momentum(0.1, clip_norm=clip, storage=chain.split(ws[0].shape))
    optimizer = data.draw(st.sampled_from([mm.optimize.SGD(0.1, clip_norm=clip), slots]))
    return fetches, feeds, optimizer.minimize(loss)


def check_blocks(data: st.DataObject, kernels: str) -> None:
    """Two steps of training in a random layout are those of the oracle, in values and variables."""
    mesh = data.draw(meshes)
    with mm.Graph() as graph:
        fetches, feeds, updates = trained(data, graph, Chain(data.draw, mesh))
    layout = layout_of(data, graph, mesh)
    with pytest.MonkeyPatch.context() as m:
        short_blocks(m)
        steps = [
            mm.compile(
                graph,
                mm.SimulatedMesh(mesh),
                layout,
                fetches=fetches,
                updates=updates,
                kernels=kernels,
                optimize=optimize,
                seed=SEED,
            )
            for optimize in (True, False)[: 1 if kernels == "native" else 2]
        ]
    given = {n: a for n, a in feeds.items() if n in steps[0].program.feeds}
    variables = {n: whole(steps[0].variables[n]) for n in steps[0].program.variables}
    for number in range(2):
        wanted = [*fetches, *(u.value for u in updates)]
        want = oracle.evaluate(graph, wanted, feeds, variables, number, SEED)
        for u, value in zip(updates, want[len(fetches) :], strict=True):
            variables[u.variable.name] = oracle.aligned(value, u.value.shape, u.variable.shape)
        for step in steps:
            got, about = step(given), f"{mesh} '{layout}' step {number}"
            for t, value in zip(fetches, want, strict=False):
                compare(result_array(got[t]), value, t.dtype, 1e-10, f"{about} {t}")
            for n, value in variables.items():
                compare(whole(step.variables[n]), value, "float64", 1e-10, f"{about} {n}")


@pytest.mark.matrix
@settings(max_examples=EXAMPLES // 3)
@given(data=st.data())
def test_random_training_with_blocks_of_their_own(data: st.DataObject):
    check_blocks(data, "numpy")


@pytest.mark.matrix
@pytest.mark.skipif(not available(), reason="no C compiler")
@settings(max_examples=EXAMPLES // 20, phases=[Phase.generate])  # each step of shrinking builds C
@given(data=st.data())
def test_random_training_with_blocks_of_their_own_by_generated_kernels(data: st.DataObject):
    check_blocks(data, "native")


@pytest.mark.matrix
@settings(max_examples=EXAMPLES // 20, phases=[Phase.generate])
@given(data=st.data())
def test_random_training_in_narrow_types_is_verified(data: st.DataObject):
    """Each operation within the bounds of rounding of its own type, by NumPy and generated C."""
    mesh = data.draw(meshes)
    with mm.Graph() as graph:
        chain = Chain(data.draw, mesh, ("float32", "bfloat16"))
        fetches, feeds, updates = trained(data, graph, chain)
    layout = layout_of(data, graph, mesh)
    report = mm.verify(graph, [layout], mesh, fetches, updates, feeds=feeds, precision="own", warm_steps=0)
    assert report.ok, report


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
