"""Kinds that move elements, against NumPy indexing on the global array."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshmpi.errors import ProgramError
from tests.kernels.build import MESH, check, local_type, mixed, run

DTYPES = ["float32", "float64", "bfloat16", "int32", "bool"]
X = np.rint(mixed(5, 4, 7))
SPLITS = {"b": "rows", "d": "cols"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_transpose(dtype: str, order):
    x = X > 0 if dtype == "bool" else X
    dims = ["b:5", "l:4", "d:7"]
    out = local_type(";".join(dims[k] for k in order), dtype, **SPLITS)
    source = local_type("b:5;l:4;d:7", dtype, **SPLITS)
    check("transpose", [source], [out], [x], [x.transpose(order)])


def test_view():
    source = local_type("b:6;l:4;d:7", b="rows")
    x = mixed(6, 4, 7)
    check("view", [source], [local_type("c:6;m:28", c="rows")], [x], [x.reshape(6, 28)])
    check("view", [local_type("o:1")], [local_type("")], [np.array([3.0])], [np.array(3.0)])
    with pytest.raises(ProgramError, match="differ in size"):
        list(run("view", [source], [local_type("c:6;m:28", c="cols")], [x]))


@pytest.mark.parametrize("cut", [(0, 4, 1), (1, 3, 1), (0, 4, 3), (1, 4, 2), (3, 4, 1)])
def test_slice(cut):
    start, stop, stride = cut
    want = X[:, start:stop:stride]
    source = local_type("b:5;l:4;d:7", **SPLITS)
    out = local_type(f"b:5;l:{want.shape[1]};d:7", **SPLITS)
    check("slice", [source], [out], [X], [want], dim="l", start=start, stop=stop, stride=stride)


@pytest.mark.parametrize("widths", [(1, 2), (0, 3), (2, 0), (-1, 2), (2, -1), (-1, -2), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pad(widths, dtype: str):
    before, after = widths
    x = X > 0 if dtype == "bool" else X
    value = True if dtype == "bool" else 3
    kept = x[:, max(0, -before) : x.shape[1] - max(0, -after)]
    want = np.pad(kept, ((0, 0), (max(0, before), max(0, after)), (0, 0)), constant_values=value)
    source = local_type("b:5;l:4;d:7", dtype, **SPLITS)
    out = local_type(f"b:5;l:{want.shape[1]};d:7", dtype, **SPLITS)
    check("pad", [source], [out], [x], [want], dim="l", before=before, after=after, value=value)


def test_concat():
    parts = [mixed(5, n, 7, seed=n) for n in (1, 4, 2)]
    types = [local_type(f"b:5;l:{n};d:7", **SPLITS) for n in (1, 4, 2)]
    out = local_type("b:5;l:7;d:7", **SPLITS)
    check("concat", types, [out], parts, [np.concatenate(parts, 1)], dim="l")


@pytest.mark.parametrize(
    ("old", "new", "dim"),
    [
        ({}, {"b": "rows"}, "b"),
        ({}, {"d": "cols"}, "d"),
        ({}, {"b": "rows+cols"}, "b"),
        ({"b": "rows"}, {"b": "rows+cols"}, "b"),
        ({"d": "cols"}, {"b": "rows", "d": "cols"}, "b"),
        ({"b": "cols"}, {"b": "cols+rows"}, "b"),
    ],
)
def test_take_shard(old, new, dim: str):
    x = mixed(12, 4, 7)
    types = [local_type("b:12;l:4;d:7", **s) for s in (old, new)]
    for ran in run("take_shard", types[:1], types[1:], [x], dim=dim, axes=()):
        np.testing.assert_array_equal(ran.outputs[0], x[ran.blocks[0]].astype(np.float32))


def test_take_shard_of_few_elements():
    x = mixed(2, 3)
    types = local_type("b:2;d:3"), local_type("b:2;d:3", b="rows+cols")
    check("take_shard", types[:1], types[1:], [x], [x.astype(np.float32)], dim="b", axes=("rows", "cols"))


def test_take_shard_across_the_own_block_is_refused():
    types = local_type("b:8", b="rows"), local_type("b:8", b="rows+cols")
    with pytest.raises(ProgramError, match="is not inside the own block"):
        list(run("take_shard", types[:1], types[1:], [mixed(8)], dim="b", axes=("cols",)))


@pytest.mark.parametrize("axes", ["rows", "cols", "cols+rows", "rows+cols"])
def test_iota_is_global(axes: str):
    check("iota", [], [local_type("l:7", "int32", l=axes)], [], [np.arange(7)], dim="l")
    check("iota", [], [local_type("l:2", "int32", l=axes)], [], [np.arange(2)], dim="l")


def test_step_is_read_when_called():
    for step in (0, 7):
        check("step", [], [local_type("", "int32")], [], [np.array(step)], step=step)


def test_empty_blocks():
    x = mixed(1, 3)
    source = local_type("b:1;d:3", b="rows")
    assert MESH.axis_size("rows") == 2
    x = x.astype(np.float32)
    outs = {n: [local_type(f"b:1;d:{n}", b="rows")] for n in (5, 6)}
    check("transpose", [source], [local_type("d:3;b:1", b="rows")], [x], [x.T])
    check("concat", [source, source], outs[6], [x, x], [np.concatenate([x, x], 1)], dim="d")
    padded = np.pad(x, ((0, 0), (1, 1)))
    check("pad", [source], outs[5], [x], [padded], dim="d", before=1, after=1, value=0)
