"""Loops: the same results as without, in every layout; memory linear in the length."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import meshmpi as mm
from meshmpi.compiler.passes import tiled_regions
from meshmpi.compiler.passes.pipeline import PASSES, optimize
from meshmpi.compiler.passes.tiled_regions import form_tiled_regions
from meshmpi.errors import LayoutError, ProgramError
from meshmpi.ir.kinds.regions import TileDim, iterations
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.verify import verify
from meshmpi.kernels import numpy_dtype, threads
from meshmpi.kernels import tiled as region_kernels
from meshmpi.kernels.native import available
from meshmpi.launch.launch import launch
from meshmpi.runtime.compiled import predict_cost
from tests.layouts import legal_layouts
from tests.oracle import evaluate
from tests.passes.hand import run

SHAPE = mm.MeshShape("rows:2;cols:3")
BATCH, LENGTH, HEADS, D = 3, 21, 5, 4
SIZES = {"batch": BATCH, "length": LENGTH, "memory": LENGTH, "heads": HEADS, "d": D}
CACHE = 4000
Model = Callable[[], list[mm.Tensor]]
MODELS: dict[str, tuple[Model, mm.Band | None]] = {}
CAUSAL = mm.Band.causal("length", "memory")
LATER, STRICTLY = mm.Band("length", "memory", most=-1), mm.Band("length", "memory", least=1)
NEAR = mm.Band.local("length", "memory", 3)
AROUND = mm.Band.local("length", "memory", 3, causal=False)


def model(band: mm.Band | None):
    """Registers fetches (the first a loss), and outside which band its tiled regions skip blocks."""

    def register(f: Model) -> Model:
        MODELS[f.__name__] = f, band
        return f

    return register


FLOATS = {"type": "float64"}


def _x(name: str, dims: str, dtype: str = "") -> mm.Tensor:
    dims = [mm.Dimension(d, SIZES[d]) for d in dims.split()]
    return mm.placeholder(name, dims, dtype or FLOATS["type"])


def rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers that a type has, as float64 or int32."""
    return a.astype(numpy_dtype(dtype)).astype(np.float64) if a.dtype == np.float64 else a


def _qkv() -> tuple[mm.Tensor, mm.Tensor, mm.Tensor]:
    return (_x("q", "batch length heads d"), _x("k", "batch memory heads d"), _x("v", "batch memory heads d"))


def _scores_shape() -> mm.Shape:
    return mm.Shape([(n, SIZES[n]) for n in ("batch", "heads", "length", "memory")])


def _padding() -> mm.Tensor:
    return mm.not_equal(_x("ids", "batch memory", "int32"), 0)


def _attention(
    q: mm.Tensor,
    k: mm.Tensor,
    v: mm.Tensor,
    mask: mm.Tensor | None = None,
    fill: float = -1e9,
    bias: mm.Tensor | None = None,
    rate: float = 0.0,
    band: mm.Band | None = None,
) -> mm.Tensor:
    shape = _scores_shape()
    scores = mm.einsum([q, k], shape, band=band) * 0.5
    if bias is not None:
        scores = mm.add(scores, bias, output_shape=shape)
    if mask is not None:
        scores = mm.where(mask, scores, fill, output_shape=shape)
    weights = mm.softmax(scores, "memory", band=band)
    weights = mm.dropout(weights, rate > 0, rate=rate)
    return mm.einsum([weights, v], q.shape, band=band)


def _with_gradients(y: mm.Tensor, *xs: mm.Tensor) -> list[mm.Tensor]:
    loss = mm.reduce_sum(mm.square(mm.tanh(y)))
    return [loss, *mm.gradients([loss], list(xs))]


def _of_band(name: str, band: mm.Band | None, rate: float = 0.0) -> None:
    def build() -> list[mm.Tensor]:
        q, k, v = _qkv()
        return _with_gradients(_attention(q, k, v, rate=rate, band=band), q, k, v)

    MODELS[name] = build, band


_of_band("whole", None)
_of_band("masked", CAUSAL)
_of_band("dropped_out", CAUSAL, rate=0.4)
_of_band("later_only", LATER)
_of_band("strictly_earlier", STRICTLY)
_of_band("near", NEAR)
_of_band("around", AROUND)


