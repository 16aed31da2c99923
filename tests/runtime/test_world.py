"""What a process knows of its job before MPI is initialised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshmpi.job import JOB_VARIABLES, in_job
from meshmpi.runtime.world import without_networks, world_size

TRANSPORTS = "OMPI_MCA_btl"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*JOB_VARIABLES, TRANSPORTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_alone_leaves_networks_out_while_mpi_starts(alone: pytest.MonkeyPatch):
    with without_networks():
        assert os.environ[TRANSPORTS] == "^ofi,sm"
    assert TRANSPORTS not in os.environ
    assert not in_job()
    assert world_size() == 1


def test_what_the_user_or_a_job_says_stays(alone: pytest.MonkeyPatch):
    alone.setenv(TRANSPORTS, "self,sm")
    with without_networks():
        assert os.environ[TRANSPORTS] == "self,sm"
    alone.delenv(TRANSPORTS)
    alone.setenv("PMIX_RANK", "0")
    with without_networks():
        assert TRANSPORTS not in os.environ


def test_a_mesh_of_one_rank_starts_like_this(alone: pytest.MonkeyPatch):
    """In a process of its own, as MPI starts only once; it sees the variable from within."""
    code = (
        "import os, sys, meshmpi as mm\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'mpi4py.MPI': print('sees', os.environ.get('OMPI_MCA_btl'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "print(mm.Mesh('all:1').size, os.environ.get('OMPI_MCA_btl'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["sees ^ofi,sm", "1 None"], done.stderr


def test_processes_that_are_not_a_job_are_refused(alone: pytest.MonkeyPatch):
    """As a launcher of another MPI starts them; on their own, or as one rank by name, they may."""
    code = "import meshmpi as mm; print(mm.Mesh('all:1').size)"

    def run(code: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **more},
            check=False,
        )

    assert run(code).stdout == "1\n"
    refused = run(code, PMI_SIZE="2", PMI_RANK="0")
    assert "started 2 processes, but each of them is rank 0 of 1" in refused.stderr
    assert "meshmpi doctor" in refused.stderr and refused.stdout == ""
    own = code.replace("mm.Mesh('all:1')", "mm.Mesh('all:1', MPI.COMM_SELF)")
    assert run(f"from mpi4py import MPI; {own}", PMI_SIZE="2", PMI_RANK="0").stdout == "1\n"
