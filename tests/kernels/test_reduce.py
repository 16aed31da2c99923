"""reduce against NumPy in float64, empty blocks, accuracy of long sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshmpi.errors import ProgramError
from meshmpi.kernels import reduction
from tests.kernels.build import MESH, TOLERANCE, check, local_type, mixed, rounded, run

SIZES = {"b": 5, "l": 4, "h": 3, "d": 7}
ORACLE = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
NAMES = tuple(SIZES)
KEPT = [k for r in range(5) for k in itertools.permutations(NAMES, r) if r < 3 or k == tuple(sorted(k))]


def of(names, dtype: str, **splits: str):
    held = {n: a for n, a in splits.items() if n in names}
    return local_type(";".join(f"{n}:{SIZES[n]}" for n in names), dtype, **held)


def expected(x: np.ndarray, kept, op: str) -> np.ndarray:
    gone = tuple(k for k, n in enumerate(NAMES) if n not in kept)
    left = [n for n in NAMES if n in kept]
    return ORACLE[op](x, axis=gone).transpose([left.index(n) for n in kept])


@pytest.mark.parametrize("op", ORACLE)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_reduce_to_every_set_of_dims(op: str, dtype: str):
    x = rounded(np.sign(mixed(*SIZES.values())) * (0.7 + np.abs(mixed(*SIZES.values()) / 10)), dtype)
    for kept in KEPT:
        want = expected(x, kept, op)
        bound = TOLERANCE[dtype] * (10 if op == "prod" else 3)
        if op == "prod":
            bound *= max(1.0, float(np.abs(want).max()))
        splits = {"b": "rows", "d": "cols"}
        kept_splits = {n: a for n, a in splits.items() if n in kept}
        check(
            "reduce",
            [of(NAMES, dtype, **kept_splits)],
            [of(kept, dtype, **kept_splits)],
            [x],
            [want],
            op=op,
            tolerance=bound,
        )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("op", ORACLE)
def test_integers(op: str, dtype: str):
    x = np.abs(np.rint(mixed(*SIZES.values()))).astype(dtype)
    for kept in KEPT[:20]:
        gone = tuple(k for k, n in enumerate(NAMES) if n not in kept)
        left = [n for n in NAMES if n in kept]
        options = {"dtype": dtype} if op in ("sum", "prod") else {}
        want = ORACLE[op](x, axis=gone, **options).transpose([left.index(n) for n in kept])
        check("reduce", [of(NAMES, dtype)], [of(kept, dtype)], [x], [want], op=op)


def test_bool():
    x = mixed(*SIZES.values()) > 2
    for op, oracle in (("max", np.any), ("min", np.all), ("prod", np.all)):
        check("reduce", [of(NAMES, "bool")], [of(("d",), "bool")], [x], [oracle(x, axis=(0, 1, 2))], op=op)
    with pytest.raises(ProgramError, match="Count with a cast"):
        list(run("reduce", [of(NAMES, "bool")], [of(("d",), "bool")], [x], op="sum"))


IDENTITY = {
    ("sum", "float32"): 0,
    ("prod", "float32"): 1,
    ("max", "float32"): -math.inf,
    ("min", "bfloat16"): math.inf,
    ("max", "int32"): -(2**31),
    ("min", "int64"): 2**63 - 1,
    ("max", "uint8"): 0,
    ("min", "uint8"): 255,
    ("max", "bool"): 0,
    ("min", "bool"): 1,
}


@pytest.mark.parametrize(("op", "dtype"), IDENTITY)
def test_empty_blocks_give_the_identity(op: str, dtype: str):
    x = local_type("b:2;d:4", dtype, b="cols")  # the third column of ranks holds nothing
    values = np.ones((2, 4))
    for ran in run("reduce", [x], [local_type("d:4", dtype)], [values], op=op):
        empty = ran.coordinates["cols"] == 2
        want = np.array(IDENTITY[op, dtype] if empty else 1).astype(ran.outputs[0].dtype)
        assert (ran.outputs[0] == want).all()


@pytest.mark.parametrize("shape", [(40000, 3), (3, 40000), (200, 200, 3), (3, 200, 200)])
def test_long_sums_are_accurate(shape):
    """An error that grows with the number of terms would be 100 times the bound."""
    x = np.random.default_rng(0).random(shape).astype(np.float32)
    names = "abc"[: len(shape)]
    t = local_type(";".join(f"{n}:{s}" for n, s in zip(names, shape, strict=True)))
    axis = shape.index(3)
    out = local_type(f"{names[axis]}:3")
    gone = tuple(k for k in range(len(shape)) if k != axis)
    want = x.astype(np.float64).sum(axis=gone)
    for ran in itertools.islice(run("reduce", [t], [out], [x], op="sum"), 1):
        assert (np.abs(ran.outputs[0] - want) / want).max() < 3e-6


def test_bfloat16_in_pieces(monkeypatch):
    monkeypatch.setattr(reduction, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(reduction, "SMALL_CHUNK", 100)
    monkeypatch.setattr(reduction, "LONG_SUM", 2)
    for dtype in ("bfloat16", "float32"):
        x = rounded(mixed(*SIZES.values()), dtype)
        for op in ("sum", "max"):
            for kept in KEPT:
                want = expected(x, kept, op)
                check(
                    "reduce", [of(NAMES, dtype)], [of(kept, dtype)], [x], [want], op=op, tolerance=TOLERANCE[dtype] * 3
                )


def test_sums_of_bfloat16_are_accumulated_in_float32():
    t, out = local_type("n:3000", "bfloat16"), local_type("", "bfloat16")
    ran = next(run("reduce", [t], [out], [np.ones(3000)], op="sum"))
    assert float(ran.outputs[0]) == 3008  # 3000 rounded to 8 bits; bfloat16 sums stop at 256
    assert MESH.size == 6


def test_nan_wins():
    x = np.array([[1.0, np.nan, 3.0]])
    for op in ("max", "min", "sum"):
        for dtype in ("float32", "bfloat16"):
            t = local_type("a:1;n:3", dtype)
            ran = next(run("reduce", [t], [local_type("a:1", dtype)], [x], op=op))
            assert np.isnan(float(ran.outputs[0][0]))
