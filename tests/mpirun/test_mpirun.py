"""Starts the real MPI jobs: the table on 2, 4 and 6 ranks, and jobs that must fail well."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from meshmpi.errors import MeshError
from meshmpi.launch.launch import launch
from meshmpi.launch.launchers import find_launcher

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LIMIT_SECONDS = {2: 150, 4: 180, 6: 240}
"""Per rank count, several times what two cores take, so that a hang is an error and not a wait."""
FAIL_SECONDS = 10.0
"""The promise: an error on any rank has ended the whole job by then; starting MPI comes on top."""
START_SECONDS = 10.0


@pytest.fixture(autouse=True)
def outside_of_any_job(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "PMIX_", "PRTE_")):
            monkeypatch.delenv(name)
    try:
        find_launcher()
    except MeshError as e:
        pytest.fail(f"these tests need an MPI: {e}")


def run(n: int, *arguments: str, limit: float):
    return launch(n, ["-m", *arguments], timeout_seconds=limit, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("n", "which"),
    [
        pytest.param(4, "not matrix", id="4-few"),
        *(pytest.param(n, "", id=str(n), marks=pytest.mark.matrix) for n in LIMIT_SECONDS),
    ],
)
def test_table_on_real_ranks(n: int, which: str):
    done = run(n, "tests.mpirun.session", str(HERE / "ranked_cases.py"), "-m", which, limit=LIMIT_SECONDS[n])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def test_a_failing_marked_test_ends_the_job():
    began = time.monotonic()
    done = run(3, "tests.mpirun.session", str(HERE / "failing_session.py"), limit=60)
    seconds = time.monotonic() - began
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "rank 1 failed" in done.stderr and "deliberate failure" in done.stderr
    assert seconds < START_SECONDS + FAIL_SECONDS


BAD = {
    "too_many_ranks": (
        3,
        ["MeshError", "{rows: 4, cols: 2} needs 8 ranks", "has 3", "mpirun -n 8", "{rows: 3, cols: 1}"],
    ),
    "another_graph_on_one_rank": (
        3,
        [
            "ProgramError",
            "different programs",
            "on ranks 0,1",
            "on ranks 2",
            "first difference",
            "multiply(i0, 3.0)",
            "identically",
        ],
    ),
    "another_layout_on_one_rank": (2, ["ProgramError", "different programs", "first difference", "b=2/ranks"]),
    "one_rank_raises_between_steps": (3, ["RuntimeError", "deliberate failure on rank 2"]),
    "one_rank_misses_a_feed": (2, ["FeedError", "'x'", "not fed"]),
    "an_index_outside_on_one_rank": (
        3,
        ["RangeError", "gather: index 5 at [a=5] of 'ids' is outside dimension 'v' (5)"],
    ),
}
"""Program of bad_programs.py -> ranks, and what the one traceback must say."""


@pytest.mark.quick(3)
@pytest.mark.parametrize("program", BAD)
def test_bad_programs_end_everywhere(program: str):
    n, words = BAD[program]
    began = time.monotonic()
    done = run(n, "tests.mpirun.bad_programs", program, limit=60)
    seconds = time.monotonic() - began
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    missing = [w for w in words if w not in done.stderr]
    assert not missing, f"{missing} not in:\n{done.stderr}"
    assert done.stderr.count("Traceback") == 1, f"not exactly one traceback:\n{done.stderr}"
    assert seconds < START_SECONDS + FAIL_SECONDS
