"""Exchanges results, errors and one flag per step between the ranks of a run, outside of programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from meshmpi.errors import MeshmpiError
from meshmpi.runtime.mesh_protocol import Ranks

T = TypeVar("T")


def gathered(ranks: Ranks, value: T, what: str = "gather") -> list[T]:
    """The values of all processes, on each; one process plays all ranks of a simulated mesh.  Collective."""
    if ranks.comm is None:
        return [value]
    return ranks.outside(what, functools.partial(ranks.comm.allgather, value))()


def any_of(ranks: Ranks, value: bool, what: str = "agree") -> bool:
    """Whether the value of any process is true, on every one of them; collective."""
    return any(gathered(ranks, value, what))


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank.  Collective.

    An error of meshmpi in it is raised on all; any other ends the job.
    """
    if ranks.comm is None:
        return make()
    result: Any = None
    if ranks.rank == 0:
        try:
            result = (make(), None)
        except MeshmpiError as error:
            result = (None, error)
    value, error = ranks.outside("broadcast", functools.partial(ranks.comm.bcast, result), "root 0")()
    if error is not None:
        raise error
    return value


def first_error(ranks: Ranks, error: MeshmpiError | None) -> MeshmpiError | None:
    """The error of the lowest rank that has one, on every rank; collective."""
    return next((e for e in gathered(ranks, error) if e is not None), None)


def together(ranks: Ranks, make: Callable[[], T]) -> T:
    """What ``make`` returns on this rank; the error of the lowest rank is raised on all; collective."""
    value: Any = None
    error: MeshmpiError | None = None
    try:
        value = make()
    except MeshmpiError as failure:
        error = failure
    error = first_error(ranks, error)
    if error is not None:
        raise error
    return value


class Flag:
    """A flag that is raised for all ranks when any rank raises it."""

    def __init__(self, ranks: Ranks) -> None:
        self._several = ranks.comm is not None and ranks.size > 1
        self._mine, self._sum = np.zeros(1, np.int32), np.zeros(1, np.int32)
        if ranks.comm is not None and ranks.size > 1:
            reduce = functools.partial(ranks.comm.Allreduce, self._mine, self._sum)
            self._reduce = ranks.outside("agree", reduce)

    def agree(self, raised: bool) -> bool:
        """Whether any rank has raised it; collective, one small all-reduce (about 1 us a node)."""
        if not self._several:
            return raised
        self._mine[0] = raised
        self._reduce()
        return bool(self._sum[0])
