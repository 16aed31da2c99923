"""Meshes of ranks and the execution of programs on them: the only room that imports mpi4py, with the first `Mesh`."""
