"""Replicas: equal in every layout, and a flipped bit is found, named and repaired."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.launch.launch import launch
from meshmpi.nn.optimize import AdamW
from meshmpi.runtime.replicas import CHUNK_WORDS, Replicas, chunk_sums, compared, digest

LAYOUTS = [
    ("a:2", "batch:a", None),
    ("a:3", "batch:a", None),
    ("a:2", "hidden:a", None),
    ("a:2", "", None),
    ("a:2;b:3", "batch:a;hidden:b", None),
    ("a:2;b:2", "batch:a", "io:b"),
    ("a:2;b:2", "hidden:b", "io:a"),
    ("a:3", "batch:a", "io:a"),
]


def step_of(mesh, layout="batch:a", storage=None, width=8):
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:6;io:4")
        h = mm.relu(mm.dense(x, mm.Dimension("hidden", width), name="first"))
        y = mm.dense(h, mm.Dimension("out", 4), name="second")
        loss = mm.reduce_mean(mm.square(y))
        updates = AdamW(0.01, clip_norm=1.0).minimize(loss)
    return mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[loss], updates=updates, storage=storage)


def flip(block, element, bit):
    raw = block.reshape(-1)[element : element + 1].view(np.uint8)
    raw[bit // 8] ^= 1 << (bit % 8)


def replicated(step):
    """(variable, ranks that hold equal blocks), of every group of more than one rank."""
    for name, v in step.variables.types.items():
        shape = step.mesh.shape
        axes = tuple(a for a in shape.names if a not in v.type.used_axes)
        for group in shape.groups(axes) if axes else ():
            if len(group) > 1:
                yield name, group


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
def test_every_bit_changes_the_digest(dtype):
    rng = np.random.default_rng(0)
    for size in (1, 3, 8, 1000, CHUNK_WORDS * 8 // np.dtype(dtype).itemsize * 2 + 5):
        x = rng.integers(0, 100, size).astype(dtype)
        first = digest(x)
        for _ in range(40):
            element = int(rng.integers(size))
            bit = int(rng.integers(8 * x.itemsize))
            flip(x, element, bit)
            assert digest(x) != first
            flip(x, element, bit)
        assert digest(x) == first == digest(x.copy())


def test_the_digest_of_nothing_is_that_of_nothing():
    assert digest(np.zeros((0, 3), np.float32)) == digest(np.zeros((4, 0), np.float32)) == 0
    assert len(chunk_sums(np.zeros(CHUNK_WORDS * 2, np.float64))) == 3


@pytest.mark.parametrize(("mesh", "layout", "storage"), LAYOUTS)
def test_no_alarm_in_any_layout_and_every_flip_is_found(mesh, layout, storage):
    step = step_of(mesh, layout, storage)
    data = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    for _ in range(5):
        step(x=data)
        assert compared(step.variables, False, print) == ""
    rng, tried = np.random.default_rng(2), 0
    for name, group in replicated(step):
        block = step.variables.blocks[name][group[-1]]
        if not block.size:
            continue
        tried += 1
        element, bit = int(rng.integers(block.size)), int(rng.integers(8 * block.itemsize))
        flip(block, element, bit)
        (found,) = Replicas(step.variables).differences()
        assert found.name == name and found.ranks == group
        if len(group) > 2:
            assert found.damaged == group[-1:]
        else:
            assert found.damaged in ((), group[-1:])
        t = step.variables.types[name].type
        starts = [a for a, _ in t.block(step.mesh.shape, step.mesh.shape.coordinates(group[0]))]
        local = np.unravel_index(element, block.shape)
        assert found.index == tuple(k + s for k, s in zip(local, starts, strict=True))
        flip(block, element, bit)
    assert tried >= 3
    assert Replicas(step.variables).differences() == []


def test_the_majority_repairs():
    step, lines = step_of("a:3"), []
    before = step.variables["first/kernel"].tobytes()
    block = step.variables.blocks["first/kernel"][1]
    flip(block, 7, 22)
    text = compared(step.variables, False, lines.append)
    assert "variable 'first/kernel'" in text and "Damaged: the copy of rank 1 (host " in text
    assert "[io=0, hidden=7]" in text and not lines
    assert compared(step.variables, True, lines.append) == ""
    assert "were repaired" in lines[0]
    assert all(b.tobytes() == before for b in step.variables.blocks["first/kernel"].values())


def test_of_two_copies_the_absurd_one_is_suspected_and_else_both_are_named():
    step = step_of("a:2")
    block = step.variables.blocks["first/kernel"][0]
    flip(block, 3, 30)  # the highest bit of the exponent
    (found,) = Replicas(step.variables).differences()
    assert found.damaged == (0,)
    flip(block, 3, 30)
    flip(block, 3, 1)  # the last but one of the mantissa
    (found,) = Replicas(step.variables).differences()
    assert found.damaged == () and "not known which copy" in str(found)
    assert set(found.values) == {0, 1} and found.values[0] != found.values[1]
    assert "not known which copy" in compared(step.variables, True, print)  # nothing to repair from


def test_elements_behind_the_first_chunk_are_found():
    step = step_of("a:3", width=CHUNK_WORDS * 2)
    block = step.variables.blocks["first/kernel"][2]
    place = block.size - 1
    flip(block, place, 5)
    (found,) = Replicas(step.variables).differences()
    assert found.damaged == (2,)
    assert found.index == (3, CHUNK_WORDS * 2 - 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_stay_equal_in_every_layout_and_every_flip_is_found(ranks):
    done = launch(ranks, ["-m", "tests.runtime.mpi_programs.replicas"], timeout_seconds=120, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 30
