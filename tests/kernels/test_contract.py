"""contract against einsum in float64: every order of dims, splits, dtypes, edge cases.

Every library of matrix products that is installed has its turn.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshmpi.errors import ConfigError, ProgramError
from meshmpi.kernels import blas, contraction
from tests.kernels.build import MESH, TOLERANCE, check, local_type, mixed, rounded, run

SIZES = {"b": 3, "l": 5, "m": 4, "h": 2, "k": 7, "d": 6, "f": 8, "o": 1}
SPLITS = {"b": "rows", "h": "cols", "f": "cols"}

CASES = [
    ("b l d", "d h k", "b l h k"),
    ("b l d", "d h k", "b h l k"),
    ("b l h k", "b m h k", "b h l m"),
    ("b h l m", "b m h k", "b l h k"),
    ("b h l m", "b m h k", "h k b l"),
    ("b l d", "b l f", "d f"),
    ("b l d", "b l f", "f d"),
    ("b l f", "f d", "b l d"),
    ("b l d", "f d", "l b f"),
    ("b l h k", "h k d", "b l d"),
    ("b l h k", "b l d", "h k d"),
    ("d l b", "b f", "l f d"),
    ("l", "l", ""),
    ("b l d", "b l d", ""),
    ("b l d", "d l b", ""),
    ("b l d", "b l d", "d"),
    ("b l d", "b l d", "b l"),
    ("b l d", "d", "b l"),
    ("d", "b l d", "l b"),
    ("b l", "b l d", "d"),
    ("b", "d", "b d"),
    ("b", "d", "d b"),
    ("b l", "l d", "d b l"),
    ("b l", "b l", "l b"),
    ("b", "", "b"),
    ("", "", ""),
    ("o", "o", ""),
    ("b o l", "l o f", "b f"),
    ("b o l", "l f", "b f o"),
    ("b o", "o f", "f b"),
    ("b l h", "h m b", "l b m"),
    ("b l f", "b f", "b l"),
]


@pytest.fixture(params=(*blas.NAMES, *blas.EXTENDED))
def library(request, monkeypatch) -> str:
    """Each library in turn, bound even where products are too small to be worth it."""
    try:
        blas.find(request.param)
    except ConfigError:
        pytest.skip(f"the library '{request.param}' is not installed")
    monkeypatch.setenv(blas.VARIABLE, request.param)
    monkeypatch.setattr(blas, "SMALL_PRODUCT", 0)
    return request.param


def of(names: str, dtype: str, sizes: dict):
    held = {**SIZES, **sizes}
    shape = ";".join(f"{n}:{held[n]}" for n in names.split())
    splits = {n: a for n, a in SPLITS.items() if n in names.split()}
    if "h" in splits and "f" in splits:
        splits.pop("f")
    return local_type(shape, dtype, **splits)


def data(names: str, seed: int, sizes: dict) -> np.ndarray:
    held = {**SIZES, **sizes}
    return mixed(*[held[n] for n in names.split()], seed=seed)


def run_case(a: str, b: str, y: str, dtype: str, out: str | None = None, **changed: int) -> None:
    sizes = {name[-1]: n for name, n in changed.items()}
    x1, x2 = rounded(data(a, 0, sizes), dtype), rounded(data(b, 1, sizes), dtype)
    types = [of(a, dtype, sizes), of(b, dtype, sizes)]
    result = of(y, out or dtype, sizes)
    bound = TOLERANCE[out or dtype] * 10
    for ran in run("contract", types, [result], [x1, x2]):
        blocks = [
            {n: slice(*r) for n, r in zip(t.shape.names, t.block(MESH, ran.coordinates), strict=True)} for t in types
        ]
        own = {**blocks[0], **blocks[1]}
        part1 = x1[tuple(own[n] for n in a.split())]
        part2 = x2[tuple(own[n] for n in b.split())]
        want = np.einsum(f"{a},{b}->{y}".replace(" ", ""), part1, part2)
        got = ran.outputs[0].astype(np.float64)
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("a", "b", "y"), CASES)
def test_contract(a: str, b: str, y: str, dtype: str, library: str):
    run_case(a, b, y, dtype)
    run_case(b, a, y, dtype)


@pytest.mark.parametrize("names", list(itertools.permutations("blhk")))
def test_every_order_of_the_result(names):
    run_case("b l d", "d h k", " ".join(names), "float64")


@pytest.mark.parametrize("order", list(itertools.permutations("blhk")))
def test_every_order_of_an_operand(order):
    run_case(" ".join(order), "b m h k", "b h l m", "float64")


@pytest.mark.parametrize("constants", [(1e9, 1.0), (0.0, 1e9)])
def test_looping_and_copying_give_the_same(constants, monkeypatch):
    """Made dear, copies give way to loops over single dims; made free, loops to copies."""
    monkeypatch.setattr(contraction, "COPY_NS", constants[0])
    monkeypatch.setattr(contraction, "CALL_NS", constants[1])
    for a, b, y in CASES:
        run_case(a, b, y, "float64")
        run_case(b, a, y, "float64")
    for names in itertools.permutations("blhk"):
        run_case("b l d", "d h k", " ".join(names), "float64")
        run_case("d h k", "b l d", " ".join(names), "float64")
        run_case(" ".join(names), "b m h k", "b h l m", "float64")


@pytest.mark.parametrize(("a", "b", "y"), CASES[:6])
def test_bfloat16_with_float32_result(a: str, b: str, y: str, library: str):
    run_case(a, b, y, "bfloat16", out="float32")


def test_bfloat16_in_slabs(monkeypatch, library: str):
    monkeypatch.setattr(contraction, "SLAB_ELEMENTS", 20)
    for a, b, y in CASES:
        run_case(a, b, y, "bfloat16")
        run_case(a, b, y, "bfloat16", size_l=1, size_b=6)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize(("a", "b", "y"), [c for c in CASES if c[2]])
def test_integers(a: str, b: str, y: str, dtype: str):
    values = [np.abs(np.rint(data(n, k, {}))) for k, n in enumerate((a, b))]
    names = [{n: SIZES[n] for n in s.split()} for s in (a, b, y)]
    types = [local_type(";".join(f"{n}:{s}" for n, s in d.items()), dtype) for d in names]
    values = [v > 1 for v in values] if dtype == "bool" else values
    want = np.einsum(f"{a},{b}->{y}".replace(" ", ""), *[v.astype(int) for v in values])
    want = want > 0 if dtype == "bool" else want
    check("contract", types[:2], types[2:], values, [want])


def test_empty_blocks_give_zeros(library: str):
    a = local_type("b:4;k:2", k="cols")  # the third column of ranks holds no k
    b = local_type("k:2;n:3", k="cols")
    y = local_type("b:4;n:3")
    x1, x2 = mixed(4, 2), mixed(2, 3, seed=1)
    for ran in run("contract", [a, b], [y], [x1, x2]):
        column = ran.coordinates["cols"]
        want = x1[:, column : column + 1] @ x2[column : column + 1]
        np.testing.assert_allclose(ran.outputs[0], want, rtol=1e-6)
    empty = local_type("b:1;n:3", b="rows")
    for ran in run("contract", [local_type("b:1;k:2", b="rows"), local_type("k:2;n:3")], [empty], [x1[:1], x2]):
        assert ran.outputs[0].shape[0] == (ran.coordinates["rows"] == 0)


def test_nan_and_infinity_are_not_skipped(library: str):
    x1, x2 = np.zeros((4, 6)), mixed(6, 3)
    x2[2, 1], x2[3, 2] = np.nan, np.inf
    for dtype in ("float32", "bfloat16", "float64"):
        types = [local_type("b:4;k:6", dtype), local_type("k:6;n:3", dtype)]
        for ran in run("contract", types, [local_type("b:4;n:3", dtype)], [x1, x2]):
            assert np.isnan(ran.outputs[0][:, 1:].astype(float)).all()
            assert (ran.outputs[0][:, 0] == 0).all()


def test_dims_of_one_operand_must_be_summed_before():
    with pytest.raises(ProgramError, match="only one operand has them"):
        run_case("b l d", "d", "b", "float32")


HOT = [
    ("b l d", "d h k", "b l h k"),
    ("b l h k", "b m h k", "b h l m"),
    ("b h l m", "b m h k", "b l h k"),
    ("b l d", "b l f", "d f"),
    ("b l d", "d f", "b l f"),
    ("b l f", "d f", "b l d"),
    ("b l h k", "d h k", "b l d"),
]


@pytest.mark.parametrize(("a", "b", "y"), HOT)
def test_hot_shapes_need_no_copies(a: str, b: str, y: str):
    from meshmpi.kernels import workspace_bytes
    from tests.kernels.build import one_instruction

    sizes = {"b": 4, "l": 128, "m": 128, "h": 8, "k": 64, "d": 256, "f": 512}
    types = [local_type(";".join(f"{n}:{sizes[n]}" for n in s.split())) for s in (a, b, y)]
    instruction, program = one_instruction("contract", types[:2], types[2:])
    assert workspace_bytes(instruction, program, {"rows": 0, "cols": 0}) == 0
