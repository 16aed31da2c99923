"""Jobs that cannot hang: each fault ends its job with one report, a slow rank does not."""

from __future__ import annotations

import re
import time

import pytest

from meshmpi.errors import ConfigError
from meshmpi.guard import watchdog
from meshmpi.launch.launch import TIMED_OUT, launch
from tests.soak import faults


@pytest.mark.quick(12)
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_fault_ends_the_job(fault: str):
    done = faults.trial(fault, 2, 1)
    assert not done.problem, f"{done.problem}\n{done.text}"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("skip", r"ranks 0-1 wait in all_reduce\(sum, float32, 1,000 elements"),
        ("op", r"ranks of one group call different collectives, as their call \d+: "),
    ],
)
def test_what_the_report_says(fault: str, text: str):
    done = faults.trial(fault, 3, 2)
    assert not done.problem, f"{done.problem}\n{done.text}"
    assert re.search(text, done.text), done.text
    assert done.text.count("HangError") == 1
    if fault != "op":
        assert "---- stacks of rank" in done.text and 'faulty.py", line' in done.text


@pytest.mark.parametrize(("fault", "what"), [("dtype", "data type"), ("root", "operation")])
def test_debug_mode_raises_at_the_collective_itself(fault: str, what: str):
    done = faults.trial(fault, 2, 1, debug=True)
    assert not done.problem, f"{done.problem}\n{done.text}"
    assert f"ProgramError: ranks of one group call collectives of different {what}: " in done.text
    assert done.seconds < 5.0, "without waiting for a hang"


def test_debug_mode_lets_right_programs_run():
    done = launch(
        2,
        ["-m", faults.PROGRAM, "none", "1"],
        timeout_seconds=60,
        capture_output=True,
        environment={"MESHMPI_DEBUG": "collectives"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(rank: int):
    assert faults.stopped(2, rank, 8.0) == ""


@pytest.mark.matrix
def test_a_limit_that_the_user_sets():
    began = time.monotonic()
    done = launch(
        2,
        ["-m", faults.PROGRAM, "slow", "1", "30"],
        timeout_seconds=60,
        capture_output=True,
        environment={"MESHMPI_STALL_SECONDS": "3"},
    )
    assert done.returncode not in (0, TIMED_OUT)
    assert time.monotonic() - began < 25, "not the 30 s of the slow rank"
    assert "ranks have waited longer than 3 s: rank 0 in all_reduce" in done.stderr
    assert "rank 1, which is running outside of collectives" in done.stderr


def test_limits_that_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHMPI_STALL_SECONDS", "soon")
    with pytest.raises(ConfigError, match="MESHMPI_STALL_SECONDS is 'soon'"):
        watchdog.stall_seconds()
    monkeypatch.setenv("MESHMPI_STALL_SECONDS", "0")
    assert watchdog.stall_seconds() is None


COMPILED = """
import numpy as np
import meshmpi as mm
with mm.Graph() as graph:
    x = mm.placeholder("x", "batch:4")
    mean, most = mm.reduce_mean(x), mm.reduce_max(x)
mesh = mm.Mesh("rows:2")
one = mm.compile(graph, mesh, "batch:rows", fetches=[mean], debug=True)
two = mm.compile(graph, mesh, "batch:rows", fetches=[most], debug=True)
x = np.arange(4, dtype=np.float32)
assert one(x=x)[mean] == 1.5 and two(x=x)[most] == 3.0
(one if mesh.rank else two)(x=x)
"""


def test_ranks_that_run_different_steps():
    done = launch(2, ["-c", COMPILED], timeout_seconds=60, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert "ProgramError: ranks of one group call collectives of different operation" in done.stderr
    assert done.stderr.count("ProgramError") == 1 and "HangError" not in done.stderr
