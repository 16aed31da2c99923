"""mpi4py's MPI, for services that call it: only this room imports mpi4py itself.

Importing this module initialises MPI, unless `mpi4py.rc` says otherwise.
"""

from mpi4py import MPI

__all__ = ["MPI"]
