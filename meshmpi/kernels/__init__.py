"""Local compute on blocks.  Depends on program, dims and scalar; no graph, no MPI."""

from meshmpi.kernels.binding import Runtime
from meshmpi.kernels.numpy_kernels import bind, workspace_bytes
from meshmpi.kernels.random_numbers import random_block
from meshmpi.kernels.views import numpy_dtype

__all__ = ["Runtime", "bind", "numpy_dtype", "random_block", "workspace_bytes"]
