"""Meshes and their collectives.

SimulatedMesh against plain NumPy on the global arrays, and, under a real mpirun, Mesh against
SimulatedMesh, over one table of cases (`mpi_programs.collective_cases`).
"""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from meshmpi.dims import MeshShape
from meshmpi.errors import MeshError, ProgramError
from meshmpi.ir import collective_bytes as cost
from meshmpi.ir.kinds import COLLECTIVES, bytes_sent
from meshmpi.launch.launch import launch
from meshmpi.runtime.operands import replaced
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.runtime.world import alternatives, size_error
from tests.runtime.mpi_programs.collective_cases import (
    MESHES,
    Case,
    call,
    cases,
    inputs,
    np_dtype,
    ordered_subsets,
    outputs,
)

ALL_MESHES = [text for texts in MESHES.values() for text in texts]


def members(case: Case, rank: int) -> list[int]:
    """Ranks of the group of ``rank`` by number of block: the mesh as an array, transposed."""
    mesh = case.mesh
    grid = np.arange(mesh.size).reshape(mesh.sizes)
    at = mesh.coordinates(rank)
    index = tuple(slice(None) if name in case.axes else at[name] for name in mesh.names)
    left = [name for name in mesh.names if name in case.axes]
    return [int(r) for r in grid[index].transpose([left.index(a) for a in case.axes]).ravel()]


def total(case: Case, ranks: list[int]) -> np.ndarray:
    """The reduction over ``ranks``, in 64 bits."""
    if case.dtype == "bool":
        stack = np.stack([case.whole(r) for r in ranks])
        return stack.any(0) if case.op in ("sum", "max") else stack.all(0)
    wide = np.float64 if case.dtype in ("float32", "float64", "bfloat16") else np.int64
    stack = np.stack([case.whole(r).astype(wide) for r in ranks])
    return getattr(stack, case.op)(0).astype(np_dtype(case.dtype))


def wanted(case: Case, rank: int) -> np.ndarray:
    ranks = members(case, rank)
    n, mine = len(ranks), ranks.index(rank)
    if case.kind == "all_reduce":
        return total(case, ranks)
    if case.kind == "reduce_scatter":
        return np.array_split(total(case, ranks), n, case.axis)[mine]
    if case.kind == "all_gather":
        return case.whole(min(ranks))
    if case.kind == "all_to_all":
        return np.array_split(case.whole(min(ranks)), n, case.axis)[mine]
    return shifted(case, case.whole(min(ranks)), mine)


def shifted(case: Case, whole: np.ndarray, block: int) -> np.ndarray:
    """Element by element: y[o] = x_j[stride * o + offset_j], 1 where no input has one."""
    e, rows = case.exchange, []
    for o in range(*e.target(block)):
        row = np.ones(replaced(whole.shape, case.axis, 1), whole.dtype)
        for n, offset in zip(e.sizes, e.offsets, strict=True):
            i = e.stride * o + offset
            i = i % n if e.wrap and n else i
            if 0 <= i < n and o < e.needed(block)[1]:
                row = np.take(whole, [i], case.axis)
        rows.append(row)
    start = np.take(whole, [], case.axis)
    return np.concatenate([start, *rows], case.axis)


@pytest.mark.quick(4)
@pytest.mark.parametrize("text", ALL_MESHES)
def test_simulated_collectives_equal_numpy(text: str):
    mesh = SimulatedMesh(text)
    for case in cases(text):
        xs, outs = inputs(case), outputs(case)
        call(case, mesh, xs, outs)
        got = xs if case.kind == "all_reduce" else outs
        for rank in range(mesh.size):
            want = wanted(case, rank)
            assert got[rank].dtype == want.dtype == np_dtype(case.dtype)
            np.testing.assert_array_equal(got[rank], want, err_msg=f"{case} rank {rank}")


