"""The table of cases on real ranks: test_mpirun.py runs it under mpirun, plain pytest does not.

Every result must be the oracle's, and every byte sent and held must have been predicted.
"""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import meshmpi as mm
from meshmpi.compiler.lowering import placement
from meshmpi.errors import LayoutError
from tests.layouts import random_layouts
from tests.ops.build import UNEVEN, Case, build
from tests.ops.cases import CASES
from tests.ops.run import check, compile_case, expected
from tests.ops.test_table import MANY_KINDS

pytestmark = pytest.mark.mpi

MESHES = {1: "rows:1;cols:1", 2: "rows:2;cols:1", 3: "rows:1;cols:3", 4: "rows:2;cols:2", 6: "rows:2;cols:3"}
CASES_BY_SPEED = [c if c.name in MANY_KINDS else pytest.param(c, marks=pytest.mark.matrix) for c in CASES]
"""`make test` runs rows that have nearly every kind of instruction between them."""


@pytest.fixture(scope="module")
def mesh():
    return mm.Mesh(MESHES[MPI.COMM_WORLD.size])


@pytest.fixture(autouse=True)
def once_per_host(monkeypatch: pytest.MonkeyPatch):
    """Small variables are held once too, as large ones are."""
    monkeypatch.setattr(placement, "SMALLEST_BYTES", 0)


@pytest.mark.parametrize("case", CASES_BY_SPEED, ids=lambda c: c.name)
def test_case(case: Case, mesh: mm.Mesh):
    """In one layout, two on four ranks: more run on simulated meshes, here it is the executor that is tested."""
    built = build(case, UNEVEN)
    steps = expected(built)
    number = (2 if mesh.size == 4 else 1) + 4 * case.refuses
    for n, layout in enumerate(random_layouts(built.graph, mesh.shape, number) or [""]):
        try:
            check(built, steps, mesh, layout, optimize=n == 0)
        except LayoutError:
            assert case.refuses


def test_results_equal_those_of_the_simulated_mesh(mesh: mm.Mesh):
    """Exactly, on groups of two ranks; the order of a sum over more is the MPI library's."""
    built = build(next(c for c in CASES if c.name == "attention_by_hand"), UNEVEN)
    layout = "a:rows;c:cols"
    exact = max(mesh.shape.sizes) <= 2
    real = compile_case(built, mesh, layout, True)
    simulated = compile_case(built, mm.SimulatedMesh(mesh.shape, mesh.shared_axes()), layout, True)
    assert real.program.digest() == simulated.program.digest()
    feeds = {n: a for n, a in built.feeds.items() if n in real.program.feeds}
    a, b = real(feeds), simulated(feeds)
    for t in a:
        x, y = a[t].numpy(), b[t].numpy()
        assert np.array_equal(x, y) if exact else np.allclose(x, y, rtol=1e-13, atol=1e-13)


def test_a_rank_feeds_only_its_own_block(mesh: mm.Mesh):
    case = next(c for c in CASES if c.name == "matmul")
    built = build(case, UNEVEN)
    step = compile_case(built, mesh, "a:rows;b:cols", True)
    feeds = {n: mm.local(a[tuple(slice(*r) for r in step.feed_block(n))]) for n, a in built.feeds.items()}
    want = expected(built)[0]
    for t, value in step(feeds).items():
        whole = value.numpy()
        assert np.allclose(whole, want.fetches[t], rtol=1e-12, atol=1e-12)
        assert value.local.shape == value.type.local_sizes(mesh.shape, mesh.coordinates)


def test_printing_on_one_rank_does_not_hang(mesh: mm.Mesh):
    built = build(next(c for c in CASES if c.name == "matmul"), UNEVEN)
    step = compile_case(built, mesh, "a:rows", True)
    (value, *_) = step(built.feeds).values()
    if mesh.rank == 0:
        assert "ShardedArray" in repr(value) and "[a=5/rows, c=3]" in str(value)
