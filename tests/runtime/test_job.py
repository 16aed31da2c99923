"""What launchers tell in the environment of a rank; each row is what one of them sets."""

from __future__ import annotations

import pytest

from meshmpi import job

ROWS = {
    "mpirun": ("Open MPI", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8", 3, 8, True, False),
    "mpirun on two hosts": (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4",
        5,
        8,
        False,
        True,
    ),
    "jsrun": (
        "jsrun",
        "JSM_NAMESPACE_RANK=4 JSM_NAMESPACE_SIZE=8 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=4",
        4,
        8,
        True,
        True,
    ),
    "pals": ("PALS", "PALS_RANKID=6 PALS_LOCAL_RANKID=2 PALS_LOCAL_SIZE=4", 6, None, False, False),
    "pals with pmi": (
        "PALS",
        "PALS_RANKID=6 PALS_LOCAL_RANKID=2 PALS_LOCAL_SIZE=4 PMI_SIZE=8 PMI_RANK=6",
        6,
        8,
        False,
        True,
    ),
    "aprun": ("aprun", "ALPS_APP_PE=2", 2, None, True, False),
    "flux": ("flux run", "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=1", 1, 4, False, False),
    "flux on two hosts": (
        "flux run",
        "FLUX_TASK_RANK=2 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_NNODES=2 PMI_RANK=2 PMI_SIZE=4",
        2,
        4,
        True,
        True,
    ),
    "mpich": ("Hydra", "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 2, False, False),
    "pmix": ("PMIx", "PMIX_RANK=1 PMIX_NAMESPACE=x", 1, None, True, False),
    "srun with pmi2": (
        "Hydra",
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1 PMI_RANK=1 PMI_SIZE=2",
        1,
        2,
        False,
        False,
    ),
    "srun without pmi": ("", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1", 1, None, False, False),
    "sbatch": ("", "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7", 0, None, True, False),
    "none": ("", "", 0, None, True, False),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_launcher_tells(row: str, monkeypatch: pytest.MonkeyPatch):
    name, variables, rank, size, first, several = ROWS[row]
    for starter in job.STARTERS:
        for variable in starter[1:6]:
            if variable:
                monkeypatch.delenv(variable, raising=False)
    for word in variables.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert job.started_by().startswith(name) and bool(job.started_by()) == bool(name)
    assert job.in_job() == bool(name)
    assert (job.rank_by_environment(), job.told_size()) == (rank, size)
    assert (job.first_of_host(), job.on_several_hosts()) == (first, several)
    assert job.alone() == (not name or size == 1)


def test_every_launcher_has_a_row(monkeypatch: pytest.MonkeyPatch):
    told = {word.split("=")[0] for _, variables, *_ in ROWS.values() for word in variables.split()}
    missing = [v for s in job.STARTERS for v in s[1:6] if v and v not in told]
    assert missing == []
