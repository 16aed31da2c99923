"""A marked test that fails on one rank while the others wait for it: the job must end at once."""

from __future__ import annotations

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_rank_1_fails():
    assert MPI.COMM_WORLD.rank != 1, "deliberate failure"
    MPI.COMM_WORLD.Barrier()


def test_the_others_would_wait_here():
    MPI.COMM_WORLD.Barrier()
