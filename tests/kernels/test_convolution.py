"""conv against one einsum with the meeting indices written out; slides against brute force.

Small parts exercise every way to cut a convolution; each library of matrix products has its turn.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from meshmpi.dims import Shape
from meshmpi.errors import ConfigError, ProgramError
from meshmpi.ir.convolutions import ConvDims, phases
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import Feed
from meshmpi.ir.program import LocalType
from meshmpi.ir.verify import verify
from meshmpi.kernels import blas, numpy_dtype, patches
from tests.kernels.build import MESH, held, local_type, one_instruction
from tests.kernels.build import run as run_all_ranks

BOUND = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "int32": 0}


@pytest.fixture(params=blas.NAMES)
def library(request, monkeypatch) -> str:
    try:
        blas.find(request.param)
    except ConfigError:
        pytest.skip(f"the library '{request.param}' is not installed")
    monkeypatch.setenv(blas.VARIABLE, request.param)
    monkeypatch.setattr(blas, "SMALL_PRODUCT", 0)
    return request.param


# -- slides ----------------------------------------------------------------------------------------


def meetings(s: ConvDims, xs, ws, ys) -> list[tuple[int, int, int]]:
    return [
        (i, k, o)
        for i in range(*xs)
        for k in range(*ws)
        for o in range(*ys)
        if s.base * i == s.stride * o + s.dilation * k - s.before
    ]


def random_slides(count: int):
    rng = random.Random(3)

    def ranged(most: int) -> tuple[int, int]:
        start = rng.randrange(-4, 6)
        return start, start + rng.randrange(0, most)

    for _ in range(count):
        stride, dilation = rng.choice([-3, -2, -1, 1, 2, 3, 4]), rng.choice([-3, -1, 1, 2, 3])
        slide = ConvDims("x", "w", "y", stride, dilation, rng.randrange(-5, 6), rng.choice([1, 1, 2, 3]))
        yield slide, ranged(9), ranged(5), ranged(9)


def test_slides_turned_around_meet_the_same():
    for s, xs, ws, ys in random_slides(600):
        want = meetings(s, xs, ws, ys)
        assert s.meetings(xs, ws, ys) == len(want)
        assert sorted((i, k, o) for i, o, k in meetings(s.of_filter(), xs, ys, ws)) == want
        assert sorted((i, k, o) for o, k, i in meetings(s.of_input(), ys, ws, xs)) == want
        assert sorted((i, k, o) for k, i, o in meetings(s.swapped(), ws, xs, ys)) == want
        assert min(s.of_input().base, s.swapped().base, s.of_filter().base) >= 1


def test_phases_hold_every_meeting_once_and_no_result_twice():
    for s, xs, ws, ys in random_slides(600):
        found, results = [], []
        for p in phases(s, xs, ws, ys):
            results += [p.y.first + j * p.y.step for j in range(p.y.count)]
            for j, tap in itertools.product(range(p.y.count), range(p.w.count)):
                i = p.first + j * p.per_y + tap * p.per_w
                assert p.reach()[0] <= i < p.reach()[1]
                if xs[0] <= i < xs[1]:
                    found.append((i, p.w.first + tap * p.w.step, p.y.first + j * p.y.step))
        assert sorted(found) == meetings(s, xs, ws, ys)
        assert len(dict.fromkeys(results)) == len(results)
        assert all(ys[0] <= o < ys[1] for o in results)


def test_halos_hold_all_that_a_block_meets_and_are_tight():
    for s, _, ws, ys in random_slides(600):
        taps = ws[1] - ws[0]
        if not taps or ys[0] < 0 or ys[0] == ys[1]:
            continue
        low, high = s.halo(99, taps).range(*ys)
        met = [i for i, _, _ in meetings(s, (-90, 90), (0, taps), ys)]
        assert all(low <= i < high for i in met)
        if met and s.base == 1:
            assert (low, high) == (min(met), max(met) + 1)


# -- kernel ----------------------------------------------------------------------------------------


def reference(slides, types, blocks, arrays) -> np.ndarray:
    """The block of y from the blocks of a and b, by one einsum with 0/1 tensors of meetings."""
    operands, letters = [], {}
    for role, (t, block, array) in enumerate(zip(types, blocks, arrays, strict=False)):
        names = [next((f"{role}{k}" for k, s in enumerate(slides) if s[role] == n), n) for n in t.shape.names]
        operands += [held(array, block), [letters.setdefault(n, len(letters)) for n in names]]
    ranges = [dict(zip(t.shape.names, b, strict=True)) for t, b in zip(types, blocks, strict=True)]
    for k, s in enumerate(slides):
        spans = [ranges[role][s[role]] for role in range(3)]
        cube = np.zeros([b - a for a, b in spans])
        for at in meetings(s, *spans):
            if 0 <= at[0] < types[0].shape.dim(s.x).size:
                cube[tuple(i - a for i, (a, _) in zip(at, spans, strict=True))] = 1
        operands += [cube, [letters.setdefault(f"{role}{k}", len(letters)) for role in range(3)]]
    out = [
        next((letters[f"2{k}"] for k, s in enumerate(slides) if s.y == n), letters.get(n)) for n in types[2].shape.names
    ]
    return np.einsum(*operands, out, optimize=True)


def run(slides, a: LocalType, b: LocalType, y: LocalType, seed: int = 0) -> None:
    """Runs on every rank and compares."""
    rng, types = np.random.default_rng(seed), (a, b, y)
    instruction, program = one_instruction("conv", [a, b], [y], dims=tuple(slides))
    arrays = [
        rng.integers(-3, 4, t.shape.sizes) if t.dtype == "int32" else rng.normal(size=t.shape.sizes) for t in (a, b)
    ]
    arrays = [x.astype(numpy_dtype(t.dtype)) for x, t in zip(arrays, (a, b), strict=True)]
    for ran in run_all_ranks("conv", [a, b], [y], arrays, dims=tuple(slides)):
        at, out = ran.coordinates, ran.outputs[0]
        blocks = [t.block(MESH, at) for t in types]
        want = reference(slides, types, blocks, [x.astype(np.float64) for x in arrays])
        bound = BOUND[y.dtype] * max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=bound)
        counts = [len(meetings(s, *_spans(s, types, blocks))) for s in slides]
        flops = local_flops(instruction, program, at)
        assert flops == 2 * np.prod(counts, dtype=int) * _plain(slides, a, b, blocks)


def _spans(s: ConvDims, types, blocks):
    """Ranges of a slide's dims, without what a halo reaches beyond."""
    out = []
    for role, (t, block) in enumerate(zip(types, blocks, strict=True)):
        n = t.shape.dim(s[role]).size
        start, stop = block[t.shape.position(s[role])]
        out.append((max(0, start), min(n, stop)))
    return out


