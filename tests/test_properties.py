"""Properties over random graphs, meshes and layouts; the examples are the same in each run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmpi as mm
from meshmpi.dims import Axes
from meshmpi.program import LocalType
from meshmpi.typerules import redistributed
from tests import oracle
from tests.layouts import legal, options
from tests.ops.run import compare, result_array

MESHES = [
    "rows:2",
    "rows:3",
    "rows:2;cols:3",
    "rows:3;cols:2",
    "rows:1;cols:4",
    "rows:2;cols:2;planes:2",
    "rows:5",
]
NAMES = "abcde"
meshes = st.sampled_from(MESHES).map(mm.MeshShape)


EXAMPLES = max(500, settings.default.max_examples)
"""Random chains of einsums in a plain run; half as many with other steps between."""


@st.composite
def layouts(
    draw: st.DrawFn, mesh: mm.MeshShape, tensors: list[tuple[str, ...]], names: Sequence[str]
) -> str:
    """A random legal layout: each dim in turn takes one of the choices that are still legal."""
    chosen: dict[str, Axes] = {}
    for name in draw(st.permutations(names)):
        fitting = [axes for axes in options(mesh) if legal({**chosen, name: axes}, tensors)]
        chosen[name] = draw(st.sampled_from(fitting))
    return ";".join(f"{n}?:{'+'.join(axes)}" for n, axes in chosen.items())


class Chain:
    """A random graph: placeholders, then steps, each of which takes tensors made before.

    A dim whose size changes gets a new name, so that any two tensors can meet in an einsum.
    """

    def __init__(self, draw: st.DrawFn):
        self.draw = draw
        self.sizes = {n: draw(st.integers(1, 6)) for n in NAMES}
        self.rng = np.random.default_rng(draw(st.integers(0, 1000)))
        self.feeds: dict[str, np.ndarray] = {}
        self.made: list[mm.Tensor] = []
        self.fresh = iter("fghijklmnopqrstuvw")
        for _ in range(draw(st.integers(2, 3))):
            dims = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
            self.feed(mm.Shape([(n, self.sizes[n]) for n in dims]))
        self.sources = list(self.made)

    def feed(self, shape: mm.Shape) -> None:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = self.rng.uniform(-1, 1, shape.sizes)
        self.made.append(mm.placeholder(name, shape, "float64"))

    def einsum(self) -> mm.Tensor:
        """Contracts two tensors down to some dims."""
        draw = self.draw
        left, right = draw(st.sampled_from(self.made)), draw(st.sampled_from(self.made))
        present = list(dict.fromkeys([*left.shape, *right.shape]))
        kept = [d for d in draw(st.permutations(present)) if draw(st.booleans())][:3]
        y = mm.einsum([left, right], kept)
        choices = [
            lambda: y,
            lambda: mm.tanh(y),
            lambda: y * 2.0 + y,
            lambda: mm.tanh(mm.reduce_sum(y)) * y,
        ]
        return draw(st.sampled_from(choices))()

    def along_a_dim(self) -> mm.Tensor:
        """Moves, repeats, drops or adds up elements along one dim of the newest tensor with any."""
        draw = self.draw
        x = next((t for t in reversed(self.made) if t.shape), None)
        if x is None:
            return self.einsum()
        dim = draw(st.sampled_from(list(x.shape)))
        step = draw(st.sampled_from(STEPS))
        y = step(self, x, dim)
        changed = [n for n in y.shape.names if y.shape.dim(n) not in x.shape]
        return mm.rename(y, {n: next(self.fresh) for n in changed})

    def finish(self) -> tuple[list[mm.Tensor], dict[str, np.ndarray]]:
        """What to fetch (the last tensor, a loss, its gradients), and the feeds."""
        loss = mm.reduce_sum(mm.square(self.made[-1]))
        grads = [g for g in mm.gradients(loss, self.sources) if g is not None]
        return [self.made[-1], loss, *grads], self.feeds


def _shifted(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    offset = c.draw(st.integers(-dim.size - 1, dim.size + 1))
    return mm.shift(x, offset, dim, wrap=c.draw(st.booleans()))


def _sliced(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    begin = c.draw(st.integers(0, dim.size - 1))
    return mm.slice(
        x, begin, c.draw(st.integers(1, dim.size - begin)), dim, stride=c.draw(st.integers(1, 3))
    )


def _padded(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    widths = [c.draw(st.integers(0, 4)), c.draw(st.integers(0, 4))]
    return mm.pad(x, widths, dim, c.draw(st.sampled_from([0.0, 1.5])))


def _joined(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    parts = [x, mm.slice(x * 0.5, 0, c.draw(st.integers(1, dim.size)), dim), x]
    return mm.concat(c.draw(st.permutations(parts))[: c.draw(st.integers(2, 3))], dim)


def _reshaped(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """One dim as two, or two neighbours as one."""
    k = x.shape.position(dim.name)
    if k + 1 < len(x.shape) and c.draw(st.booleans()):
        both = [dim, x.shape[k + 1]]
        return mm.replace_dimensions(x, both, mm.Dimension("_new", both[0].size * both[1].size))
    factor = c.draw(st.sampled_from([n for n in range(1, dim.size + 1) if dim.size % n == 0]))
    new = [mm.Dimension("_new", factor), mm.Dimension("_other", dim.size // factor)]
    return mm.replace_dimensions(x, dim, new)


def _renamed(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    return mm.rename(x, {dim.name: "_new"})


def _summed(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    return mm.cumsum(x, dim, exclusive=c.draw(st.booleans()), reverse=c.draw(st.booleans()))


def _picked(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """Rows by index, a few of them outside; all rows, or for each row of a batch its own."""
    name = f"n{len(c.feeds)}"
    others = [d for d in x.shape if d != dim][: c.draw(st.integers(0, 1))]
    shape = mm.Shape([mm.Dimension("_new", c.draw(st.integers(1, 7))), *others])
    c.feeds[name] = c.rng.integers(-1, dim.size + 1, shape.sizes).astype(np.int32)
    index = mm.rename(mm.placeholder(name, shape, "int32"), {"_new": (new := next(c.fresh))})
    y = mm.gather(x, index, dim)
    assert y.shape.find(new) >= 0
    return y


def _scattered(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    name = f"n{len(c.feeds)}"
    rows = mm.Dimension("_new", c.draw(st.integers(1, 7)))
    c.feeds[name] = c.rng.integers(-1, rows.size + 1, dim.size).astype(np.int32)
    return mm.scatter_add(x, mm.placeholder(name, [dim], "int32"), rows)


def _ranked(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    k = mm.Dimension("_new", c.draw(st.integers(1, dim.size)))
    return mm.top_k(x, dim, k, smallest=c.draw(st.booleans()))[0]


def _convolved(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """With a filter along one dim, of any stride, dilation, padding and size of the result."""
    taps = mm.Dimension(next(c.fresh), c.draw(st.integers(1, 4)))
    c.feed(mm.Shape([taps]))
    c.sources.append(c.made.pop())
    slide = mm.Slide(
        dim.name, taps.name, "_new", stride=c.draw(st.integers(1, 3)),
        dilation=c.draw(st.integers(1, 2)), before=c.draw(st.integers(-1, 4)),
    )  # fmt: skip
    size = c.draw(st.integers(1, 8))
    shape = [mm.Dimension("_new", size) if d == dim else d for d in x.shape]
    return mm.conv(x, c.sources[-1], [slide], shape)


STEPS = (
    _shifted, _sliced, _padded, _joined, _reshaped, _renamed, _summed, _picked, _scattered, _ranked,
    _convolved,
)  # fmt: skip


def check_chain(data: st.DataObject, fetches: list, graph: mm.Graph, feeds: dict) -> None:
    """Runs a chain in a random layout of a random mesh and compares with NumPy in float64."""
    mesh = data.draw(meshes)
    tensors = [t.shape.names for o in graph.operations for t in o.outputs]
    names = [n for n in graph.dim_names if not n.startswith("_")]
    layout = data.draw(layouts(mesh, tensors, names))
    want = oracle.evaluate(graph, fetches, feeds)
    for optimize in data.draw(st.sampled_from([(True,), (False,), (False, True)])):
        step = mm.compile(
            graph, mm.SimulatedMesh(mesh), layout, fetches=fetches, optimize=optimize,
            kernels="numpy",
        )  # fmt: skip
        got = step({n: a for n, a in feeds.items() if n in step.program.feeds})
        for t, value in zip(fetches, want, strict=True):
            compare(result_array(got[t]), value, t.dtype, 1e-11, f"{mesh} '{layout}' {t}")


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_random_einsum_chains(data: st.DataObject):
    with mm.Graph() as graph:
        chain = Chain(data.draw)
        for _ in range(data.draw(st.integers(1, 4))):
            chain.made.append(chain.einsum())
        fetches, feeds = chain.finish()
    check_chain(data, fetches, graph, feeds)


@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_random_chains_with_steps_along_split_dims(data: st.DataObject):
    with mm.Graph() as graph:
        chain = Chain(data.draw)
        for _ in range(data.draw(st.integers(1, 4))):
            step = data.draw(st.sampled_from([chain.einsum, chain.along_a_dim, chain.along_a_dim]))
            chain.made.append(step())
        fetches, feeds = chain.finish()
    check_chain(data, fetches, graph, feeds)


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
    assert np.array_equal(result_array(got).ravel(), value.ravel()), (
        f"{mesh} '{layout}' {old} -> {new}"
    )


def _all_splits(mesh: mm.MeshShape, n: int) -> list[tuple[Axes, ...]]:
    found = itertools.product(options(mesh), repeat=n)
    return [
        s for s in found if len(flat := [a for axes in s for a in axes]) == len(dict.fromkeys(flat))
    ]


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
    from meshmpi.lowering.redistribute import moves

    mesh = mm.MeshShape(shape)
    for before, after in itertools.product(_all_splits(mesh, 2), repeat=2):
        t = LocalType(mm.Shape([("a", sizes[0]), ("b", sizes[1])]), "float32", before)
        steps = moves(mesh, t, after)
        for kind, attrs in steps:
            t = redistributed(mesh, t, kind, attrs)
        assert t.splits == after
        assert len(steps) <= 4 + (sizes == (5, 7)), (
            f"{before} -> {after}: {[s.kind for s in steps]}"
        )
        if not any(before):
            assert [s.kind for s in steps] == ["take_shard"] * len(steps), (
                "splitting needs no traffic"
            )
