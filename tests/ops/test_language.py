"""What indexing, scans and ranking send, beyond their values in the table."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.kernels.native import available


def _plan(outputs: list[mm.Tensor], mesh: str, layout: str) -> mm.Plan:
    return mm.plan(outputs[0].graph, mesh, layout, fetches=outputs)


def test_cumsum_along_a_split_dim_sends_the_sums_of_blocks_only():
    with mm.Graph():
        y = mm.cumsum(mm.placeholder("x", "a:6;n:1000"), "n")
    plan = _plan([y], "r:4", "n:r")
    assert plan.program.values() == {"all_gather": {"r": 6}}
    assert plan.cost.bytes_sent == 3 * 6 * 4  # to each of three others, one sum a row
    assert _plan([y], "r:4", "a:r").cost.bytes_sent == 0


def test_top_k_along_a_split_dim_sends_candidates_only():
    with mm.Graph():
        x = mm.placeholder("x", "a:6;n:1000")
        values, index = mm.top_k(x, "n", mm.Dimension("k", 3))
    plan = _plan([values, index], "r:4", "n:r")
    assert plan.program.counts()["top_k"] == 2
    assert plan.program.values() == {"all_gather": {"r": 2 * 6 * 3}}
    whole = mm.Dimension("k", 250)  # four ranks have 250 each: no fewer candidates than elements
    with mm.Graph():
        values, index = mm.top_k(mm.placeholder("x", "a:6;n:1000"), "n", whole)
    plan = _plan([values, index], "r:4", "n:r")
    assert plan.program.counts()["top_k"] == 1
    assert plan.program.values() == {"all_gather": {"r": 6 * 250}}


def test_batches_split_alike_send_nothing():
    with mm.Graph():
        table, index = mm.placeholder("t", "a:8;n:50"), mm.placeholder("i", "a:8;k:3", "int32")
        y = mm.gather(table, index, "n")
        (g,) = mm.gradients(mm.reduce_sum(mm.square(y)), [table])
        assert g is not None
    plan = _plan([y, g], "r:4", "a:r")
    assert plan.cost.bytes_sent == 0
    assert plan.program.counts()["scatter_add"] == 1
    split_table = _plan([y], "r:4", "n:r")
    assert list(split_table.program.values()) == ["all_reduce"]


@pytest.mark.skipif(not available(), reason="there is no C compiler")
def test_native_scatter_add_in_batches_equals_numpy():
    rng = np.random.default_rng(0)
    for batches, width in ((3, 1), (1, 5), (700, 3)):
        rest = [("w", width)] if width > 1 else []
        with mm.Graph() as graph:
            rows = [("a", batches), ("i", 40), *rest]
            updates = mm.placeholder("u", rows)
            index = mm.placeholder("i", rows[:2], "int32")
            out = [("a", batches), ("c", 9), *rest]
            y = mm.scatter_add(updates, index, mm.Dimension("c", 9), out)
        feeds = {
            "u": rng.normal(size=[n for _, n in rows]).astype(np.float32),
            "i": rng.integers(-1, 10, (batches, 40)),
        }
        for layout in ("", "a:r", "c:r"):
            got = [
                mm.compile(graph, mm.SimulatedMesh("r:3"), layout, fetches=[y], kernels=kernels)(feeds)[y].numpy()
                for kernels in ("numpy", "native")
            ]
            np.testing.assert_allclose(*got, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not available(), reason="there is no C compiler")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("smallest", [False, True])
def test_native_top_k_equals_numpy(dtype: str, smallest: bool):
    rng = np.random.default_rng(0)
    for rows, length, k in ((1, 7, 7), (3, 40, 5), (2, 40000, 20)):
        x = rng.integers(-9, 9, (rows, length)).astype(dtype)  # many ties
        if dtype != "int32":
            x[:, ::3] += rng.normal(size=x[:, ::3].shape).astype(dtype)
            x[0, 1:5] = [np.nan, -0.0, np.inf, -np.inf]
        with mm.Graph() as graph:
            fed = mm.placeholder("x", [("row", rows), ("a", length)], dtype)
            outs = mm.top_k(fed, "a", mm.Dimension("k", k), smallest)
        for layout in ("", "a:r"):
            got = []
            for kernels in ("native", "numpy"):
                step = mm.compile(graph, mm.SimulatedMesh("r:3"), layout, fetches=outs, kernels=kernels)
                found = step(x=x)
                got.append([found[t].numpy() for t in outs])
            np.testing.assert_array_equal(got[0][0], got[1][0])
            np.testing.assert_array_equal(got[0][1], got[1][1])