def test_the_table_covers_what_it_should():
    table = [case for text in ALL_MESHES for case in cases(text)]
    for kind in COLLECTIVES:
        mine = [c for c in table if c.kind == kind]
        assert {c.dtype for c in mine} == {"float32", "float64", "bfloat16", "int32", "int64", "uint8", "bool"}
        assert {c.axes for c in mine if c.mesh == MeshShape("rows:2;cols:3")} == {
            (),
            ("rows",),
            ("cols",),
            ("rows", "cols"),
            ("cols", "rows"),
        }
        if kind in ("reduce_scatter", "all_gather", "all_to_all", "shift"):
            assert {c.axis for c in mine} == {0, 1, 2}
        if kind in ("reduce_scatter", "all_reduce"):
            assert {c.op for c in mine} == {"sum", "max", "min", "prod"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", list(MESHES))
def test_mpi_collectives_equal_simulated(ranks: int):
    done = launch(
        ranks, ["-m", "tests.runtime.mpi_programs.check_collectives"], timeout_seconds=240, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count = re.fullmatch(r"(\d+) collectives agree", done.stdout.strip())
    assert count and int(count[1]) > 500, done.stdout


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_collectives_in_shared_memory_equal_simulated(ranks: int):
    done = launch(ranks, ["-m", "tests.runtime.mpi_programs.check_shared"], timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    count = re.fullmatch(r"(\d+) cases on (\d) meshes", done.stdout.strip())
    assert count and int(count[1]) > 300 and int(count[2]) >= 1, done.stdout


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [4, 2, 3, 6])
def test_variables_held_once_equal_simulated(ranks: int):
    done = launch(ranks, ["-m", "tests.runtime.mpi_programs.check_once"], timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "held once"


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_mpi_mesh(ranks: int):
    done = launch(ranks, ["-m", "tests.runtime.mpi_programs.check_mesh"], timeout_seconds=120, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "mesh is right"


def test_importing_the_mesh_leaves_mpi_alone():
    code = (
        "import sys, meshmpi.runtime.mesh, meshmpi.runtime.simulated_mesh as s;"
        "s.SimulatedMesh('rows:2'); assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_mesh_of_one_rank_needs_no_mpirun():
    code = (
        "from meshmpi.runtime.mesh import Mesh; import numpy as np;"
        "m = Mesh('rows:1;cols:1'); x = np.ones(3); m.all_reduce(x, ('cols', 'rows'));"
        "print(m.coordinates, x.sum(), m.counters['all_reduce']['cols+rows'][:3])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "{'rows': 0, 'cols': 0} 3.0 [1, 3, 0]"


def said(error: MeshError) -> str:
    return f"{error.problem} {error.remedy}"


def test_size_error_has_the_alternatives():
    assert said(size_error(MeshShape("rows:4;cols:2"), 6)) == (
        "mesh {rows: 4, cols: 2} needs 8 ranks, but the communicator has 6."
        " Run with mpirun -n 8, or use one of {rows: 3, cols: 2}, {rows: 2, cols: 3}."
    )
    assert size_error(MeshShape("rows:4"), 3).remedy.endswith("mpirun -n 4, or use {rows: 3}.")
    assert said(size_error(MeshShape(""), 2)) == (
        "mesh {} needs 1 rank, but the communicator has 2. Run with mpirun -n 1."
    )
    assert "{rows: 5, cols: 1}, {rows: 1, cols: 5}" in str(size_error(MeshShape("rows:2;cols:2"), 5))


@pytest.mark.parametrize(("text", "ranks"), [("a:2;b:3;c:4", 24), ("a:1;b:8", 60), ("a:3", 7)])
def test_alternatives_use_all_ranks_once_each(text: str, ranks: int):
    found = alternatives(MeshShape(text), ranks)
    assert all(m.size == ranks and m.names == MeshShape(text).names for m in found)
    assert len(set(found)) == len(found)
    k, divisors = len(found[0].names), [d for d in range(1, ranks + 1) if ranks % d == 0]
    assert len(found) == {1: 1, 2: len(divisors)}.get(
        k, sum(1 for d in divisors for e in divisors if (ranks // d) % e == 0)
    )
    if MeshShape(text).size == ranks:
        assert found[0] == MeshShape(text)


def test_bytes_sent():
    assert bytes_sent("all_reduce", 100, 4, 4) == 600
    assert bytes_sent("all_reduce", 5, 4, 3) == 26
    assert bytes_sent("reduce_scatter", 100, 4, 4) == 300
    assert bytes_sent("all_gather", 100, 4, 4) == 1200
    assert bytes_sent("all_to_all", 100, 4, 4) == 300
    assert bytes_sent("shift", 100, 4, 4) == 400
    assert all(bytes_sent(kind, 100, 4, 1) == 0 for kind in COLLECTIVES)
    with pytest.raises(ValueError, match="broadcast"):
        bytes_sent("broadcast", 1, 1, 2)


@pytest.mark.parametrize(("rows", "widths"), [(1, [5, 3]), (7, [2, 2, 1]), (3, [100, 0, 99]), (4, [0, 0]), (0, [3])])
def test_pieces_cover_every_element_once(monkeypatch: pytest.MonkeyPatch, rows, widths):
    for limit in (4, 16, 64, 10_000):
        monkeypatch.setattr(cost, "PIECE_BYTES", limit)
        seen = [np.zeros((rows, w), int) for w in widths]
        for piece in cost.pieces(rows, widths, 4):
            first, end, low, high = piece
            for block in seen:
                block[first:end, low:high] += 1
            elements = cost.piece_elements(widths, piece)
            assert elements == sum(s[first:end, low:high].size for s in seen)
            assert elements * 4 <= max(limit, 4 * len(widths))
        assert all((s == 1).all() for s in seen)


def test_no_workspace_where_blocks_are_contiguous():
    assert cost.all_reduce_workspace_bytes((1000, 1000), "float32") == 0
    assert cost.all_reduce_workspace_bytes((10, 10), "bfloat16") == 400
    assert cost.all_gather_workspace_bytes((1, 50, 8), "float32", 1, [50, 50]) == 0
    assert cost.all_gather_workspace_bytes((2, 50, 8), "float32", 1, [50, 50]) == 2 * 100 * 8 * 4
    assert cost.all_to_all_workspace_bytes((8, 4), "float32", 0, 1, [4, 4], [4, 4]) == 4 * 8 * 4
    assert cost.all_to_all_workspace_bytes((1, 8, 4), "int32", 1, 0, [4, 4], [1, 1]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", np.ones((2, 3)).T, "rows", "sum"), "not C-contiguous"),
        (("all_reduce", np.ones(3), "rows", "mean"), "'mean' is not a reduction"),
        (("all_reduce", [1.0], "rows", "sum"), "a list, not an array"),
        (("all_reduce", np.ones(3), ("rows", "rows"), "sum"), "'rows' twice"),
        (("all_gather", np.ones(3), np.ones(5), 0, [3, 3], "rows"), "output is float64[5]"),
        (("all_gather", np.ones(3), np.ones(5), 0, [2, 3], "rows"), "a block of 2"),
        (("all_gather", np.ones(2), np.ones(4), 0, [4], "rows"), "a group of 2 ranks"),
        (("reduce_scatter", np.ones(4), np.ones(2), 0, [3, 3], "rows"), "an input of 4"),
        (("reduce_scatter", np.ones(4), np.ones(3), 0, [2, 2], "rows"), "output is float64[3]"),
        (("all_to_all", np.ones((4, 2)), np.ones((2, 4)), 0, 0, [2, 2], [2, 2], "rows"), "itself"),
        (("all_to_all", np.ones((4, 2)), np.ones((4, 2)), 0, 1, [2, 2], [2, 2], "rows"), "[2, 2]"),
    ],
)
def test_calls_that_cannot_work_are_refused(arguments: tuple, message: str):
    """The same checks stand before the MPI calls; `check_mesh` tries some of them there."""
    kind, *rest = arguments
    lists = [[a] * 2 if isinstance(a, np.ndarray) or a == [1.0] else a for a in rest]
    with pytest.raises(ProgramError, match=re.escape(message)):
        getattr(SimulatedMesh("rows:2"), kind)(*lists)


def test_unknown_axis_is_refused_with_a_suggestion():
    with pytest.raises(MeshError, match="Did you mean 'rows'"):
        SimulatedMesh("rows:2").all_reduce([np.ones(1)] * 2, ("row",))


def test_simulated_sums_go_by_rank():
    mesh = SimulatedMesh("rows:3")
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    xs = [np.full(2, v, np.float32) for v in values]
    mesh.all_reduce(xs, ("rows",))
    assert xs[0][0] == (values[0] + values[1]) + values[2]


def test_groups_partition_the_mesh():
    for text in ALL_MESHES:
        mesh = SimulatedMesh(text)
        for axes in ordered_subsets(mesh.shape):
            groups = mesh.groups(axes)
            assert sorted(r for g in groups for r in g) == list(range(mesh.size))
            assert all(mesh.group(axes, r) in groups for r in range(mesh.size))
