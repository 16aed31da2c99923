"""Under mpirun on several hosts: the mesh goes host by host, memory is shared inside a host, results are right."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.runtime import operands


def main() -> None:
    shape, between = sys.argv[1:]
    mesh = mm.Mesh(shape)
    names = mesh.comm.allgather(MPI.Get_processor_name())
    assert names == sorted(names), names
    assert list(mesh.host_of) == sorted(mesh.host_of) and mesh.hosts == len(set(names))
    assert "+".join(mesh.axes_between_hosts) == between, mesh.axes_between_hosts

    x = mesh.allocate(1 << 16).view(np.float64)
    for axes in (*((n,) for n in mesh.shape.names), mesh.shape.names):
        x[:] = 1 + mesh.rank
        mesh.bind(operands.AllReduce(x, axes), planned=True)()
        assert (x == sum(1 + r for r in mesh.group(axes))).all(), (axes, x)
    for op, dtype, size in (
        ("max", np.int32, 5000),
        ("sum", np.float32, 3),
        ("prod", np.float64, 129),
        ("sum", bool, 700),
    ):
        y = x.view(np.uint8)[: size * np.dtype(dtype).itemsize].view(dtype)
        y[:] = (np.arange(size) + mesh.rank) % 3
        values = [((np.arange(size) + r) % 3).astype(dtype) for r in range(mesh.size)]
        wanted = {"max": np.maximum, "sum": np.add, "prod": np.multiply}[op].reduce(values).astype(dtype)
        mesh.bind(operands.AllReduce(y, mesh.shape.names, op), planned=True)()
        assert (y == wanted).all(), (op, dtype, y, wanted)
    shared = mesh._shared  # pyright: ignore[reportPrivateUsage]
    assert shared and [names[r] for r in shared.ranks] == [names[mesh.rank]] * len(shared.ranks)

    with mm.Graph() as graph:
        feed = mm.placeholder("x", "batch:12;io:8")
        hidden = mm.relu(mm.dense(feed, mm.Dimension("hidden", 16), name="up"))
        loss = mm.reduce_mean(mm.square(mm.dense(hidden, mm.Dimension("io", 8), name="down") - feed))
        updates = mm.optimize.Adam(0.01).minimize(loss)
    layout = f"batch:{mesh.shape.names[0]}" + (f";hidden:{mesh.shape.names[1]}" if len(mesh.shape.names) > 1 else "")
    data = np.random.default_rng(0).standard_normal((12, 8), dtype=np.float32)
    steps = [mm.compile(graph, m, layout, fetches=[loss], updates=updates) for m in (mesh, mm.SimulatedMesh(shape))]
    for _ in range(3):
        real, simulated = (step(x=data)[loss] for step in steps)
        assert abs(real - simulated) < 1e-6, (real, simulated)
    dealt = MPI.COMM_WORLD.allgather(MPI.Get_processor_name())
    if mesh.rank == 0:
        print(f"{mesh.hosts} hosts, {mesh.size} ranks dealt out {'in turns' if dealt != sorted(dealt) else 'in order'}")


if __name__ == "__main__":
    main()
