"""Under mpirun: the user initialises MPI, at a level of threads, and finalises it too.

Usage: own_init.py LEVEL, one of single, funneled, serialized, multiple.
"""

from __future__ import annotations

import sys

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

import meshmpi as mm  # noqa: E402
from tests.library.guest import W, X, product  # noqa: E402

if __name__ == "__main__":
    level = getattr(MPI, f"THREAD_{sys.argv[1].upper()}")
    MPI.Init_thread(level)
    mesh = mm.Mesh("rows:2")
    found = product(mesh, "batch:rows")(x=X)["total"]
    assert abs(found - (X @ W).sum()) < 1e-12
    if MPI.COMM_WORLD.rank == 0:
        print(f"asked for {level}, MPI gave {MPI.Query_thread()}: ok")
    MPI.Finalize()
