"""Under mpirun -n 4: a program with an MPI life of its own that uses meshmpi as a library.

Each function is a case; all run in one job.  Prints ``<case> ok`` on rank 0 after each.
"""

from __future__ import annotations

import contextlib
import io
import sys

import numpy as np
from mpi4py import MPI

import meshmpi as mm

WORLD = MPI.COMM_WORLD
X, W = np.arange(24.0).reshape(4, 6) / 10, np.linspace(-1, 1, 30).reshape(6, 5)


def product(mesh, layout):
    """A step that multiplies x by the variable w, and the two fetches: split, and a number."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:6", "float64")
        w = mm.get_variable("w", "io:6;hidden:5", "float64", W)
        y = mm.einsum([x, w], "batch:4;hidden:5")
        total = mm.reduce_sum(y)
    return mm.compile(graph, mesh, layout, fetches={"y": y, "total": total})


def refused(call, *words):
    try:
        call()
    except mm.MeshmpiError as error:
        missing = [w for w in words if w not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError("nothing was refused")


def halves_of_the_job():
    """Two meshes at a time, over communicators that the user has split."""
    half = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    step = product(mm.Mesh("rows:2", comm=half), "batch:rows")
    scale = 1.0 + WORLD.rank % 2
    out = step(x=scale * X)
    np.testing.assert_allclose(out["y"].numpy(), scale * X @ W)
    half.Free()
    np.testing.assert_allclose(step(x=X)["y"].numpy(), X @ W, err_msg="the mesh has its own comm")


def some_of_the_ranks():
    """Three ranks compute, the fourth does something else meanwhile."""
    some = WORLD.Split(0 if WORLD.rank < 3 else MPI.UNDEFINED, WORLD.rank)
    if WORLD.rank < 3:
        out = product(mm.Mesh("rows:3", comm=some), "hidden:rows")(x=X)
        np.testing.assert_allclose(out["y"].numpy(), X @ W)
        if WORLD.rank == 0:
            WORLD.send(out["total"], 3, tag=7)
    else:
        assert some == MPI.COMM_NULL
        np.testing.assert_allclose(WORLD.recv(source=0, tag=7), (X @ W).sum())


def messages_of_the_user():
    """A receive from anyone with any tag is pending while steps run; it gets the user's message."""
    mesh = mm.Mesh("rows:2;cols:2")
    step = product(mesh, "batch:rows;hidden:cols")
    message = np.zeros(3)
    pending = WORLD.Irecv(message, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    for k in range(5):
        np.testing.assert_allclose(step(x=k * X)["y"].numpy(), k * X @ W)
    assert not pending.Test(), "it took a message of ours"
    WORLD.Barrier()  # nobody sends before all have looked
    sent = WORLD.Isend(np.full(3, float(WORLD.rank)), (WORLD.rank + 1) % 4, tag=11)
    pending.Wait()
    sent.Wait()
    assert message.tolist() == [(WORLD.rank - 1) % 4] * 3


def printing_on_one_rank():
    """Only one rank asks for text, names, sizes and its block: nobody waits."""
    out = product(mm.Mesh("rows:2;cols:2"), "batch:rows;hidden:cols")(x=X)
    y = out["y"]
    if WORLD.rank == 2:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print(y, repr(out), y.shape, y.dims, y.dtype, y.ndim, y.size, len(y))
        shown = text.getvalue()
        assert "float64[batch=4/rows, hidden=5/cols]" in shown
        assert "block [2:4, 0:3] of rank 2" in shown
        np.testing.assert_allclose(y.local, (X @ W)[2:4, 0:3])
        assert y.ranges == ((2, 4), (0, 3))
        assert f"{y.local}" in shown
    WORLD.Barrier()


def arrays_only_where_they_are_whole():
    """What would have to communicate refuses and says so; what is not split is an array."""
    mesh = mm.Mesh("rows:2;cols:2")
    y = product(mesh, "batch:rows;hidden:cols")(x=X)["y"]
    words = (f"rank {WORLD.rank}", "(2, ", "of (4, 5)", "x.numpy() first, on every rank", "x.local")
    refused(lambda: np.asarray(y), *words)
    refused(lambda: np.sum(y), *words)
    refused(lambda: y[0], "an index", *words)
    refused(lambda: list(y), "a loop", *words)
    np.testing.assert_allclose(y.numpy()[1], (X @ W)[1])
    whole = product(mesh, "io:rows")(x=X)["y"]
    np.testing.assert_allclose(np.asarray(whole), X @ W)
    np.testing.assert_allclose(whole[1, 2:], (X @ W)[1, 2:])
    assert np.asarray(whole, np.float32).dtype == np.float32


def several_meshes():
    """Meshes of the same ranks work in turns; each has its communicator."""
    flat, square = mm.Mesh("all:4"), mm.Mesh("rows:2;cols:2")
    a, b = product(flat, "batch:all"), product(square, "io:cols;batch:rows")
    for k in range(3):
        np.testing.assert_allclose(a(x=k * X)["y"].numpy(), k * X @ W)
        np.testing.assert_allclose(b(x=k * X)["total"], (k * X @ W).sum())


def many_meshes_in_turn():
    """Many meshes, freed in turn; a freed one says so, and tells what needs no other rank."""
    for k in range(60):
        with mm.Mesh("rows:2;cols:2") as mesh:
            ones = np.ones(3)
            mesh.all_reduce(ones, ("rows",))
            mesh.all_reduce(ones, ("rows", "cols"))
            assert ones[0] == 8 and not mesh.freed, k
        assert mesh.freed
    step = product(mesh := mm.Mesh("rows:4"), "batch:rows")
    y = step(x=X)["y"]
    mesh.free()
    mesh.free()
    assert y.local.shape == (1, 5) and "block [" in repr(y)
    refused(lambda: step(x=X), "was freed", "Make a new mm.Mesh()")
    refused(lambda: mesh.communicator(("rows",)), "was freed")
    refused(y.numpy, "was freed")


CASES = [
    halves_of_the_job,
    some_of_the_ranks,
    messages_of_the_user,
    printing_on_one_rank,
    arrays_only_where_they_are_whole,
    several_meshes,
    many_meshes_in_turn,
]

if __name__ == "__main__":
    for case in CASES:
        case()
        WORLD.Barrier()
        if WORLD.rank == 0:
            print(case.__name__, "ok")
            sys.stdout.flush()
