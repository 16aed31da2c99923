"""Work that threads of one rank share, when it is more than one product or one generated kernel."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from threadpoolctl import ThreadpoolController

from meshmpi.kernels.steps import Bound

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


def available() -> int:
    """Threads that this rank may use: what OMP_NUM_THREADS says, else one for each core that it may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


def shares(weights: Sequence[float], count: int) -> list[slice]:
    """Cuts a sequence into at most ``count`` runs of about equal weight."""
    ends, total, seen = [0], math.fsum(weights), 0.0
    for n, weight in enumerate(weights, 1):
        seen += weight
        if seen * count >= total * len(ends) and n > ends[-1]:
            ends.append(n)
    ends[-1] = len(weights)
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


def together(parts: Sequence[Bound]) -> Bound:
    """One function that runs ``parts`` at the same time, each on one thread, this thread among them.

    Products and generated kernels inside use one thread each: the pools of BLAS and OpenMP would fight for the cores.
    """
    if len(parts) == 1:
        return parts[0]
    own, others = parts[0], parts[1:]

    def run() -> None:
        with _controller().limit(limits=1):
            running = [_pool(len(others)).submit(part) for part in others]
            own()
            for one in running:
                one.result()

    return run


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # late: it loads logging and queues

    return ThreadPoolExecutor(count, "meshmpi", lambda: _controller().limit(limits=1, user_api="openmp"))


@functools.cache
def _controller() -> ThreadpoolController:
    """The libraries with threads that are loaded when work is first shared."""
    return ThreadpoolController()
