"""Tests that run under mpirun; `tests.mpi.launcher` starts it."""
