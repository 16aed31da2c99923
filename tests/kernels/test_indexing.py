"""gather, scatter_add and top_k against plain NumPy loops."""

from __future__ import annotations

import numpy as np
import pytest

from meshmpi.kernels import indexing, ranking
from tests.kernels.build import MESH, TOLERANCE, check, local_type, mixed, rounded, run

VOCAB, D, B, L = 11, 6, 4, 5
INDEX = np.random.default_rng(0).integers(-2, VOCAB + 2, (B, L))
DTYPES = ["float32", "float64", "bfloat16", "int32"]


def one_hot() -> np.ndarray:
    return INDEX[..., None] == np.arange(VOCAB)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [{}, {"v": "rows"}, {"v": "cols+rows"}])
@pytest.mark.parametrize("table", ["vd", "dv"])
@pytest.mark.parametrize("out", ["bld", "dbl", "lbd", "bdl"])
def test_gather(dtype: str, split, table: str, out: str, index_dtype: str):
    sizes = {"v": VOCAB, "d": D, "b": B, "l": L}
    x = rounded(np.rint(mixed(VOCAB, D)), dtype if dtype in TOLERANCE else "float64")
    shape = {n: f"{n}:{sizes[n]}" for n in sizes}
    t = local_type(";".join(shape[n] for n in table), dtype, **split)
    index = local_type("b:4;l:5", index_dtype)
    y = local_type(";".join(shape[n] for n in out), dtype)
    array = x if table == "vd" else x.T
    for ran in run("gather", [t, index], [y], [array, INDEX], dim="v"):
        (start, stop) = t.block(MESH, ran.coordinates)[table.index("v")]
        own = (one_hot()[..., start:stop, None] * x[start:stop]).sum(2)
        want = own.transpose(["bld".index(n) for n in out])
        np.testing.assert_array_equal(ran.outputs[0].astype(float), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [{}, {"v": "rows"}, {"v": "cols+rows"}])
@pytest.mark.parametrize("updates", ["bld", "dbl", "lbd"])
@pytest.mark.parametrize("out", ["vd", "dv"])
@pytest.mark.parametrize("piece", [12, 1 << 16])
def test_scatter_add(dtype: str, split, updates: str, out: str, piece: int, monkeypatch):
    monkeypatch.setattr(indexing, "PIECE_ELEMENTS", piece)
    sizes = {"v": VOCAB, "d": D, "b": B, "l": L}
    x = rounded(np.rint(mixed(B, L, D) * 3), dtype if dtype in TOLERANCE else "float64")
    shape = {n: f"{n}:{sizes[n]}" for n in sizes}
    t = local_type(";".join(shape[n] for n in updates), dtype)
    y = local_type(";".join(shape[n] for n in out), dtype, **split)
    array = x.transpose(["bld".index(n) for n in updates])
    whole = np.einsum("blv,bld->vd", one_hot().astype(float), x)
    want = whole if out == "vd" else whole.T
    types = [t, local_type("b:4;l:5", "int32")]
    check("scatter_add", types, [y], [array, INDEX], [want], dim="v")


def test_scatter_add_without_rest_and_all_in_one_row():
    updates, index = mixed(20), np.full(20, 3)
    types = [local_type("n:20"), local_type("n:20", "int32")]
    want = np.zeros(8)
    want[3] = updates.sum()
    check("scatter_add", types, [local_type("v:8")], [updates, index], [want], dim="v")
    types = [local_type("n:20", "bfloat16"), local_type("n:20", "int32")]
    ones = np.ones(20) * 16.125
    want[3] = rounded(rounded(ones, "bfloat16").sum(), "bfloat16")
    out = [local_type("v:8", "bfloat16")]
    check("scatter_add", types, out, [ones, index], [want], dim="v")


def test_empty_blocks():
    table = local_type("v:2;d:3", v="cols")  # one column of ranks has no rows
    x, index = mixed(2, 3).astype(np.float32), np.array([0, 1, 1, 0])
    for ran in run("gather", [table, local_type("n:4", "int32")], [local_type("n:4;d:3")], [x, index], dim="v"):
        own = np.arange(2) == ran.coordinates["cols"]
        np.testing.assert_array_equal(ran.outputs[0], (x * own[:, None])[index])
    one = local_type("n:1", "int32", n="rows")
    for ran in run(
        "scatter_add", [local_type("n:1;d:3", n="rows"), one], [local_type("v:2;d:3")], [x[:1], index[:1]], dim="v"
    ):
        want = np.zeros((2, 3)) if ran.coordinates["rows"] else np.stack([x[0], 0 * x[0]])
        np.testing.assert_array_equal(ran.outputs[0], want)


def top_k_oracle(x: np.ndarray, k: int) -> np.ndarray:
    """Indices along the last axis by Python's stable sort; NaN first."""

    def order(row):
        key = [(-np.inf, 0) if np.isnan(v) else (0, -float(v)) for v in row]
        return sorted(range(len(row)), key=lambda i: (key[i], i))[:k]

    return np.array([order(r) for r in x.reshape(-1, x.shape[-1])]).reshape(*x.shape[:-1], k)


@pytest.mark.parametrize("dtype", [*DTYPES, "int64", "uint8", "bool"])
@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("piece", [20, 1 << 16])
def test_top_k(dtype: str, k: int, position: int, piece: int, monkeypatch):
    monkeypatch.setattr(ranking, "PIECE_ELEMENTS", piece)
    x = np.rint(mixed(4, 3, 9) * 2)  # many ties
    x = np.abs(x) if dtype == "uint8" else x > 1 if dtype == "bool" else x
    at = top_k_oracle(x, k)
    want = np.take_along_axis(x, at, -1)
    names = ["b:4", "l:3", "e:9"]
    order = [0, 1]
    order.insert(position, 2)
    source = local_type(";".join(names[i] for i in order), dtype, b="rows", l="cols")
    outs = [local_type(f"k:{k};b:4;l:3", d, b="rows", l="cols") for d in (dtype, "int32")]
    expected = [want.transpose(2, 0, 1), at.transpose(2, 0, 1)]
    check("top_k", [source], outs, [x.transpose(order)], expected, dim="e", k="k")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_top_k_of_special_values(dtype: str):
    x = np.array([-0.0, 0.0, np.inf, np.nan, -np.inf, 1.0, np.nan, -1.0, 1e-30, -np.inf])
    types = [local_type("e:10", dtype)], [local_type("k:10", d) for d in (dtype, "int32")]
    at = np.array([3, 6, 2, 5, 8, 0, 1, 7, 4, 9])
    check("top_k", *types, [x], [x[at], at], dim="e", k="k")


def test_top_k_of_a_vector_and_of_empty_rows():
    x = mixed(9)
    at = top_k_oracle(x, 2)
    check(
        "top_k", [local_type("e:9")], [local_type("k:2"), local_type("k:2", "int32")], [x], [x[at], at], dim="e", k="k"
    )
    source = local_type("b:1;e:9", b="rows")
    outs = [local_type("b:1;k:2", d, b="rows") for d in ("float32", "int32")]
    check("top_k", [source], outs, [x[None]], [x[at][None], at[None]], dim="e", k="k")
