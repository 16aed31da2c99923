"""Under mpirun on several hosts: the mesh goes host by host, memory is shared inside a host, results are right."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.runtime import operands
from meshmpi.runtime.arrays import view_of


def check_divided(mesh: mm.Mesh) -> None:
    """Collectives over all axes, in memory that is shared, are equal to MPI's; integers, so that sums are exact."""
    rng, n = np.random.default_rng(mesh.rank), mesh.size
    room = mesh.allocate(1 << 18)
    for axes in (mesh.shape.names, mesh.shape.names[::-1]):
        mine = mesh.shape.block_index(axes, mesh.coordinates)
        for dtype, sizes in (("float32", [5] * n), ("int32", [(3 * k) % 4 for k in range(n)]), ("bool", [2] * n)):
            b, total = sizes[mine], sum(sizes)

            def pair(before: tuple[int, ...], after: tuple[int, ...], dtype: str = dtype) -> list[np.ndarray]:
                found, at = [], 0
                for shape in (before, after):
                    found.append(view_of(room, at, shape, dtype))
                    at = 1 << 17
                found[0][...] = rng.integers(0, 9, before).astype(dtype)
                return found

            also = [1] * (n - 1) + [3]
            calls: list[Callable[..., operands.Collective]] = [
                functools.partial(operands.AllGather, axis=1, sizes=sizes, axes=axes),
                functools.partial(operands.ReduceScatter, axis=1, sizes=sizes, axes=axes, op="max"),
                functools.partial(operands.ReduceScatter, axis=1, sizes=sizes, axes=axes),
                functools.partial(operands.AllToAll, split_axis=1, concat_axis=2, axes=axes),
                functools.partial(operands.AllToAll, split_axis=2, concat_axis=1, axes=axes),
            ]
            calls[3] = functools.partial(calls[3], split_sizes=sizes, concat_sizes=also)
            calls[4] = functools.partial(calls[4], split_sizes=also, concat_sizes=sizes)
            shapes = [((4, b, 3), (4, total, 3)), *[((4, total, 3), (4, b, 3))] * 2]
            shapes += [((2, total, also[mine]), (2, b, n + 2)), ((2, b, n + 2), (2, total, also[mine]))]
            for make, (before, after) in zip(calls, shapes, strict=True):
                x, out = pair(before, after)
                kept, flat = x.copy(), np.empty(after, dtype)
                run = mesh.bind(make(x, out), planned=True)
                run()
                mesh.bind(make(kept, flat))()
                assert (out == flat).all(), (make(x, out), out, flat)
                x[...], kept[...] = x[::-1].copy(), kept[::-1].copy()
                run()
                mesh.bind(make(kept, flat))()
                assert (out == flat).all()
    assert mesh.hosts == mesh.size or mesh._lanes  # pyright: ignore[reportPrivateUsage]


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

    check_divided(mesh)

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
