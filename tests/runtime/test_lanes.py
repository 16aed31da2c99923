"""Collectives divided over hosts: the steps of all ranks, run together without MPI, give what one collective gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py")

from meshmpi.runtime import lanes
from meshmpi.runtime.operands import AllGather, ReduceScatter, starts

SPLITS = {
    "2 hosts of 2": [[0, 1], [2, 3]],
    "in turns": [[0, 2], [1, 3]],
    "columns first": [[3, 1], [2, 0]],
    "2 and 1": [[0, 1], [2]],
    "3 hosts, uneven": [[0, 3, 5], [1], [2, 4]],
    "3 hosts of 2": [[0, 1], [2, 3], [4, 5]],
    "3 and 2": [[4, 0, 2], [1, 3]],
}
EVEN, UNEVEN = (lambda n: [3] * n), (lambda n: [(2 * k) % 5 for k in range(n)])


def cut(whole: np.ndarray, axis: int, sizes: list[int]) -> list[np.ndarray]:
    return [np.ascontiguousarray(b) for b in np.split(whole, starts(sizes)[1:-1], axis)]


def cases(kind: str, n: int, sizes: list[int]) -> Iterator[tuple[list[Any], list[np.ndarray]]]:
    """(what each rank hands in, what each must get) along all axes."""
    rng = np.random.default_rng(0)
    for axis in (0, 1, 2):
        shape = [4, 2, 3]
        shape[axis] = sum(sizes)
        if kind == "all_gather":
            whole = rng.standard_normal(shape)
            calls = [AllGather(x, np.full(shape, np.nan), axis, sizes, "a") for x in cut(whole, axis, sizes)]
            yield calls, [whole] * n
        else:
            xs = [rng.integers(-9, 9, shape).astype(float) for _ in range(n)]
            outs = cut(np.full(shape, np.nan), axis, sizes)
            calls = [ReduceScatter(x, out, axis, sizes, "a") for x, out in zip(xs, outs, strict=True)]
            yield calls, cut(sum(xs), axis, sizes)  # type: ignore[arg-type]


def run(hosts: list[list[int]], calls: list[Any]) -> tuple[list[np.ndarray], int]:
    """The steps of all ranks, phase by phase; the results, and the bytes that go between hosts."""
    splits = [lanes.Split(hosts, b) for b in range(len(calls))]
    held = [[{b: getattr(calls[b], name) for b in s.blocks} for name in ("x", "out")] for s in splits]
    steps = [lanes.divided(c, s, *arrays) for c, s, arrays in zip(calls, splits, held, strict=True)]
    for s in steps:
        for to, sources in s.sums:
            to[...] = sum(sources)
    sent = {}
    for b, s in enumerate(steps):
        for host, views in enumerate(s.sends):
            sent[b, host] = np.concatenate([v.ravel() for v in views] or [np.empty(0)])
    for b, s in enumerate(steps):
        for host, views in enumerate(s.receives):
            if not splits[b].has_lane or host == splits[b].here:
                assert not views and not s.sends[host]
                continue
            arrived = sent[hosts[host][splits[b].place], splits[b].here]
            assert arrived.size == sum(v.size for v in views)
            for view, part in zip(views, np.split(arrived, starts([v.size for v in views])[1:-1]), strict=True):
                view[...] = part.reshape(view.shape)
    for s in steps:
        lanes.combining("sum", s.totals)()
    for s in steps:
        for to, source in s.copies:
            to[...] = source
    return [c.out for c in calls], sum(x.nbytes for x in sent.values())


def least(kind: str, hosts: list[list[int]], calls: list[Any]) -> int:
    """Bytes that must cross the network: each block, or each host's sum of one, once for every other host."""
    return (len(hosts) - 1) * (sum(c.x.nbytes for c in calls) if kind == "all_gather" else calls[0].x.nbytes)


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_the_steps_of_all_ranks_make_the_collective(kind: str, name: str, sizes: Callable[[int], list[int]]):
    hosts = SPLITS[name]
    n = sum(map(len, hosts))
    for calls, wanted in cases(kind, n, sizes(n)):
        bytes_between = least(kind, hosts, calls)
        results, sent = run(hosts, calls)
        for result, right in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, right)
        assert sent == bytes_between


def test_a_wrong_order_of_blocks_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The receiver takes its blocks for those of another order of ranks."""
    (calls, wanted), *_ = cases("all_gather", 4, EVEN(4))
    monkeypatch.setattr(lanes.Split, "served", lambda s, host: s.hosts[host][1 - s.place :: 2][: s.count])
    results, _ = run(SPLITS["2 hosts of 2"], calls)
    assert any((a != b).any() for a, b in zip(results, wanted, strict=True))


def test_scratch_memory_of_a_reduction_is_what_it_uses():
    for hosts in SPLITS.values():
        n = sum(map(len, hosts))
        for calls, _ in cases("reduce_scatter", n, UNEVEN(n)):
            for b, c in enumerate(calls):
                split = lanes.Split(hosts, b)
                c.workspace = np.empty(lanes.reduction_bytes(c, split), np.uint8)
                lanes.divided(c, split, *({k: getattr(calls[k], a) for k in split.blocks} for a in ("x", "out")))
