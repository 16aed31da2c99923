"""Tests that run under mpirun, started by test_mpirun.py.

The folder is not called mpi: pytest-mpi takes names of folders for its marks and would skip it.
"""
