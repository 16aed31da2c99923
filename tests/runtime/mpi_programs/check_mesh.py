"""Under mpirun: communicators of every subset of axes, meshes over parts of the job, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
from mpi4py import MPI

from meshmpi.errors import MeshError, MeshmpiError, ProgramError
from meshmpi.runtime import operands
from meshmpi.runtime.mesh import Mesh
from tests.runtime.mpi_programs.collective_cases import MESHES


def refused(kind: type[MeshmpiError], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as e:
        assert text in str(e), (text, str(e))
    else:
        raise AssertionError(f"no {kind.__name__} about {text}")


def check_communicators(mesh: Mesh, world: MPI.Intracomm) -> None:
    names = mesh.shape.names
    for k in range(len(names) + 1):
        for axes in itertools.permutations(names, k):
            comm = mesh.communicator(axes)
            assert tuple(comm.allgather(mesh.rank)) == mesh.group(axes)
            assert comm is mesh.communicator(reversed(axes)), "one communicator for a set of axes"
            assert mesh.group(axes) in mesh.groups(axes)
            assert MPI.Comm.Compare(comm, world) != MPI.IDENT, "ours is a duplicate"
    assert mesh.shape.rank(mesh.coordinates) == mesh.rank == world.rank
    if names:
        assert tuple(mesh.comm.Get_coords(mesh.rank)) == tuple(mesh.coordinates.values())


def check_parts(world: MPI.Intracomm) -> None:
    """Meshes over half of the job, ranks backwards: independent of each other and of the world."""
    half = world.Split(world.rank % 2, -world.rank)
    mesh = Mesh(f"rows:{half.size}", half)
    x = np.array([world.rank], np.int64)
    mesh.all_reduce(x, ("rows",))
    assert x[0] == sum(range(world.rank % 2, world.size, 2))
    refused(MeshError, f"but the communicator has {half.size}", lambda: Mesh("rows:1000", half))
    if world.size > 1:
        inter = half.Create_intercomm(0, world, world.size - 1 - world.rank % 2)
        refused(MeshError, "intercommunicator", lambda: Mesh("rows:2", inter))


def check_hosts(world: MPI.Intracomm) -> None:
    """Ranks that a launcher dealt out to two hosts in turns: the mesh goes host by host."""
    plain = MPI.Get_processor_name
    MPI.Get_processor_name = lambda: f"host{world.rank % 2}"
    try:
        shape = f"rows:{-(-world.size // 2)};cols:2" if world.size % 2 == 0 else f"all:{world.size}"
        mesh = Mesh(shape)
        everyone = list(range(world.size))
        by_host = sorted(everyone, key=lambda r: (r % 2, r))
        assert mesh.comm.allgather(world.rank) == by_host
        assert mesh.host_of == tuple(r % 2 for r in by_host) and mesh.hosts == min(2, world.size)
        if world.size == 4:
            assert mesh.axes_between_hosts == ("rows",)
            assert Mesh(shape, order="given").axes_between_hosts == ("cols",)
        backwards = Mesh(shape, order=everyone[::-1])
        assert backwards.comm.allgather(world.rank) == everyone[::-1] and backwards.rank == world.size - 1 - world.rank
        for one in (mesh, backwards):
            x = one.allocate(1 << 15).view(np.float64)
            x[:] = world.rank
            one.bind(operands.AllReduce(x, one.shape.names), planned=True)()
            assert (x == sum(everyone)).all()
        refused(MeshError, "does not number", lambda: Mesh(shape, order=[1] * world.size))
        refused(MeshError, "does not number", lambda: Mesh(shape, order="slots"))
    finally:
        MPI.Get_processor_name = plain


def check_real_numbers(mesh: Mesh) -> None:
    values = [np.random.default_rng(r).standard_normal(1000) for r in range(mesh.size)]
    axes = mesh.shape.names
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-15), (ml_dtypes.bfloat16, 2**-8)):
        ours = [v.astype(dtype).astype(np.float64) for v in values]
        bound = tolerance * sum(np.abs(v) for v in ours)
        x = values[mesh.rank].astype(dtype)
        mesh.all_reduce(x, axes)
        assert (np.abs(x.astype(np.float64) - sum(ours)) <= bound).all(), dtype
        everywhere = mesh.comm.allgather(x.tobytes())
        assert everywhere == everywhere[:1] * mesh.size, "the same bits on all ranks"
        again = values[mesh.rank].astype(dtype)
        mesh.all_reduce(again, axes)
        assert again.tobytes() == x.tobytes(), "the same bits each time"


def check_bound(mesh: Mesh) -> None:
    """Prepared once, called with other values each time: results and counts follow."""
    axes, n = mesh.shape.names, mesh.size
    mine = mesh.shape.block_index(axes, mesh.coordinates)
    x, y = np.zeros(3, ml_dtypes.bfloat16), np.zeros(4)
    before = mesh.counters
    calls = [mesh.bind(operands.AllReduce(x, axes)), mesh.bind(operands.AllReduce(y, axes, "max"))]
    whole, scattered = np.zeros((2, n)), np.zeros((2, 1))
    own, turned = np.zeros((2, 1)), np.zeros((n, 1))
    gather = mesh.bind(operands.AllGather(own, whole, 1, [1] * n, axes))
    scatter = mesh.bind(operands.ReduceScatter(whole, scattered, 1, [1] * n, axes))
    turn = mesh.bind(operands.AllToAll(own.T, turned, 1, 0, [1] * n, [1] * n, axes)) if n == 2 else None
    assert mesh.counters == before, "nothing has run"
    for k in range(3):
        x[...], y[...], own[...] = k, mesh.rank + k, [[mine], [k]]
        for call in calls:
            call()
        assert (x == n * k).all() and (y == mesh.size - 1 + k).all()
        gather()
        assert (whole == [[*range(n)], [k] * n]).all()
        scatter()
        assert (scattered == [[n * mine], [n * k]]).all()
        if turn is not None:
            turn()
            assert (turned[:, 0] == ([0, 1] if mine == 0 else [k, k])).all()
    name, added = "+".join(axes), dict[str, list[int]]()
    for kind, table in mesh.counters.items():
        old = before.get(kind, {}).get(name, [0, 0])
        added[kind] = [a - b for a, b in zip(table[name][:2], old, strict=False)]
    assert added["all_reduce"] == [6, 21] and added["all_gather"] == [3, 6], added
    assert added["reduce_scatter"] == [3, 6 * n], added


def check_refusals(mesh: Mesh) -> None:
    a, n = mesh.shape.names[:1], mesh.shape.sizes[0]
    x = np.ones((2, 3))
    refused(ProgramError, "not C-contiguous", lambda: mesh.all_reduce(x.T, a))
    refused(ProgramError, "not a reduction", lambda: mesh.all_reduce(x, a, "mean"))
    refused(MeshError, "Did you mean", lambda: mesh.all_reduce(x, (a[0][:-1],)))
    refused(ProgramError, "output is", lambda: mesh.all_gather(x, x[:1], 0, [2] * n, a))
    if n > 1:
        small = np.empty(3, np.uint8)
        y = np.ones((2, 3), ml_dtypes.bfloat16)
        refused(ProgramError, "needs 24 bytes", lambda: mesh.all_reduce(y, a, "sum", small))


def main() -> None:
    world = MPI.COMM_WORLD
    for text in MESHES[world.size]:
        mesh = Mesh(text)
        check_communicators(mesh, world)
        check_real_numbers(mesh)
        if mesh.shape.names:
            check_bound(mesh)
            check_refusals(mesh)
    check_parts(world)
    check_hosts(world)
    if world.rank == 0:
        print("mesh is right")


if __name__ == "__main__":
    main()
