"""Under mpirun: every case of the table in shared memory, compared bit by bit with `SimulatedMesh`; then races.

Prints one line with the number of cases.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.kernels.views import accumulator_dtype, numpy_dtype
from meshmpi.runtime import operands
from meshmpi.runtime import shared as shared_memory
from meshmpi.runtime.arrays import view_of
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.runtime.mpi_programs.collective_cases import MESHES, Case, call, cases, inputs, outputs

COLLECTIVES = {
    c.kind: c
    for c in (operands.AllReduce, operands.AllGather, operands.ReduceScatter, operands.AllToAll, operands.Shift)
}
HALF = 1 << 20


class Planned:
    """A mesh whose methods take arrays in shared memory."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda *a: self.mesh.bind(COLLECTIVES[kind](*a), planned=True)()


def placed(space: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A copy of ``x`` near the start of ``space``; a rank whose block is empty has it there too."""
    out = view_of(space, 192, x.shape, x.dtype.name)
    out[...] = x
    return out


def check_case(case: Case, mesh: Mesh, simulated: SimulatedMesh, space: np.ndarray) -> None:
    xs, outs = inputs(case), outputs(case)
    x, out = placed(space, xs[mesh.rank]), placed(space[HALF:], outs[mesh.rank])
    before = x.copy()
    call(case, simulated, xs, outs)
    call(case, Planned(mesh), x, out)
    got, wanted = (x, xs) if case.kind == "all_reduce" else (out, outs)
    assert got.tobytes() == wanted[mesh.rank].tobytes(), (case, mesh.rank, got, wanted[mesh.rank])
    if case.kind != "all_reduce":
        assert x.tobytes() == before.tobytes(), (case, "the input was changed")


def check_races(mesh: Mesh, space: np.ndarray, rounds: int) -> None:
    """all_reduces of all sizes back to back, on ranks that are late at random; each must see the newest values."""
    axes, late = mesh.shape.names, random.Random(mesh.rank)
    sizes = [4, 16, 512, 600, 5000, 100_000]
    arrays = [space[: 4 * n].view(np.float32) for n in sizes]
    runs = [mesh.bind(operands.AllReduce(x, axes), planned=True) for x in arrays]
    for turn in range(rounds):
        k = random.Random(turn).randrange(len(sizes))
        arrays[k][:] = turn + mesh.rank
        if late.random() < 0.05:
            time.sleep(late.random() / 500)
        runs[k]()
        wanted = mesh.size * turn + mesh.size * (mesh.size - 1) // 2
        assert (arrays[k] == wanted).all(), (turn, sizes[k], arrays[k], wanted)


def check_long_runs(mesh: Mesh, space: np.ndarray) -> None:
    """Runs of some pages that begin and end inside of cache lines, written past the caches; nothing beside them is."""
    shared_memory.PAST_CACHE_BYTES, axes = 1, mesh.shape.names
    index = mesh.shape.block_index(axes, mesh.coordinates)
    for n, at in itertools.product((4093, 4096, 8200, 9999), (0, 4, 36, 60)):
        sizes = [n + k for k in range(mesh.size)]
        whole = np.arange(sum(sizes), dtype=np.float32)
        first = sum(sizes[:index])
        x = placed(space, whole[first : first + sizes[index]])
        room = space[HALF : HALF + 4 * (whole.size + 40)].view(np.float32)
        room[:] = -1.0
        start = at // 4
        out = room[start : start + whole.size]
        mesh.bind(operands.AllGather(x, out, 0, sizes, axes), planned=True)()
        assert (out == whole).all(), (n, at, np.flatnonzero(out != whole)[:5])
        assert (room[:start] == -1.0).all() and (room[start + whole.size :] == -1.0).all(), (n, at)


def check_long_sums(mesh: Mesh, space: np.ndarray) -> None:
    """Sums over several pages have the bits of sums in the order of ranks, past the caches and through them."""
    axes, index = mesh.shape.names, mesh.shape.block_index(mesh.shape.names, mesh.coordinates)
    for nbytes, dtype, past in itertools.product(
        (4000, 16388, 140_008), ("float64", "float32", "bfloat16", "uint8"), (0, 1)
    ):
        shared_memory.PAST_CACHE_BYTES, n = 1 if past else 1 << 30, nbytes // numpy_dtype(dtype).itemsize
        handed = [np.random.default_rng(k).standard_normal(n * mesh.size) * 9 for k in range(mesh.size)]
        xs = [np.abs(x).astype(numpy_dtype(dtype)) for x in handed]
        total = xs[0].astype(accumulator_dtype(xs[0].dtype))
        for x in xs[1:]:
            total = total + x.astype(total.dtype)
        wanted = total.astype(xs[0].dtype)
        x, out = placed(space, xs[mesh.rank]), placed(space[HALF:], wanted[:n] * 0)
        mesh.bind(operands.ReduceScatter(x, out, 0, [n] * mesh.size, axes), planned=True)()
        assert out.tobytes() == wanted[n * index : n * (index + 1)].tobytes(), (n, dtype, past)
        mesh.bind(operands.AllReduce(x, axes), planned=True)()
        assert x.tobytes() == wanted.tobytes(), (n, dtype, past)


def check_step(mesh: Mesh, monkey: dict[str, Any]) -> None:
    """A step with each kind of collective sends no message, and computes what the simulated mesh does."""
    a, b, c = mm.Dimension("a", 16), mm.Dimension("b", 24), mm.Dimension("c", 8)
    with mm.Graph() as graph:
        x = mm.placeholder("x", [a, b])
        w = mm.get_variable("w", [b, c], initializer=mm.random_normal_initializer(), storage="b:;c:rows")
        y = mm.einsum([x, w], [a, c])
        z = mm.constrain(mm.einsum([mm.square(x), w], [a, c]), "a:rows")
        moved = mm.constrain(z, "a:;c:rows")
        fetches = {
            "sum": mm.reduce_sum(y),
            "z": z,
            "moved": moved,
            "whole": mm.constrain(x, "b:"),
            "rolled": mm.shift(x, 3, "b", wrap=True),
        }
    fed = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    kept = dict(monkey)
    monkey.update(dict.fromkeys(monkey, refused))
    step = mm.compile(graph, mesh, "b:rows", fetches=fetches)
    monkey.update(kept)
    kinds = {i.kind for i in step.program.instructions if i.communicates}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift"}, kinds
    got = step(fed)
    wanted = mm.compile(graph, mm.SimulatedMesh(mesh.shape), "b:rows", fetches=fetches)(fed)
    for name in fetches:
        x, y = (np.asarray(r[name].numpy() if name != "sum" else r[name]) for r in (got, wanted))
        assert x.tobytes() == y.tobytes(), (name, x, y)


def refused(*arguments: Any) -> None:
    raise AssertionError(f"a step goes through MPI: {arguments}")


def main() -> None:
    count, used = 0, 0
    for text in MESHES[MPI.COMM_WORLD.size]:
        mesh, simulated = Mesh(text), SimulatedMesh(text)
        space = mesh.allocate(2 * HALF)
        shared: Any = mesh._shared  # pyright: ignore[reportPrivateUsage]
        assert mesh.size == 1 or shared.region_of(space) is not None
        for case in cases(text):
            shared_memory.PAST_CACHE_BYTES = 1 if count % 3 else 1 << 30
            shared_memory.PAST_CACHE_RUN = 1
            check_case(case, mesh, simulated, space)
            count += 1
        if mesh.size > 1:
            check_races(mesh, space, 2000)
            check_long_runs(mesh, space)
            check_long_sums(mesh, space)
            used += 1
        if mesh.size > 1 and ";" not in text:
            check_step(mesh, mesh._collectives.BINDERS)  # pyright: ignore[reportPrivateUsage]
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} cases on {used} meshes")


main()