@model(None)
def masked_by_data():
    """A mask that is a tensor like any other hides nothing from the tiled regions."""
    q, k, v = _qkv()
    a, b = mm.range(q.shape.dim("length")), mm.range(k.shape.dim("memory"))
    mask = mm.greater_equal(a, b, output_shape=mm.Shape([*a.shape, *b.shape]))
    return _with_gradients(_attention(q, k, v, mask), q, k, v)


@model(CAUSAL)
def masked_with_infinity_and_padding():
    """Some rows see nothing at all."""
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v, _padding(), -math.inf, band=CAUSAL), q, k, v)


@model(CAUSAL)
def masked_with_padding():
    q, k, v = _qkv()
    return _with_gradients(_attention(q, k, v, _padding(), band=CAUSAL), q, k, v)


@model(None)
def biased():
    """The gradient of the bias is a sum over batch of a wide value."""
    q, k, v = _qkv()
    bias = _x("bias", "heads length memory")
    return _with_gradients(_attention(q, k, v, bias=bias), q, k, v, bias)


@model(CAUSAL)
def biased_and_masked():
    """The bias has no gradient here: a sum that is a wide value itself is made everywhere."""
    q, k, v = _qkv()
    bias = _x("bias", "heads length memory")
    return _with_gradients(_attention(q, k, v, bias=bias, band=CAUSAL), q, k, v)


@model(CAUSAL)
def one_head_of_memory():
    q, k, v = _x("q", "batch length heads d"), _x("k", "batch memory d"), _x("v", "batch memory d")
    return _with_gradients(_attention(q, k, v, band=CAUSAL), q, k, v)


@model(CAUSAL)
def computed_again():
    """A layer whose inside the backward pass computes again."""
    q, k, v = _qkv()
    y = mm.recompute_grad(lambda q, k, v: _attention(q, k, v, band=CAUSAL), [q, k, v])
    return _with_gradients(y, q, k, v)


@model(None)
def weights_fetched():
    q, k, v = _qkv()
    weights = mm.softmax(mm.einsum([q, k], _scores_shape()), "memory")
    return [*_with_gradients(mm.einsum([weights, v], q.shape), q, k, v), weights]


@model(CAUSAL)
def two_layers():
    q, k, v = _qkv()
    y = _attention(q, k, v, band=CAUSAL)
    y = _attention(mm.tanh(y), k, v, band=CAUSAL)
    return _with_gradients(y, q, k, v)


@model(CAUSAL)
def side_by_side():
    """As the parts of a batch: nothing connects them but their weights."""
    q, k, v = _qkv()
    parts = []
    for n in range(2):
        y = _attention(q * (n + 1.0), k, v, band=CAUSAL)
        parts.append(_with_gradients(_attention(mm.tanh(y), k, v, band=CAUSAL), q, k, v))
    return [a + b for a, b in zip(*parts, strict=True)]


@model(None)
def no_softmax():
    """Sums over rows and columns of gated scores."""
    q, k, v = _qkv()
    gated = mm.sigmoid(mm.einsum([q, k], _scores_shape()))
    total = mm.reduce_sum(gated, output_shape=mm.Shape([("heads", HEADS), ("memory", LENGTH)]))
    y = mm.einsum([gated, v], q.shape)
    return _with_gradients(mm.add(y, mm.reduce_mean(total, reduced_dim="memory"), output_shape=y.shape), q, k, v)


def built(name: str) -> tuple[mm.Graph, dict[str, mm.Tensor], dict[str, np.ndarray]]:
    with mm.Graph() as graph:
        fetches = {f"f{n}": x for n, x in enumerate(MODELS[name][0]())}
    rng = np.random.default_rng(3)
    feeds = {}
    for op in graph.operations:
        if type(op).__name__ == "Placeholder":
            t = op.outputs[0]
            values = rng.normal(size=t.shape.sizes)
            feeds[t.name] = rng.integers(0, 3, t.shape.sizes) if t.name == "ids" else values
    if "ids" in feeds:
        feeds["ids"] = feeds["ids"].astype(np.int32)
        feeds["ids"][0, :4] = 0  # the first rows see nothing
    return graph, fetches, feeds


def with_tiling(p: Program, cache_bytes: int = CACHE) -> Program:
    passes = [partial(form_tiled_regions, cache_bytes=cache_bytes) if f is form_tiled_regions else f for f in PASSES]
    return optimize(p, tuple(passes))


