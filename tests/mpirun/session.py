"""One pytest per rank: ``python -m tests.mpirun.session FILE ...`` under mpirun.

Rank 0 prints; the others print only when they fail, through the hook in tests/conftest.py.
"""

from __future__ import annotations

import os
import sys

import pytest
from mpi4py import MPI

if __name__ == "__main__":
    if MPI.COMM_WORLD.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    options = ["--with-mpi", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts="]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
