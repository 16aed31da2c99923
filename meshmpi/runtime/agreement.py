"""What the ranks of a run tell each other outside of programs: results, errors, one flag a step.

Works on a Mesh, where this process is one rank, and on a SimulatedMesh, where it is all of them.
Knows nothing of what the values mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from meshmpi.errors import MeshmpiError

T = TypeVar("T")


def gathered(mesh: Any, value: T, what: str = "gather") -> list[T]:
    """The values of all processes, on every one of them; collective.

    Args:
        mesh: The mesh.
        value: Of this process.
        what: What to call it in reports of ranks that wait.
    """
    comm = getattr(mesh, "comm", None)
    if comm is None:
        return [value]
    return mesh.outside(what, functools.partial(comm.allgather, value))()


def from_first(mesh: Any, make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; its own errors are raised on all; collective.

    Args:
        mesh: The mesh.
        make: Called on rank 0 only; an error that is not meshmpi's own ends the job.
    """
    comm = getattr(mesh, "comm", None)
    if comm is None:
        return make()
    result: Any = None
    if mesh.rank == 0:
        try:
            result = (make(), None)
        except MeshmpiError as error:
            result = (None, error)
    value, error = mesh.outside("broadcast", functools.partial(comm.bcast, result), "root 0")()
    if error is not None:
        raise error
    return value


def first_error(mesh: Any, error: MeshmpiError | None) -> MeshmpiError | None:
    """The error of the lowest rank that has one, on every rank; collective."""
    return next((e for e in gathered(mesh, error) if e is not None), None)


class Flag:
    """A flag that is raised for all ranks when any rank raises it.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Any) -> None:
        self._comm = getattr(mesh, "comm", None)
        self._mine, self._sum = np.zeros(1, np.int32), np.zeros(1, np.int32)
        if self._comm is not None and self._comm.size > 1:
            reduce = functools.partial(self._comm.Allreduce, self._mine, self._sum)
            self._reduce = mesh.outside("agree", reduce)

    def agree(self, raised: bool) -> bool:
        """Whether any rank has raised it; collective, one small all-reduce (about 1 us a node)."""
        if self._comm is None or self._comm.size == 1:
            return raised
        self._mine[0] = raised
        self._reduce()
        return bool(self._sum[0])
