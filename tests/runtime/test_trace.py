"""Traces: clocks, waits, the file for viewers, and the rank that is slow by itself."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.launch.launch import launch
from meshmpi.runtime.trace import Call, Trace, Tracer, _aligned, describe_trace, straggler, waits, write_trace
from tests.runtime.mpi_programs.trace_steps import SLEEP_SECONDS, SLOW_RANK, STEPS

LOCAL = Call("contract", (), "y", "model.py:3", 0, 1000)
SUM = Call("all_reduce", ("cols",), "z", "model.py:4", 64, 0)


def made() -> Trace:
    """2 x 2 ranks, one step: product, then a sum over cols; rank 1 computes for 3 s, others 1 s."""
    products = [1.0, 3.0, 1.0, 2.0]
    ends = [3.5, 3.5, 2.5, 2.5]  # a sum takes half a second once both are there
    times = np.array([[[0.0, p, e]] for p, e in zip(products, ends, strict=True)])
    return Trace(MeshShape("rows:2;cols:2"), (LOCAL, SUM), times, 7)


def test_waiting_lasts_until_the_last_of_the_group_has_come():
    found = waits(made())
    assert list(found) == [1]
    np.testing.assert_allclose(found[1][:, 0], [2.0, 0.0, 1.0, 0.0])


def test_the_straggler_is_named_by_its_own_compute():
    trace = made()
    assert straggler(np.diff(trace.times[:, 0])[:, 0]) == 1
    text = describe_trace(trace)
    assert "slowest by its own compute: rank 1" in text
    assert "all_reduce over cols: 500.000 ms of transfer, 750.000 ms of waiting" in text
    assert "rank 1: 3000.000 ms of its own compute, 500.000 ms of transfer, 0.000 ms" in text


def test_the_file_has_an_event_for_each_call_and_one_for_each_wait(tmp_path):
    events = json.loads(write_trace(made(), tmp_path / "t.json").read_text())["traceEvents"]
    timed = [e for e in events if e["ph"] == "X"]
    assert len(timed) == 4 * 2 + 2
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {r} (rows {r // 2}, cols {r % 2})" for r in range(4)}
    wait = [e for e in timed if e["name"] == "wait for others" and e["pid"] == 0]
    assert [(e["ts"], e["dur"]) for e in wait] == [(1e6, 2e6)]
    transfer = [e for e in timed if e["name"] == "all_reduce over cols" and e["pid"] == 0]
    assert [(e["ts"], e["dur"]) for e in transfer] == [(3e6, 0.5e6)]
    assert transfer[0]["args"] == {"step": 7, "tensor": "z", "line": "model.py:4", "axes": "cols", "bytes sent": 64}


@pytest.mark.parametrize("offset, drift", [(0.0, 0.0), (100.0, 0.0), (-3.0, 1e-3)])
def test_clocks_that_differ_and_drift_are_aligned(offset, drift):
    """A rank's clock shows t; rank 0's showed t + offset + drift * t at the same moment."""
    own = np.linspace(10.0, 20.0, 11)
    compared = [(t, offset + drift * t) for t in (9.0, 21.0)]
    np.testing.assert_allclose(_aligned(own, *compared), own + offset + drift * own)


def test_a_simulated_mesh_has_no_time():
    with mm.Graph() as graph:
        y = mm.square(mm.placeholder("x", "n:4"))
    step = mm.compile(graph, mm.SimulatedMesh("all:2"), fetches=[y])
    with pytest.raises(ConfigError, match="simulated mesh cannot be traced"):
        Tracer(step)


def test_a_trace_without_steps_is_refused():
    with mm.Graph() as graph:
        y = mm.square(mm.placeholder("x", "n:4"))
    step = mm.compile(graph, mm.SimulatedMesh("all:2"), fetches=[y])
    with pytest.raises(ConfigError, match="number of steps to trace is 0"):
        Tracer(step, 0)


@pytest.mark.parametrize("how", ["plain", "overlap"])
def test_ranks_under_mpirun(tmp_path, how):
    program = ["-m", "tests.runtime.mpi_programs.trace_steps", str(tmp_path), how]
    off = {"MESHMPI_SHARED": "off"} if how == "overlap" else {}  # else nothing runs in the background
    done = launch(2, program, timeout_seconds=120, capture_output=True, environment=off)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.txt").read_text()
    assert f"slowest by its own compute: rank {SLOW_RANK}" in table
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    timed = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in timed} == {0, 1}
    assert {e["args"]["step"] for e in timed} == {2, 3, 4}
    slow = [e for e in timed if e["name"] == "contract" and e["dur"] >= SLEEP_SECONDS * 1e6]
    assert [e["pid"] for e in slow] == [SLOW_RANK] * STEPS
    if how == "overlap":
        assert any(e["tid"] == 2 for e in timed), "reductions in the background have a track"
    else:
        waited = [e for e in timed if e["name"] == "wait for others" and e["pid"] == 0]
        assert sum(e["dur"] for e in waited) >= STEPS * SLEEP_SECONDS * 0.5e6
    for rank in (0, 1):  # events of a rank follow each other
        ends = 0.0
        for e in (e for e in timed if e["pid"] == rank and e["tid"] != 2):
            assert e["ts"] >= ends - 0.01
            ends = e["ts"] + e["dur"]
