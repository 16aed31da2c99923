"""The job that this process was started in, as its launcher tells in the environment; MPI is not asked.

One table for all who want to know: a launcher that is not in it is added here, once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Starter(NamedTuple):
    """A program that starts ranks, and the variables in which it tells each of them who it is; empty: none."""

    name: str
    rank: str
    size: str = ""
    local_rank: str = ""  # among the ranks of its host
    local_size: str = ""
    hosts: str = ""  # their number
    always_mpi: bool = True  # whether what it starts is a rank of MPI


STARTERS = (
    Starter(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Starter(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    ),
    Starter("PALS (mpiexec of HPE Cray)", "PALS_RANKID", "", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Starter("aprun", "ALPS_APP_PE"),
    Starter("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", hosts="FLUX_JOB_NNODES"),
    Starter("Hydra (mpiexec of MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Starter("PMIx", "PMIX_RANK"),
    # Slurm's batch script and what srun starts without PMI have these as well.
    Starter(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES", always_mpi=False
    ),
)
"""The more special first: several tell the variables of Hydra or PMIx too."""
_MPI = [s for s in STARTERS if s.always_mpi]
IDENTITY = ("PMIX_NAMESPACE", *(name for s in STARTERS for name in (s.rank, s.size) if name))
"""Variables that together identify a rank among those of this job and of others on the same host."""
JOB_VARIABLES = tuple(name for s in _MPI for name in (s.rank, s.size) if name)
"""Of a process with one of them an MPI launcher says that it is a rank."""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def in_job() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in JOB_VARIABLES)


def started_by(environment: Mapping[str, str] = os.environ) -> str:
    """The name of the launcher that started this process as a rank; empty: none."""
    return next((s.name for s in _MPI if s.rank in environment or s.size in environment), "")


def told_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the MPI launcher says it started; None where none says."""
    return next((n for s in _MPI if (n := _number(environment, s.size)) is not None), None)


def size_by_environment() -> int:
    """How many ranks the MPI launcher says it started, 1 where none says."""
    return told_size() or 1


def rank_by_environment() -> int:
    """Which rank the launcher made this process, 0 outside of a job."""
    return next((n for s in STARTERS if (n := _number(os.environ, s.rank)) is not None), 0)


def alone() -> bool:
    """Whether there is no other rank, as far as a launcher says."""
    return not in_job() or told_size() == 1


def first_of_host() -> bool:
    """Whether no launcher says that this is another rank of its host than the first."""
    return all(os.environ.get(s.local_rank, "0") == "0" for s in STARTERS if s.local_rank)


def on_several_hosts() -> bool:
    """Whether the launcher says that it started ranks on other hosts, too."""
    if any(os.environ.get(s.hosts, "1") != "1" for s in STARTERS if s.hosts):
        return True
    size = size_by_environment()
    local = next((n for s in STARTERS if (n := _number(os.environ, s.local_size)) is not None), size)
    return local < size
