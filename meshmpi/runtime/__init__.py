"""Meshes of ranks and the execution of programs on them: the only room that imports mpi4py.

Nothing here is imported by the rooms that build, lower or price a program.  mpi4py itself is
imported when the first `Mesh` is made, never before.
"""
