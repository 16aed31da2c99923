"""Local compute on shards.  Knows program, dims and scalar; no graph, no MPI."""

from meshmpi.kernels.binding import Runtime, numpy_dtype
from meshmpi.kernels.numpy_kernels import bind, workspace_bytes
from meshmpi.kernels.random_numbers import random_block

__all__ = ["Runtime", "bind", "numpy_dtype", "random_block", "workspace_bytes"]
