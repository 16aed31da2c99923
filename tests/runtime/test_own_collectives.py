"""Collectives that meshmpi itself makes: a rank that is left alone in one is seen to wait."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path

import pytest

import meshmpi
from meshmpi.launch.launch import TIMED_OUT, launch

BEGIN = """
import sys, time
from mpi4py import MPI
import numpy as np
import meshmpi as mm
r = MPI.COMM_WORLD.rank
"""
MESH = """
mesh = mm.Mesh("rows:2;cols:1")
def step():
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "batch:4;io:5"), mm.get_variable("w", "io:5;hidden:6")
        y = mm.reduce_sum(mm.einsum([x, w], "batch:4;hidden:6"))
    return mm.compile(graph, mesh, "batch:rows", fetches=[y])
mesh.all_reduce(np.ones(3), "rows")
"""
LEFT = r"HangError: rank 1 left the program by exit status 0 while other ranks still run.*"
REPLICAS = "from meshmpi.runtime.replicas import compared"
BUDDIES = """
from pathlib import Path
from meshmpi import checkpoint
store, buddies = step().variables, checkpoint.Buddies(mesh, "memory")
if r == 0: checkpoint.save(Path(sys.argv[1]), store, 1, {}, buddies=buddies, compared=True)
"""
ALONE = {
    "compile": ("if r == 0: step()", "(compile|debug)"),
    "mesh": ("if r == 0: mm.Mesh('all:2')", "mm.Mesh"),
    "replicas": (f"s = step()\n{REPLICAS}\nif r == 0: compared(s.variables, False, print)", "replicas"),
    "buddies": (BUDDIES, "buddies"),
}


def run(code: str, *words: str, ranks: int = 2, recover: bool = False) -> str:
    """What a job that must not hang says on stderr."""
    began = time.monotonic()
    done = launch(ranks, ["-c", BEGIN + code, *words], timeout_seconds=40, capture_output=True, recover=recover)
    assert done.returncode not in (0, TIMED_OUT), done.stderr
    assert time.monotonic() - began < 30.0
    assert done.stderr.count("HangError") <= 1
    return done.stderr


@pytest.mark.parametrize("what", ["compile", "mesh", "replicas", "buddies"])
def test_a_rank_that_is_left_alone(what: str, tmp_path: Path):
    code, kind = ALONE[what]
    text = run(MESH + code, str(tmp_path / "step"))
    assert re.search(LEFT + rf"rank 0 waits in {kind}\(", text), text


SURVIVORS = """
import os, signal
from meshmpi.guard.recovery import Survivors, is_loss
survivors = Survivors()
mesh = survivors.first(2, lambda comm: mm.Mesh("all:2", comm))
if sys.argv[1] == "after a loss":
    if r == 2: os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True: survivors.gathered(r)
    except Exception as error:
        assert is_loss(error)
        survivors.turn_back()
    survivors.agree(0)
    assert [lost.rank for lost in survivors.shrink()] == [2]
    mesh = survivors.first(2, lambda comm: mm.Mesh("all:2", comm))
assert survivors.gathered(r)[:2] == [0, 1] and survivors.given_by(1, r) == 1
if r != 1: survivors.gathered(r)
"""


@pytest.mark.parametrize(("ranks", "when"), [(2, "at once"), (3, "after a loss")])
def test_a_survivor_that_is_left_alone(ranks: int, when: str):
    text = run(SURVIVORS, when, ranks=ranks, recover=True)
    assert re.search(LEFT + r"rank 0 waits in gather\(\) over survivors", text), text


def test_a_mesh_against_a_collective():
    text = run(MESH + "mm.Mesh('all:2') if r == 0 else mesh.all_reduce(np.ones(3), 'rows')")
    assert re.search(r"different collectives: rank 0 waits in mm\.Mesh\(.*rank 1 waits in all_", text)


@pytest.mark.matrix
def test_after_calls_of_too_many_kinds():
    code = """
from meshmpi.guard import flight
flight.MOST_ENTRIES = 20 if r else 30
mesh = mm.Mesh("rows:2")
for n in range(1, 50):
    mesh.all_reduce(np.ones(n), "rows")
