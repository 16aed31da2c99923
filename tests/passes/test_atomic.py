"""Steps whose variables change after all collectives: any layout, the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.runtime.compiled import memory_plan

LAYOUTS = [
    ("a:2", "batch:a", None),
    ("a:2", "hidden:a", None),
    ("r:2;c:2", "batch:r;hidden:c", None),
    ("a:2", "batch:a", "io:a"),
    ("r:2;c:2", "batch:r", "hidden:c"),
    ("a:1", "", None),
]


def step_of(mesh, layout, storage, optimizer=None, *, atomic=True, **options):
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:8;io:4")
        mean = mm.get_variable("mean", "io:4", initializer=mm.zeros_initializer(), trainable=False)
        early = mm.assign(mean, 0.9 * mean + 0.1 * mm.reduce_mean(x, reduced_dim="batch"))
        h = mm.relu(mm.dense(x, mm.Dimension("hidden", 6)))
        loss = mm.reduce_mean(mm.square(mm.dense(h, mm.Dimension("out", 4))))
        optimizer = optimizer or mm.optimize.Momentum(0.1, 0.9)
        updates = [early, *optimizer.minimize(loss)]
    return mm.compile(
        graph,
        mm.SimulatedMesh(mesh),
        layout,
        fetches=[loss],
        updates=updates,
        storage=storage,
        atomic=atomic,
        **options,
    )


def losses(step, count=3):
    data = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    return [float(next(iter(step(x=data).values()))) for _ in range(count)]


def first_write(step) -> int:
    """The first instruction that changes the memory of a variable."""
    plan = memory_plan(step.program)
    return next(
        n
        for n, i in enumerate(step.program.instructions)
        if i.kind == "write"
        or (i.kind not in ("read", "view") and any(str(plan.root(v)).startswith("variable") for v in i.outputs))
    )


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"optimize": False}], ids=str)
@pytest.mark.parametrize(("mesh", "layout", "storage"), LAYOUTS)
def test_no_collective_follows_a_write_and_numbers_are_the_same(mesh, layout, storage, options):
    step = step_of(mesh, layout, storage, **options)
    kinds = [i.kind for i in step.program.instructions]
    assert not set(kinds[first_write(step) :]) & {*COLLECTIVES, "wait"}
    plain = step_of(mesh, layout, storage, atomic=False, **options)
    assert sorted(kinds) == sorted(i.kind for i in plain.program.instructions)
    assert losses(step) == losses(plain)
    for name in plain.variables:
        np.testing.assert_array_equal(step.variables[name], plain.variables[name])


def test_without_it_writes_come_between_collectives():
    """So that the test above shows something."""
    step = step_of("a:2", "batch:a", None, atomic=False, optimize=False)
    kinds = [i.kind for i in step.program.instructions]
    assert set(kinds[first_write(step) :]) & set(COLLECTIVES)


def test_a_step_that_failed_while_ranks_waited_can_be_ended():
    step, whole = (step_of("a:2", "batch:a", None) for _ in range(2))
    executor = step.executor
    expected = losses(whole, 4)
    found = losses(step, 2)
    call = executor._calls[executor._committed - 1]

    def lost() -> None:
        executor.progress = "ready"
        raise ConnectionError("a rank was lost")

    before = {name: step.variables[name].copy() for name in step.variables}
    executor._calls[executor._committed - 1] = lost
    with pytest.raises(ConnectionError):
        losses(step, 1)
    assert all(np.array_equal(before[name], step.variables[name]) for name in before)
    executor._calls[executor._committed - 1] = call
    found += [float(next(iter(step.finish().values())))]
    assert (step.step_number, executor.runs, executor.progress) == (3, 3, "before")
    assert found + losses(step, 1) == expected
    assert all(np.array_equal(whole.variables[n], step.variables[n]) for n in before)
