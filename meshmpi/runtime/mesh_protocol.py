"""The common interface of `Mesh` and `SimulatedMesh`: all that steps, checkpoints and loops may use.

Code that must tell them apart uses `AnyMesh.simulated`; only `agreement` and code with its own messages uses
``comm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from meshmpi.dims import Axes, MeshShape

if TYPE_CHECKING:
    from mpi4py import MPI

    from meshmpi.kernels.steps import Bound
    from meshmpi.runtime.operands import Collective

T = TypeVar("T")


class Ranks(Protocol):
    """Processes that may tell each other something: those of a mesh, or survivors of a job."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This rank; 0 on a simulated mesh, where one process speaks for all."""
        ...

    @property
    def comm(self) -> MPI.Intracomm | None:
        """The communicator of all ranks; None on a simulated mesh."""
        ...

    def outside(self, kind: str, run: Callable[[], T], op: str = "") -> Callable[[], T]:
        """``run``, a collective that is not a method, recorded like those."""
        ...


class AnyMesh(Ranks, Protocol):
    """A mesh to run on: one rank of it is this process (`Mesh`), or all are (`SimulatedMesh`).

    Attributes:
        shape: Names and sizes of the axes.
        checks: Whether collectives that are bound now compare what the ranks do; see `checking`.
        host_of: For each rank, the number of its host.
    """

    shape: MeshShape
    checks: bool
    host_of: tuple[int, ...]

    @property
    def simulated(self) -> bool:
        """Whether this process plays all ranks; arrays are then lists indexed by rank."""
        ...

    @property
    def hosts(self) -> int:
        """Number of hosts that the ranks run on."""
        ...

    @property
    def axes_between_hosts(self) -> Axes:
        """The axes along which some neighbours are on different hosts."""
        ...

    @property
    def freed(self) -> bool:
        """Whether `free` was called."""
        ...

    def free(self) -> None:
        """Gives communicators back.  Collective."""
        ...

    def communicator(self, axes: Iterable[str]) -> MPI.Intracomm:
        """The communicator of this rank's group over ``axes``; a simulated mesh refuses."""
        ...

    def group(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks of this rank's group over ``axes``, ascending."""
        ...

    def allocate(self, nbytes: int, owner: int | None = None) -> np.ndarray:
        """Bytes on a cache line for what a program keeps, where collectives reach it best.  Collective.

        Args:
            nbytes: How many.
            owner: Whose bytes: those of a rank that shares its memory with this one; default: its own.
        """
        ...

    def shared_axes(self) -> Axes:
        """The axes along which ranks share memory.  Collective."""
        ...

    def bind(self, *calls: Collective, planned: bool = False) -> Bound:
        """A collective as a function without arguments; ``calls`` has one object for each rank played here."""
        ...

    def in_background(self, axes: Iterable[str]) -> bool:
        """Whether an all_reduce over ``axes`` gains by `start_all_reduce`."""
        ...

    def start_all_reduce(self, x: Any, /, axes: Iterable[str], op: str = "sum") -> list[Any]:
        """Begins an all_reduce in place; returns what `wait` and `advance` take."""
        ...

    def advance(self, requests: list[Any]) -> None:
        """Lets MPI work on what `start_all_reduce` began, without waiting."""
        ...

    def wait(self, requests: list[Any], axes: Iterable[str]) -> None:
        """Waits until what `start_all_reduce` began is complete."""
        ...

    def outside(self, kind: str, run: Callable[[], T], op: str = "", axes: Axes | None = None) -> Callable[[], T]:
        """``run``, a collective that is not a method, recorded like those."""
        ...

    def checking(self, debug: bool) -> AbstractContextManager[None]:
        """While it is open and ``debug`` is true, collectives that are bound compare what ranks do."""
        ...