time.sleep(2.5)  # no alarm: what one rank calls by name is one of too many for the other
print("alarm is due", file=sys.stderr, flush=True)
if r == 0: mesh.all_reduce(np.ones(99), "rows")
"""
    text = run(code)
    assert text.index("alarm is due") < text.index("HangError"), text
    assert re.search(LEFT + "rank 0 waits in a collective after more than 30 different", text), text


def test_ranks_that_make_different_meshes():
    text = run("mm.Mesh('rows:2' if r else 'cols:2')")
    assert "MeshError: ranks make different meshes at the same time: rank 0 makes {cols: 2}; rank" in text


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_rank_that_leaves_before_the_first_mesh(chosen: int):
    text = run(f"if r == {chosen}: sys.exit(0)\nmm.Mesh('rows:2')")
    assert re.search(
        rf"HangError: rank {chosen} left the program by exit status 0 without a mesh, while"
        rf" rank {1 - chosen} waits in mm\.Mesh\(\) at",
        text,
    ), text


def test_a_rank_that_fails_before_the_first_mesh():
    text = run("if r == 1: raise ValueError('early')\nmm.Mesh('rows:2')")
    assert "[rank 1 of 2] Traceback" in text and text.count("ValueError: early") == 1
    text = run("if r == 1: sys.exit(3)\nmm.Mesh('rows:2')")
    assert "rank 1 left the program by exit status 3 without a mesh" in text


@pytest.mark.matrix
def test_a_rank_that_comes_late_to_the_first_mesh():
    code = """
from meshmpi.guard import meeting
meeting.NOTICE_SECONDS = 1.0
if r == 1: time.sleep(3)
mm.Mesh("rows:2")
"""
    done = launch(2, ["-c", BEGIN + code], timeout_seconds=40, capture_output=True)
    assert done.returncode == 0, done.stderr
    notes = re.findall(r"^meshmpi: rank 0 of this host waits for 1 s in mm.Mesh", done.stderr, re.M)
    assert len(notes) == 1, done.stderr


def test_ranks_that_make_no_mesh_leave_as_ever():
    began = time.monotonic()
    done = launch(2, ["-c", BEGIN + "MPI.COMM_WORLD.Barrier()"], timeout_seconds=40)
    assert done.returncode == 0 and time.monotonic() - began < 20.0


_COLLECTIVES = {
    "allgather",
    "gather",
    "bcast",
    "scatter",
    "alltoall",
    "allreduce",
    "reduce",
    "scan",
    "barrier",
    "Allgather",
    "Allgatherv",
    "Gather",
    "Gatherv",
    "Bcast",
    "Scatter",
    "Scatterv",
    "Alltoall",
    "Alltoallv",
    "Allreduce",
    "Reduce",
    "Barrier",
    "Dup",
    "Split",
    "Create_cart",
    "Sub",
    "Shrink",
    "Reduce_scatter",
    "Ibarrier",
    "Iallgather",
    "Iallreduce",
    "Ibcast",
}
_UNRECORDED = {
    "guard/meeting.py": "inside of the record of mm.Mesh, or the ranks that leave",
    "runtime/mesh.py _own": "inside of the record of mm.Mesh",
    "runtime/mesh.py _in_order": "inside of the record of mm.Mesh",
    "runtime/mesh.py _sub": "of this rank alone",
    "guard/watchdog.py join": "inside of the record of mm.Mesh",
    "guard/watchdog.py last_look": "between two barriers that ask again and again",
    "guard/host_link.py": "inside of the record of mm.Mesh",
    "guard/abort.py": "the barrier at the end, which asks again and again",
    "guard/recovery.py __init__": "before ranks know of each other",
    "guard/recovery.py shrink": "returns whoever is lost; all others come from agree",
    "guard/mesh_watch.py check_and_run": "inside of the record of the collective that is checked",
    "runtime/trace.py _clock_offset": "called by a recorded one",
    "runtime/probe.py": "a program of its own that the doctor runs with a limit",
    "checkpoint/buddies.py _sent": "called by a recorded one",
}
"""File, or function in it -> why its own calls of MPI need no record."""


def _raw_calls(path: Path) -> list[tuple[str, str, int]]:
    """Function, name and line of the collectives that are called at once, not handed on."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            if node.func.attr in _COLLECTIVES and re.search(r"comm|COMM_|world", of):
                found.append((function, node.func.attr, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_every_collective_is_recorded():
    """``run`` that is handed to `Mesh.outside` is an attribute, not a call."""
    package, used = Path(meshmpi.__file__).parent, set()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        for function, call, line in _raw_calls(path):
            allowed = {name, f"{name} {function}"} & set(_UNRECORDED)
            used |= allowed
            assert allowed or name in ("runtime/collectives.py", "runtime/shared.py"), (
                f"{name}:{line} calls {call} where the watchdog does not see it: hand it to"
                " mesh.outside(), or use agreement.gathered()"
            )
    assert used == set(_UNRECORDED), "what is gone needs no exception"