def tiled(name: str) -> Program:
    """The program of a model on one rank, with tiled regions."""
    graph, fetches, _ = built(name)
    return with_tiling(mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program)


def regions_in(p: Program) -> list[Instruction]:
    return [i for i in p.instructions if i.kind == "tiled"]


def compare(got: dict, want: dict, tolerance: float, label: str) -> None:
    for n in want:
        largest = max(1e-3, np.abs(want[n]).max())
        error = np.abs(got[n] - want[n]).max() / largest
        assert error < tolerance, f"{label}: {n} differs by {error:.2g}"


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of a few rows, so that small models have several, of unequal sizes."""
    monkeypatch.setattr(tiled_regions, "LEAST_ROWS", 4)
    monkeypatch.setattr(tiled_regions, "LEAST_BAND_ROWS", 4)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_program_as_lowered(name: str):
    graph, fetches, feeds = built(name)
    regions = 0
    want = None
    for layout in legal_layouts(graph, SHAPE, 3):
        try:
            p = mm.plan(graph, SHAPE, layout, fetches=fetches, optimize=False, seed=1).program
        except LayoutError:
            continue
        want = run(p, fetches, feeds) if want is None else want
        p = with_tiling(p)
        regions += len(regions_in(p))
        compare(run(p, fetches, feeds), want, 1e-9, f"{name} {layout}")
    assert regions, f"no layout of {name} has a tiled region"


@pytest.mark.quick(2)
@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize("name", MODELS)
def test_generated_kernels_in_tiled_regions(name: str):
    graph, fetches, feeds = built(name)
    for mesh, layout in (("rows:1", ""), ("rows:2;cols:3", "batch:rows;heads:cols")):
        p = mm.plan(graph, mesh, layout, fetches=fetches, optimize=False, seed=1).program
        want = run(p, fetches, feeds)
        compare(run(with_tiling(p), fetches, feeds, "native"), want, 1e-9, f"{name} {layout}")


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_threads_share_a_region_and_change_no_bit(name: str, monkeypatch):
    """Blocks that add to one sum stay on one thread, in their order."""
    monkeypatch.setattr(region_kernels, "SHARED_POINTS", 0)
    shared: list[int] = []
    together = threads.together
    monkeypatch.setattr(threads, "together", lambda parts: (shared.append(len(parts)), together(parts))[1])
    graph, fetches, feeds = built(name)
    p = with_tiling(mm.plan(graph, "rows:1", fetches=fetches, optimize=False, seed=1).program)
    with threadpool_limits(1):
        for kernels in ("numpy", "native") if available() else ("numpy",):
            found = {}
            for count in (1, 2, 5):
                monkeypatch.setattr(threads, "available", lambda count=count: count)
                found[count] = run(p, fetches, feeds, kernels)
            for count in (2, 5):
                assert all(np.array_equal(found[1][n], found[count][n]) for n in found[1]), (name, kernels, count)
    assert max(shared) > 1, "no region was shared"


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_skipped_where_a_band_is_declared_and_only_there(name: str):
    found = [i.attrs.band for i in regions_in(tiled(name))]
    assert found and all(band == MODELS[name][1] for band in found), found


POISONED = [
    ("masked", "float32", "v", LENGTH - 1, math.nan, "native"),
    ("masked", "float32", "v", LENGTH - 1, math.nan, "numpy"),
    ("masked", "float32", "k", LENGTH - 1, math.nan, "numpy"),
    ("masked", "float64", "q", 9, math.nan, "numpy"),
    ("masked", "float32", "v", 9, -math.inf, "native"),
    ("near", "float64", "q", 9, math.inf, "numpy"),
    ("near", "float64", "v", 9, math.nan, "numpy"),
    ("near", "float64", "k", 9, -math.inf, "numpy"),
    ("masked", "bfloat16", "v", LENGTH - 1, math.nan, "numpy"),
    ("masked", "bfloat16", "v", LENGTH - 1, -math.inf, "numpy"),
    ("masked", "bfloat16", "v", 9, math.inf, "native"),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "dtype", "x", "at", "value", "kernels"), POISONED)
def test_what_is_not_finite_shows_where_it_is_seen(name: str, dtype: str, x: str, at: int, value: float, kernels: str):
    """NaN and infinities reach exactly the elements that the oracle says, tiled or not."""
    if kernels == "native" and not available():
        pytest.skip("no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FLOATS, "type", dtype)
        graph, fetches, feeds = built(name)
    feeds = {n: rounded(a, dtype) for n, a in feeds.items()}
    feeds[x][1, at, 2, 1] = value
    want = evaluate(graph, list(fetches.values()), feeds)
    p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
    for one in (p, optimize(p), with_tiling(p, CACHE // 2)):
        got = run(one, fetches, feeds, kernels)
        for found, right in zip(got.values(), want, strict=True):
            found = found.astype(np.float64)
            np.testing.assert_array_equal(np.isnan(found), np.isnan(right))
            np.testing.assert_array_equal(np.isinf(found), np.isinf(right))
            if dtype == "float64":
                np.testing.assert_allclose(found, right, 1e-9, 1e-9)


@pytest.mark.parametrize("largest", [2.5e9, 1e30])
@pytest.mark.parametrize("name", ["masked", "masked_with_padding", "near"])
def test_logits_of_any_size(name: str, largest: float):
    """A masked logit is no number that could compete with those that are seen."""
    graph, fetches, feeds = built(name)
    for n in "qk":
        feeds[n] = feeds[n] * -math.sqrt(largest) * (1 if n == "q" else -1)
    want = evaluate(graph, list(fetches.values()), feeds, seed=1)
    p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False, seed=1).program
    for one in (p, with_tiling(p)):
        compare(run(one, fetches, feeds), dict(zip(fetches, want, strict=True)), 1e-9, name)


def test_a_band_of_weights_is_zero_outside_and_has_rows_without_pairs():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "length:6;memory:4", "float64")
        y = mm.softmax(x, "memory", band=mm.Band.local("length", "memory", 2))
        (dx,) = mm.gradients([mm.square(y)], [x])
        step = mm.compile(graph, mm.SimulatedMesh("rows:1"), fetches=[y, dx])
    data = np.full((6, 4), np.nan)
    seen = np.array([[0 <= r - c < 2 for c in range(4)] for r in range(6)])
    data[seen] = np.random.default_rng(0).normal(size=seen.sum())
    got = step(x=data)
    for t in (y, dx):
        assert not got[t].numpy()[~seen].any()
    np.testing.assert_allclose(got[y].numpy().sum(1), [1, 1, 1, 1, 1, 0])


def test_skipped_blocks_cost_nothing():
    masked, whole = (predict_cost(tiled(name)).flops for name in ("masked", "whole"))
    assert masked < 0.8 * whole


@pytest.mark.parametrize("layout", ["", "length:rows", "heads:cols;batch:rows"])
def test_memory_grows_with_the_length_not_with_its_square(monkeypatch, layout: str):
    arena, stored = {}, {}
    for length in (128, 256):
        monkeypatch.setitem(SIZES, "length", length)
        monkeypatch.setitem(SIZES, "memory", length)
        with mm.Graph() as graph:
            fetches = {f"f{n}": x for n, x in enumerate(two_layers())}
        p = mm.plan(graph, SHAPE, layout, fetches=fetches, optimize=False).program
        without = optimize(p, tuple(f for f in PASSES if f is not form_tiled_regions))
        for table, one in ((arena, with_tiling(p, 40000)), (stored, without)):
            table[length] = predict_cost(one).memory["arena"]
    assert arena[256] <= 2.05 * arena[128]
    assert stored[256] > 3 * stored[128]


def test_scores_and_masks_are_computed_again_instead_of_being_stored():
    p = tiled("masked")
    wide = [t for t in p.types.values() if {"length", "memory"} <= set(t.shape.names)]
    assert not wide, wide
    assert p.counts()["contract"] == 7  # scores twice, and five that use or make gradients


def test_products_of_bfloat16_are_summed_in_float32():
    with mm.Graph() as graph:
        q, k, v = (
            _x(n, f"batch {m} heads d", "bfloat16") for n, m in (("q", "length"), ("k", "memory"), ("v", "memory"))
        )
        weights = mm.softmax(mm.cast(mm.einsum([q, k], _scores_shape()), "float32"), "memory")
        y = mm.cast(mm.einsum([mm.cast(weights, "bfloat16"), v], q.shape), "float32")
        fetches = {f"f{n}": x for n, x in enumerate(_with_gradients(y, q, k, v))}
    p = mm.plan(graph, "rows:1", fetches=fetches, optimize=False).program
    q = with_tiling(p, 600)
    sums = [q.types[v] for i in regions_in(q) for v in i.outputs if "memory" in q.types[v].shape.names]
    assert sums and all(t.dtype == "float32" for t in sums)
    rng = np.random.default_rng(0)
    feeds = {n: rng.normal(size=t.shape.sizes).astype(np.float32) for n, t in p.feeds.items()}
    want, got = ({n: a.astype(np.float64) for n, a in run(r, fetches, feeds).items()} for r in (p, q))
    compare(got, want, 2e-2, "bfloat16")


def test_small_values_and_weights_are_left_alone():
    graph, fetches, _ = built("masked")
    p = mm.plan(graph, "rows:1", fetches=fetches).program
    assert not regions_in(p)
    with mm.Graph() as graph:
        x, w = _x("q", "batch length d", "float32"), mm.get_variable("w", [("d", D), ("wide", 500)])
        h = mm.relu(mm.einsum([x, w], mm.Shape([*x.shape[:2], ("wide", 500)])))
        loss = mm.reduce_sum(mm.square(h))
    p = mm.plan(graph, "rows:1", fetches={"loss": loss}, optimize=False).program
    assert not regions_in(with_tiling(p))


def _with_attributes(**attrs) -> Program:
    p = tiled("masked")
    return p.with_instructions(i.replaced(**attrs) if i.kind == "tiled" else i for i in p.instructions)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"over": (TileDim("memory", 4),), "band": None}, "needs all of 'memory'"),
        ({"over": (TileDim("d", 2),), "band": None}, "needs all of 'd'"),
        ({"over": ()}, "over no dim"),
        ({"over": (TileDim("batch", 0),)}, "empty blocks"),
        ({"over": (TileDim("batch", 1),)}, "band along other dims"),
        ({"band": NEAR}, "uses pairs outside 0<=length-memory<=2"),
    ],
)
def test_rules_of_tiled_regions(attrs: dict, message: str):
    verify(_with_attributes())
    with pytest.raises(ProgramError, match=message):
        verify(_with_attributes(**attrs))


def test_blocks_cover_everything_once():
    graph, fetches, _ = built("whole")
    p = mm.plan(graph, SHAPE, "length:rows;heads:cols", fetches=fetches, optimize=False).program
    p = with_tiling(p)
    for i in regions_in(p):
        for rank in range(SHAPE.size):
            here = SHAPE.coordinates(rank)
            seen = Counter[tuple[int, ...]]()
            for r in iterations(i, p, here):
                seen.update(itertools.product(*(range(*r[n]) for n in ("batch", "heads", "length"))))
            lengths, heads = (11, 10)[rank // 3], (2, 2, 1)[rank % 3]
            assert len(seen) == BATCH * lengths * heads and set(seen.values()) == {1}


@pytest.mark.matrix
def test_tiling_and_recomputing_on_real_ranks():
    arguments = ["-m", "tests.passes.mpi_tiled"]
    done = launch(2, arguments, timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "5 programs agree"


def test_products_too_small_for_a_region_next_to_large_ones_of_the_same_dims():
    """Maps of a small product have the dims of rematerialised values, but no region can be formed for them."""
    rng, sizes = np.random.default_rng(0), (16, 12)
    with mm.Graph() as graph:
        found, feeds = [], {}
        for k, memory in enumerate(sizes):
            q = mm.placeholder(f"q{k}", "batch:4;heads:2;length:16;d_kv:2")
            kv = mm.placeholder(f"k{k}", f"batch:4;heads:2;memory_length:{memory};d_kv:2")
            feeds |= {t.operation.name: rng.normal(size=t.shape.sizes) for t in (q, kv)}
            seen = mm.less(mm.range(mm.Dimension("memory_length", memory)), 11)
            found.append(mm.dot_product_attention(q, kv, kv, "memory_length", "d_kv", "d_kv", mask=seen))
    program = mm.plan(graph, "rows:2", "batch:rows", fetches=found, optimize=False).program
    with_one = with_tiling(program, 4 * 2 * 2 * 16 * 14)  # bytes, between the scores of both
    assert len(regions_in(with_one)) == 1
    fetches = dict(zip(with_one.fetches, found, strict=True))
    want, got = (run(p, fetches, feeds) for p in (program, with_one))
    for n in fetches:
        np.testing.assert_allclose(got[n], want[n], 1e-5, 1e-6)
