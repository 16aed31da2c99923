"""What both workers share: kinds, sizes and how a collective is timed.  Needs no package at all."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

KINDS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of the vector that each rank hands in; of the result for all_gather."""
RANKS = 2


def interleaved(
    ways: Mapping[str, Callable[[], None]],
    barrier: Callable[[], None],
    slowest: Callable[[list[float]], list[float]],
    seconds: float,
) -> dict[str, float]:
    """Median microseconds of each way; the ways take turns call by call, and in being first.

    Args:
        ways: Name -> the call.
        slowest: Times of this rank -> the greatest of all ranks, one by one.
        seconds: In which about all calls of one way are done.
    """

    def timed(call: Callable[[], None]) -> float:
        barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    for call in ways.values():
        timed(call)
    first = max(slowest([timed(call) for call in ways.values()]))
    repeats = max(3, min(300, int(seconds / max(first, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(repeats):
        turn = list(ways.items())
        for name, call in turn if k % 2 else turn[::-1]:
            times[name].append(timed(call))
    return {name: 1e6 * statistics.median(slowest(of)) for name, of in times.items()}


def options_of_worker() -> argparse.Namespace:
    """The command line of both workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.3, help="of each timing")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes of the largest message")
    return parser.parse_args()
