"""What made the first NaN or infinity of a step: its tensor, line, rank and element."""

from __future__ import annotations

import math

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.checking.diagnose import first_wrong, needed_bytes
from meshmpi.compiler.lowering import lower
from meshmpi.dims import Layout
from meshmpi.nn.optimize import AdamW

LAYOUTS = [
    ("a:1", ""),
    ("a:2", "batch:a"),
    ("a:2", "hidden:a"),
    ("a:2", ""),
    ("a:2;b:2", "batch:a;hidden:b"),
    ("a:4", "batch:a"),
]
HERE = __file__


def model(x):
    """[batch=8, io=4] -> the loss, and name -> line of the tensors that tests look for."""
    lines = {}
    h = mm.dense(x, mm.Dimension("hidden", 8), name="first")
    e = mm.exp(h)
    lines["exp"] = e.source.line
    y = mm.dense(e, mm.Dimension("out", 4), name="second")
    return y, lines


def overflow(x):
    y, lines = model(x)
    return mm.reduce_mean(mm.square(y)), lines["exp"]


def log_of_zero(x):
    y, _ = model(x)
    p = mm.relu(mm.multiply(y, 0.0))
    logs = mm.log(p)
    return mm.negative(mm.reduce_mean(logs)), logs.source.line


def product_with_mask(x):
    """-inf of a mask is no mistake; what becomes NaN of it is."""
    y, _ = model(x)
    masked = mm.where(mm.greater(y, 1e30), y, -math.inf)
    bad = mm.subtract(masked, mm.reduce_max(masked, reduced_dim="out"))
    return mm.reduce_mean(mm.exp(bad)), bad.source.line


def unused_nan(x):
    """A NaN that nobody uses is no mistake: the overflow behind it is."""
    y, lines = model(x)
    root = mm.sqrt(mm.subtract(-1.0, mm.square(y)))
    used = mm.where(mm.greater_equal(mm.square(y), 0.0), y, root)
    return mm.reduce_mean(mm.add(used, y)), lines["exp"]


def compiled(make, mesh, layout, **options):
    with mm.Graph() as graph:
        loss, line = make(mm.placeholder("x", "batch:8;io:4"))
        optimizer = AdamW(0.01)
        updates = optimizer.minimize(loss, watch=[loss])
    fetches = {"loss": loss, "finite": optimizer.finite}
    step = mm.compile(graph, mesh, layout, fetches=fetches, updates=updates, **options)
    program = lower(graph, mesh.shape, Layout(layout), fetches, [])
    return step, program, line


def data():
    return np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)


def state(step):
    return {(name, rank): b.tobytes() for name, blocks in step.variables.blocks.items() for rank, b in blocks.items()}


@pytest.mark.parametrize("whole", [False, True], ids=["lowered", "compiled"])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_an_overflow_is_named_with_its_line_and_element(mesh, layout, whole):
    step, program, line = compiled(overflow, mm.SimulatedMesh(mesh), layout)
    step(x=data())
    before = state(step)
    x = data()
    x[5] = 1e3 * np.abs(x[5])
    step.assign({"first/kernel": np.ones((4, 8), np.float32)})
    before = state(step)
    assert not step(x=x)["finite"] and state(step) == before
    found = first_wrong(step, None if whole else program, 1)
    text = str(found)
    assert f"at {HERE}:{line}" in text and "exp" in text and "+inf" in text
    held = dict(zip(found.type.shape.names, found.found.index, strict=True))
    assert held["batch"] == 5
    group = mm.MeshShape(mesh)
    assert found.rank == min(
        r for r in range(group.size) if (b := found.type.block(group, group.coordinates(r)))[0][0] <= 5 < b[0][1]
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("make", [log_of_zero, product_with_mask])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_minus_infinity_is_named_where_it_is_no_mask(make, mesh, layout):
    step, program, line = compiled(make, mm.SimulatedMesh(mesh), layout)
    assert not step(x=data())["finite"]
    assert f"at {HERE}:{line}" in str(first_wrong(step, program, 0))


def test_what_became_of_minus_infinity_is_named_too():
    step, program, _ = compiled(log_of_zero, mm.SimulatedMesh("a:1"), "")
    step(x=data())
    text = str(first_wrong(step, program, 0))
    assert "'log'" in text.split("becomes wrong in")[0] and "negative" in text


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_a_nan_that_nobody_uses_is_not_named(mesh, layout):
    step, program, line = compiled(unused_nan, mm.SimulatedMesh(mesh), layout)
    step.assign({"first/kernel": np.full((4, 8), 1e3, np.float32)})
    assert not step(x=np.abs(data()))["finite"]
    assert f"at {HERE}:{line}" in str(first_wrong(step, program, 0))


def test_a_finite_step_has_no_culprit():
    step, program, _ = compiled(overflow, mm.SimulatedMesh("a:2"), "batch:a")
    assert step(x=data())["finite"]
    assert first_wrong(step, program, 0) is None
    assert needed_bytes(program) > 0


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_data_and_variables_that_came_wrong_are_named(mesh, layout):
    step, program, _ = compiled(overflow, mm.SimulatedMesh(mesh), layout)
    x = data()
    x[6, 1] = np.nan
    assert not step(x=x)["finite"]
    text = str(first_wrong(step, program, 0))
    assert "feed 'x'" in text and "[batch=6, io=1]" in text
    blocks = step.variables.blocks["second/kernel"]
    rank = max(blocks)
    blocks[rank][-1, 2] = np.inf
    step(x=data())
    found = first_wrong(step, program, 1)
    assert found.rank == rank and "variable 'second/kernel'" in str(found)
    assert "[hidden=7, out=2]" in str(found) and f"on rank {rank}" in str(found)


def test_dropout_of_the_step_is_drawn_again():
    """The number of the step decides which elements are dropped, and so what is wrong."""

    def dropping(x):
        kept = mm.dropout(x, True, rate=0.5)
        y, lines = model(mm.multiply(kept, 1e4))
        return mm.reduce_mean(mm.square(y)), lines["exp"]

    step, program, line = compiled(dropping, mm.SimulatedMesh("a:2"), "batch:a")
    places = set()
    for number in range(4):
        assert not step(x=data())["finite"]
        found = first_wrong(step, program, number)
        assert f"at {HERE}:{line}" in str(found)
        places.add((found.found.inf, found.found.index))
    assert len(places) > 1
    assert step.step_number == 4
