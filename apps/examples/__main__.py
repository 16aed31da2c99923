"""Runs the examples: ``python -m meshmpi.launch -n 4 -m apps.examples``, or without MPI."""

import meshmpi as mm
from apps.examples import contraction, kmeans, power_iteration
from meshmpi.runtime.world import world_size

if __name__ == "__main__":
    ranks = world_size()
    rows = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    mesh = (mm.Mesh if ranks > 1 else mm.SimulatedMesh)(f"rows:{rows};cols:{ranks // rows}")
    for example in (contraction, power_iteration, kmeans):
        result = example.main(mesh)
        if mesh.rank == 0:
            print(f"{example.__name__.rsplit('.', 1)[-1]:16} {result:.12g}")
