"""An error on one rank ends the job on all ranks within seconds: real mpirun, plain Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from meshmpi.errors import TRACEBACK_VARIABLE, LayoutError
from meshmpi.guard import abort, ending
from meshmpi.launch.launch import TIMED_OUT, launch

PROGRAM = "tests.runtime.mpi_programs.fail"
MOST_SECONDS = 10.0
"""From the start of mpirun: the promise, which counts from the failure, is stricter met so."""


def run(fault: str, which: str, ranks: int = 3, **environment: str):
    began = time.monotonic()
    done = launch(
        ranks,
        ["-m", PROGRAM, fault, which],
        timeout_seconds=30,
        capture_output=True,
        environment={"RANKS": str(ranks), **environment},
    )
    seconds = time.monotonic() - began
    assert done.returncode != TIMED_OUT, f"hangs: {done.stderr}"
    return done, seconds


def reports(text: str) -> list[str]:
    """Lines in which a rank of ours reports; MPI's own notices may end in NUL."""
    return re.findall(r"^\0?(\[rank \d+ of .*)", text, re.MULTILINE)


@pytest.mark.quick(3)
@pytest.mark.parametrize("shared", ["on", "off"])
@pytest.mark.parametrize(
    ("fault", "which", "status", "text"),
    [
        ("exception", "0", 1, "SaysNothing: by order"),
        ("exception", "last", 1, "SaysNothing: by order"),
        ("own", "1", 1, "LayoutError: 'batch' is split twice. Split it once."),
        ("thread", "1", 1, "SaysNothing: by order"),
        ("exit3", "1", 3, "exit status 3 while other ranks still run"),
        ("exit3", "0", 3, "exit status 3 while other ranks still run"),
        ("raise4", "last", 4, "exit status 4 while other ranks still run"),
        ("message", "1", 1, "exit status 1 while other ranks still run"),
        ("interrupt", "1", 130, "KeyboardInterrupt"),
        ("in-collective", "1", 1, "ProgramError: all_gather"),
        ("mpi-error", "1", 1, "MPI_ERR_RANK"),
        ("killed", "1", 69, "rank 1"),
    ],
)
def test_one_rank_fails(fault: str, which: str, status: int, text: str, shared: str):
    """While the others wait for it in memory that they share, or in MPI."""
    done, seconds = run(fault, which, MESHMPI_SHARED=shared)
    rank = {"last": 2}.get(which) if not which.isdigit() else int(which)
    (line,) = reports(done.stderr)
    found_by_others = f"rank {rank} left the program" in line or f"process of rank {rank} is gone" in line
    assert line.startswith(f"[rank {rank} of 3") or found_by_others
    assert text in done.stderr
    assert done.returncode == status
    assert seconds < MOST_SECONDS
    assert " ends" not in done.stdout
    for r in range(3):
        assert f"rank {r} starts" in done.stdout or r != rank, "output of before the error is lost"


@pytest.mark.matrix
def test_a_report_that_gets_stuck_ends_the_job_too():
    """As on a damaged heap, where formatting the traceback does not return."""
    done, seconds = run("stuck", "last")
    assert done.returncode != 0
    assert "Timeout" in done.stderr and "ending.py" in done.stderr, "the stacks are shown instead"
    assert seconds < MOST_SECONDS


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("exception", "SaysNothing: by order"),
        ("own", "LayoutError: 'batch' is split twice."),
        ("mesh-size", "MeshError: mesh {rows: 5, cols: 2} needs 10 ranks"),
    ],
)
def test_all_ranks_fail_alike_and_one_tells(fault: str, text: str):
    done, seconds = run(fault, "all")
    assert len(reports(done.stderr)) == 1
    assert done.stderr.count(text) == 1
    assert reports(done.stderr)[0].startswith("[rank 0 of 3]")
    assert done.returncode == 1
    assert seconds < MOST_SECONDS


def test_failure_before_there_is_a_mesh():
    """mpirun itself ends a job when a process fails before MPI_Init."""
    done, seconds = run("before-mesh", "1")
    assert done.returncode == 1
    assert "SaysNothing: by order" in done.stderr
    assert seconds < MOST_SECONDS


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", ["exit3", "raise4"])
def test_all_ranks_leave_with_the_same_status(fault: str):
    """For instance 75 to be started again: this is no abort."""
    done, seconds = run(fault, "all")
    assert done.returncode == int(fault[-1])
    assert reports(done.stderr) == [] and "MPI_ABORT" not in done.stderr
    assert seconds < MOST_SECONDS


@pytest.mark.matrix
def test_a_slow_rank_is_waited_for():
    """Ranks that leave by SystemExit(0) must not stop one that still works, here 7 s longer."""
    assert abort.LEAVE_SECONDS < 7
    done, _ = run("slow", "1")
    assert done.returncode == 0, done.stderr


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", ["none", "caught", "thread-exit", "child"])
def test_no_false_alarm(fault: str):
    done, seconds = run(fault, "1")
    assert done.returncode == 0, done.stderr
    assert reports(done.stderr) == []
    assert done.stdout.count(" ends") == 3
    assert seconds < MOST_SECONDS


def test_a_single_process_behaves_as_ever():
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "exception", "0"],
        env={**os.environ, "RANKS": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "[rank" not in done.stderr


def raised(call) -> str:
    try:
        call()
    except Exception as e:
        return ending.report(e, e.__traceback__)
    raise AssertionError("no error")


def test_frames_inside_meshmpi_are_hidden_for_its_own_errors(monkeypatch: pytest.MonkeyPatch):
    from meshmpi.dims import Layout, Shape

    def own() -> None:
        Layout("a:rows;a:cols")

    text = raised(own)
    assert "test_abort.py" in text and "dims.py" not in text
    assert text.rstrip().splitlines()[-2].startswith("meshmpi.errors.LayoutError: layout")
    monkeypatch.setenv(TRACEBACK_VARIABLE, "full")
    assert "dims.py" in raised(own)
    monkeypatch.delenv(TRACEBACK_VARIABLE)
    assert "dims.py" in raised(lambda: Shape("a:1").dim(3).nothing), "other errors are shown whole"


def test_an_error_without_outside_frames_is_shown_whole():
    error = LayoutError("a", "b", "x made at f.py:3")
    assert error.where.startswith("x made at f.py:3, used at ")
    assert ending.report(error, None).strip().endswith(f"LayoutError: a b\nin {error.where}")
