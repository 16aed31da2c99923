"""Programs that must fail: ``python -m tests.mpirun.bad_programs NAME`` under mpirun."""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import meshmpi as mm

RANK = MPI.COMM_WORLD.rank
LAST = MPI.COMM_WORLD.size - 1


def _step(mesh: mm.Mesh, factor: float = 2.0, layout: str = "a:ranks"):
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:6;b:2")
        y = mm.reduce_sum(x * factor)
    return mm.compile(graph, mesh, layout, fetches=[y])


def too_many_ranks() -> None:
    mm.Mesh("rows:4;cols:2")


def another_graph_on_one_rank() -> None:
    _step(mm.Mesh({"ranks": LAST + 1}), factor=2.0 + (RANK == LAST))


def another_layout_on_one_rank() -> None:
    _step(mm.Mesh({"ranks": LAST + 1}), layout="b:ranks" if RANK == LAST else "a:ranks")


def one_rank_raises_between_steps() -> None:
    step = _step(mm.Mesh({"ranks": LAST + 1}))
    for n in range(10_000):
        if RANK == LAST and n == 3:
            raise RuntimeError(f"deliberate failure on rank {RANK}")
        step(x=np.ones((6, 2), np.float32))


def one_rank_misses_a_feed() -> None:
    step = _step(mm.Mesh({"ranks": LAST + 1}))
    step({} if RANK == LAST else {"x": np.ones((6, 2), np.float32)})
    time.sleep(30)


def an_index_outside_on_one_rank() -> None:
    with mm.Graph() as graph:
        ids = mm.placeholder("ids", "a:6", "int32")
        y = mm.gather(mm.get_variable("table", "v:5;b:2"), ids, "v")
    step = mm.compile(graph, mm.Mesh({"ranks": LAST + 1}), "a:ranks", fetches=[y], debug=True)
    step(ids=np.array([0, 1, 2, 3, 4, 5], np.int32))[y].numpy()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
