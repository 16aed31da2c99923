"""How many bytes ago data were touched, against distances found by hand."""

import pytest

import meshmpi as mm
from meshmpi.compiler.passes.memory import Sharing
from meshmpi.planner.machine import Curve
from meshmpi.planner.timing import predict_time, reuse_distances
from tests.planner.test_timing import machine


def products():
    """x [8, 16] times w [16, 4], times w again, then w halved in place."""
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "m:8;k:16"), mm.get_variable("w", "k:16;n:4")
        z = mm.einsum([mm.einsum([x, w], "m:8;n:4"), w], "m:8;k:16")
        updates = [mm.assign(w, 0.5 * w)]
    return mm.plan(graph, "", "", fetches=[z], updates=updates).program


def test_distances_are_those_found_by_hand():
    program = products()
    computing = [i for i in program.instructions if not i.traits.free and i.outputs]
    first, second, halved = computing
    (x, w), (y,), (z,) = first.inputs, first.outputs, second.outputs
    bytes_of = {x: 512, w: 256, y: 128, z: 512, halved.outputs[0]: 256}
    touched = [
        [(v, bytes_of[v]) for v in (*i.inputs, *i.outputs)] if i in computing else [] for i in program.instructions
    ]
    found = reuse_distances(program, Sharing(program), touched)
    at = {i.outputs[0]: found[n] for n, i in enumerate(program.instructions) if i in computing}
    # A step touches 896 + 896 + 512 bytes; what is new lies among y and z, 640 bytes.
    assert at[y] == {x: 896 + 896 + 512, w: 896, y: 640}
    assert at[z] == {y: 896, w: 896, z: 640}
    assert at[halved.outputs[0]] == {w: 512, halved.outputs[0]: 512}


def maps(first, second):
    """The program of tanh of a variable of ``first`` numbers, then of one of ``second``."""
    with mm.Graph() as graph:
        fetched = [mm.tanh(mm.get_variable(name, f"{name}:{size}")) for name, size in (("a", first), ("b", second))]
    return mm.plan(graph, "", "", fetches=fetched).program


def test_what_a_cache_still_holds_is_read_faster():
    """A cache of 64 KB: a step of 32 KB finds its data there, one of 144 KB does not."""
    cached = machine(memory=Curve(((65536.0, 1e9), (65537.0, 1e6))), operations={"tanh": 0.0, "simple": 0.0}, call=0.0)
    small = predict_time(maps(2048, 2048), cached).seconds
    large = predict_time(maps(2048, 16384), cached).timings
    assert small == pytest.approx(4 * 4 * 2048 * (0.75 + 1.5) / 2 / 1e9)
    # The short one is read from memory too: the long one has driven its data out.
    assert large[0].seconds == pytest.approx(4 * 2048 * (0.75 + 1.5) / 1e6)
    assert large[0].bound == "memory"


def test_a_product_of_cold_operands_takes_longer_by_their_way_from_memory():
    program = products()
    alike = predict_time(program, machine()).seconds
    memory = Curve(((1000.0, 1e8), (1001.0, 1e6)))  # holds all but x, last touched 2304 bytes ago
    colder = predict_time(program, machine(memory=memory)).seconds
    assert colder - alike == pytest.approx(512 * (1e-6 - 1e-8))
