"""Tests that run under mpirun, started by test_mpirun.py.

The folder is not called mpi: pytest-mpi takes the names of folders for its marks and skips them all.
"""
