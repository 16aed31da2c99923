"""Reductions in the background: started early, waited for late, and nothing else changes."""

from __future__ import annotations

import pytest

import meshmpi as mm
from meshmpi.compiler.passes.messages import overlap
from meshmpi.errors import ProgramError
from meshmpi.ir.program import Program
from meshmpi.ir.verify import verify
from meshmpi.launch.launch import launch
from tests.passes.overlap_model import LAYERS, everything_counts, losses, network


@pytest.fixture
def program(monkeypatch) -> Program:
    everything_counts(monkeypatch)
    graph, loss, updates = network()
    return mm.plan(graph, "rows:2", "batch:rows", fetches=[loss], updates=updates, overlap=True).program


def test_gradients_travel_during_the_backward_pass(program: Program):
    kinds = [(i.kind, i.in_background) for i in program.instructions]
    starts = [n for n, (kind, start) in enumerate(kinds) if kind == "all_reduce" and start]
    waits = [n for n, (kind, _) in enumerate(kinds) if kind == "wait"]
    products = [n for n, (kind, _) in enumerate(kinds) if kind == "contract"]
    assert len(starts) == len(waits) >= LAYERS - 1
    assert min(starts) < max(products) < min(waits), "the first starts before the last product"


def test_a_start_follows_what_it_needs(program: Program):
    for n, i in enumerate(program.instructions):
        if i.in_background:
            assert i.inputs[0] in program.instructions[n - 1].outputs or (program.instructions[n - 1].in_background)


@pytest.mark.parametrize("layout", ["batch:rows", "batch:rows;d1:cols;d3:cols", "d2:rows"])
def test_values_and_traffic_stay(monkeypatch, layout: str):
    everything_counts(monkeypatch)
    plain, one = losses(mm.SimulatedMesh("rows:2;cols:3"), layout, overlap=False)
    early, two = losses(mm.SimulatedMesh("rows:2;cols:3"), layout, overlap=True)
    assert early == plain
    assert two.cost.bytes_sent == one.cost.bytes_sent


def test_short_messages_and_those_without_work_behind_them_stay():
    graph, loss, updates = network()
    p = mm.plan(graph, "rows:2", "batch:rows", fetches=[loss], updates=updates, overlap=True)
    assert not any(i.in_background for i in p.program.instructions)


def test_the_verifier_wants_one_wait_each(program: Program):
    broken = [i for i in program.instructions if i.kind != "wait"]
    with pytest.raises(ProgramError, match="uses a result before its wait|used before it is made"):
        verify(program.with_instructions(broken))
    last = max(n for n, i in enumerate(program.instructions) if i.kind == "wait")
    twice = [*program.instructions[: last + 1], program.instructions[last]]
    with pytest.raises(ProgramError, match="made twice|before its wait"):
        verify(program.with_instructions(twice))


def test_running_it_twice_changes_nothing(program: Program):
    assert overlap(program).text() == program.text()


@pytest.mark.quick(1)
@pytest.mark.parametrize("shared", ["off", "on"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_real_ranks(ranks: int, shared: str):
    """In the background by MPI; in memory that ranks share they are done at once."""
    environment = {"MESHMPI_SHARED": shared}
    program = ["-m", "tests.passes.check_overlap"]
    done = launch(ranks, program, timeout_seconds=120, capture_output=True, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "the same losses and bytes"
