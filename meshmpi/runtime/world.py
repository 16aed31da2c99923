"""The number of ranks with which this process was started, without initialising MPI if there is no job.

Independent of meshes and programs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator

from meshmpi.dims import MeshShape
from meshmpi.errors import MeshError
from meshmpi.job import in_job, size_by_environment


@contextlib.contextmanager
def without_networks() -> Iterator[None]:
    """A process alone that initialises MPI in here does so a second faster, by Open MPI.

    It leaves out the transport ofi, as `meshmpi.launch.launch` does on one host, and why is said
    there; and shared memory, of which a process alone makes a segment that stays in /dev/shm when
    the process is killed.  In a job, or where the user chose transports, nothing is changed.
    """
    name = "OMPI_MCA_btl"
    if in_job() or name in os.environ:
        yield
        return
    os.environ[name] = "^ofi,sm"
    try:
        yield
    finally:
        del os.environ[name]  # processes started from this one may be on several hosts


def world_size() -> int:
    """Ranks of the MPI job that this process belongs to; 1 outside of a job.

    Inside a job it imports mpi4py, which initialises MPI.

    Example:
        >>> mesh = mm.Mesh(f"all:{world_size()}")
    """
    if not in_job():
        return 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


# ---- meshes that fit a number of ranks --------------------------------------------------------------


def alternatives(shape: MeshShape, ranks: int) -> list[MeshShape]:
    """Meshes over the same axes with exactly ``ranks`` ranks, those most like ``shape`` first.

    Near means: few axes shrink to one rank, then small ratios of sizes.
    """

    def distance(sizes: tuple[int, ...]) -> tuple[int, float]:
        pairs = list(zip(sizes, shape.sizes, strict=True))
        lost = sum(size == 1 and wanted > 1 for size, wanted in pairs)
        return lost, round(sum(abs(math.log(size / wanted)) for size, wanted in pairs), 9)

    divisors = [n for n in range(ranks, 0, -1) if ranks % n == 0]
    choices = itertools.product(divisors, repeat=len(shape.sizes))
    found = sorted((sizes for sizes in choices if math.prod(sizes) == ranks), key=distance)
    return [MeshShape(list(zip(shape.names, sizes, strict=True))) for sizes in found]


def size_error(shape: MeshShape, ranks: int) -> MeshError:
    """The error for a communicator of ``ranks`` ranks, with meshes that would fit it."""
    legal = alternatives(shape, ranks)

    def lost(m: MeshShape) -> int:
        return sum(a == 1 < b for a, b in zip(m.sizes, shape.sizes, strict=True))

    near = [str(m) for m in legal if lost(m) == lost(legal[0])][:3]
    remedy = f"Run with mpirun -n {shape.size}"
    if near:
        remedy += f", or use {'one of ' if len(near) > 1 else ''}{', '.join(near)}"
    plural = "s" if shape.size > 1 else ""
    return MeshError(f"mesh {shape} needs {shape.size} rank{plural}, but the communicator has {ranks}.", f"{remedy}.")


def refuse_singletons(ranks: int) -> None:
    """N processes that are each rank 0 of 1 would do the same work, over each other's files."""
    started = size_by_environment()
    if ranks == 1 < started:
        raise MeshError(
            f"the launcher started {started} processes, but each of them is rank 0 of 1: launcher"
            " and MPI library do not fit together.",
            "Run meshmpi doctor: it names both and says what to do.",
        )