def _plain(slides, a: LocalType, b: LocalType, blocks) -> int:
    extents = {}
    for role, t in enumerate((a, b)):
        sliding = [s[role] for s in slides]
        for name, (start, stop) in zip(t.shape.names, blocks[role], strict=True):
            if name not in sliding:
                extents[name] = stop - start
    return int(np.prod(list(extents.values()), dtype=int))


def shuffled(rng: random.Random, dims) -> Shape:
    dims = list(dims)
    rng.shuffle(dims)
    return Shape(dims)


def random_convolution(rng: random.Random, dtype: str):
    """Slides and types of a convolution with any roles and orders of dims."""
    slides, dims = [], ([], [], [])
    for k in range(rng.choice([0, 1, 1, 2, 2, 3])):
        slide = ConvDims(
            f"h{k}",
            f"k{k}",
            rng.choice([f"h{k}", f"o{k}"]),
            rng.choice([1, 1, 2, 3, -1, -2]),
            rng.choice([1, 1, 2, 3, -1]),
            rng.randrange(-3, 5),
            rng.choice([1, 1, 1, 2, 3]),
        )
        slides.append(slide)
        for role, most in enumerate((8, 5, 8)):
            dims[role].append((slide[role], rng.randrange(1, most)))
    for name, roles in (("b", (0, 2)), ("c", (0, 1)), ("d", (0, 1, 2)), ("n", (1, 2))):
        size, used = rng.randrange(1, 5), rng.random() < (0.3 if name == "d" else 0.6)
        for role in roles if used else ():
            dims[role].append((name, size))
    shapes = [shuffled(rng, d) for d in dims]
    return slides, [LocalType(s, dtype, ((),) * len(s)) for s in shapes]


@pytest.mark.parametrize("elements", [3, 40, 1 << 18])
@pytest.mark.parametrize("dtype", BOUND)
def test_random_convolutions(library, dtype, elements, monkeypatch):
    monkeypatch.setattr(patches, "PATCH_ELEMENTS", elements)
    rng = random.Random(f"{dtype} {elements}")
    for n in range(25):
        monkeypatch.setattr(patches, "FEW_CHANNELS", rng.choice([1, 3, 8]))
        monkeypatch.setattr(patches, "POINTS", rng.choice([1, 7, 1 << 15]))
        slides, types = random_convolution(rng, dtype)
        run(slides, *types, seed=n)


