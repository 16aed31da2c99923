"""cumsum, block_sum and top_k with an index against plain NumPy, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.build import MESH, check, local_type, mixed, rounded, run

DTYPES = ["float32", "float64", "bfloat16", "int32", "int64", "uint8"]
SPLITS = [{}, {"e": "rows"}, {"e": "cols+rows"}, {"e": "rows", "b": "cols"}]


def _whole_numbers(dtype: str) -> np.ndarray:
    x = np.rint(mixed(4, 7, 3) * 3)
    return np.abs(x) if dtype == "uint8" else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(dtype: str, split, position: int, exclusive: bool, reverse: bool):
    x = _whole_numbers(dtype)  # [b, e, l]
    order = [0, 2]
    order.insert(position, 1)
    names = ["b:4", "e:7", "l:3"]
    source = local_type(";".join(names[i] for i in order), dtype, **split)
    want = np.flip(np.cumsum(np.flip(x, 1), 1), 1) if reverse else np.cumsum(x, 1)
    want = (want - x if exclusive else want).transpose(order)
    types, arrays = [source], [x.transpose(order)]
    attrs = {"dim": "e", "exclusive": exclusive, "reverse": reverse}
    if "e" in split:
        ranks = MESH.count(tuple(split["e"].split("+")))
        starts = [min(k * (7 // ranks) + min(k, 7 % ranks), 7) for k in range(ranks)]
        sums = np.stack([part.sum(1) for part in np.split(x, starts[1:], axis=1)], axis=1).transpose(order)
        sizes = dict(names[i].split(":") for i in order) | {"e": str(ranks)}
        blocks = ";".join(f"{'r' if n == 'e' else n}:{size}" for n, size in sizes.items())
        kept = {n: axes for n, axes in split.items() if n != "e"}
        wide = "float32" if dtype == "bfloat16" else dtype
        types.append(local_type(blocks, wide, **kept))
        arrays.append(sums)
        attrs["blocks"] = "r"
        block_types = [local_type(blocks, wide, **kept, r=split["e"])]
        check("block_sum", [source], block_types, arrays[:1], [sums], dim="e", blocks="r")
    check("cumsum", types, [source], arrays, [want], **attrs)


def test_sums_over_bfloat16_are_formed_in_float32():
    x = np.full(64, 1.0078125)  # 1 + 2**-7: a sum in bfloat16 would stop growing
    types = [local_type("e:64", "bfloat16")]
    for ran in run("cumsum", types, types, [x], dim="e", exclusive=False, reverse=False):
        wanted = rounded(np.cumsum(x), "bfloat16").astype(float)
        np.testing.assert_array_equal(ran.outputs[0].astype(float), wanted)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("smallest", [False, True])
def test_top_k_of_candidates_gives_their_index(dtype: str, smallest: bool):
    x = np.rint(mixed(4, 9))
    x = x > 0 if dtype == "bool" else x
    given = np.random.default_rng(1).integers(0, 1000, (4, 9))
    key = x.astype(float) if smallest else -x.astype(float)
    at = np.argsort(key, axis=1, kind="stable")[:, :3]
    wanted = [np.take_along_axis(a, at, 1) for a in (x, given)]
    types = [local_type("b:4;e:9", d, b="rows") for d in (dtype, "int32")]
    outs = [local_type("b:4;k:3", d, b="rows") for d in (dtype, "int32")]
    attrs = {"smallest": True} if smallest else {}
    check("top_k", types, outs, [x, given], wanted, dim="e", k="k", **attrs)


def test_top_k_of_blocks_gives_global_indices():
    x = mixed(10)  # blocks of 4, 3 and 3
    outs = [local_type("k:6", d, k="cols") for d in ("float64", "int32")]
    for ran in run("top_k", [local_type("e:10", "float64", e="cols")], outs, [x], dim="e", k="k"):
        start, stop = [(0, 4), (4, 7), (7, 10)][ran.coordinates["cols"]]
        at = start + np.argsort(-x[start:stop], kind="stable")[:2]
        np.testing.assert_array_equal(ran.outputs[1], at)
        np.testing.assert_array_equal(ran.outputs[0], x[at])
