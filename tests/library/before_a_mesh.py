"""Under mpirun: all ranks make the same mistake.  Usage: before_a_mesh.py WHEN."""

from __future__ import annotations

import sys

import meshmpi as mm

if __name__ == "__main__":
    when = sys.argv[1]
    if when == "with-mpi":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    mesh = mm.Mesh(f"all:{sys.argv[2]}") if when == "compiling" else None
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:6")
        if mesh is None:
            mm.einsum([x, mm.placeholder("y", "io:5")], [])
    mm.compile(graph, mesh, "bacth:all", fetches=[x])