SAME = [ConvDims("h", "p", "h", before=1), ConvDims("w", "q", "w", stride=2, before=1)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_blocks_in_all_dims(dtype):
    """Batch, channels and the dims that slide split; some blocks are empty."""
    a = local_type("b:1;h:5;w:9;c:4", dtype, b="rows", c="cols")
    y = local_type("b:1;h:5;w:5;d:3", dtype, b="rows")
    run(SAME, a, local_type("p:3;q:3;c:4;d:3", dtype, c="cols"), y)
    a, b = local_type("h:5;w:9;c:2", dtype), local_type("p:3;q:3;c:2", dtype)
    run(SAME, a, b, local_type("h:5;w:5;c:2", dtype, h="rows", w="cols"))
    run(SAME, a, b, local_type("h:5;w:5", dtype, h="cols+rows"))
    split = local_type("p:3;q:3;c:2", dtype, p="rows", q="cols")
    run(SAME, a, split, local_type("h:5;w:5", dtype))
    run(SAME, local_type("h:5;w:9;c:2", dtype, h="cols", w="rows"), b, local_type("h:5;w:5", dtype))


@pytest.mark.parametrize("size", [5, 12])
def test_halos_of_both_dims(size):
    """x is held with the halos of y's blocks; a block of y at the border reaches beyond x."""
    a = local_type(f"h:{size};w:9;c:2", "float64", h="rows", w="cols")
    b, y = local_type("p:3;q:3;c:2;d:3", "float64"), local_type(f"h:{size};w:5;d:3", "float64", h="rows", w="cols")
    halos = (SAME[0].halo(size, 3), SAME[1].halo(5, 3), None)
    run(SAME, LocalType(a.shape, a.dtype, a.splits, halos=halos), b, y)


def test_halo_of_the_input_in_the_gradient_of_the_filter():
    slides = [SAME[1].of_filter()]
    a = local_type("w:9;c:2", "float64", w="cols")
    with_halo = LocalType(a.shape, a.dtype, a.splits, halos=(SAME[1].halo(5, 3), None))
    dy = local_type("w:5;d:3", "float64", w="cols")
    run(slides, with_halo, dy, local_type("q:3;c:2;d:3", "float64"))


def test_the_type_rule():
    """Which splits are legal, and what is pending after them."""

    def result(y: LocalType, a: LocalType, b: LocalType, slides=SAME):
        _, program = one_instruction("conv", [a, b], [y], dims=tuple(slides))
        feeds = [
            i for v in (0, 1) for i in [program.instructions[0].replaced(inputs=(), outputs=(v,), attrs=Feed(str(v)))]
        ]
        from dataclasses import replace

        types = {str(v): replace(program.types[v], halos=()) for v in (0, 1)}
        program = replace(program, feeds=types, instructions=(*feeds, *program.instructions))
        verify(program)

    a, b = local_type("h:5;w:9;c:4"), local_type("p:3;q:3;c:4;d:3")
    result(local_type("h:5;w:5;d:3"), a, b)
    result(local_type("h:5;w:5;d:3", h="rows", w="cols"), a, b)
    partial = LocalType(Shape("h:5;w:5;d:3"), "float32", ((), (), ()), ("rows",))
    result(partial, local_type("h:5;w:9;c:4", h="rows"), b)
    result(partial, a, local_type("p:3;q:3;c:4;d:3", p="rows"))
    result(partial, local_type("h:5;w:9;c:4", c="rows"), local_type("p:3;q:3;c:4;d:3", c="rows"))
    for broken in (
        (local_type("h:5;w:5;d:3"), local_type("h:5;w:9;c:4", h="rows"), b),
        (local_type("h:5;w:5;d:3", h="rows"), local_type("h:5;w:9;c:4", h="rows"), b),
        (local_type("h:5;w:5;d:3", h="rows"), local_type("h:5;w:9;c:4", c="rows"), b),
        (local_type("h:5;w:5;d:3", h="rows", w="rows"), a, b),
        (local_type("h:5;w:5;d:3", d="rows"), a, b),
        (local_type("h:5;w:5;d:3", dtype="float64"), a, b),
    ):
        with pytest.raises(ProgramError):
            result(*broken)
