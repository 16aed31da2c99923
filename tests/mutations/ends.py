"""How jobs end: ranks that are lost, locks of other jobs, damaged metrics."""

from __future__ import annotations

from pathlib import Path

from meshmpi.guard import deadlock, outcome
from meshmpi.runtime import processes
from meshmpi.training import lock, metrics
from tests.mutations.registry import Patch, mutation

VERDICT = "tests/runtime/test_start.py::test_verdict"
LOCK = "tests/train/test_lock.py::"
METRICS = "tests/train/test_metrics.py::"
NEW = "__import__('pathlib').Path(__import__('tempfile').mkdtemp())"
"""A folder for a test that is called without pytest."""


@mutation(f"{VERDICT}('a rank is missing')")
def a_status_of_0_is_believed(m: Patch) -> None:
    m.setattr(outcome, "UNCLEAR", (1,))


@mutation(f"{VERDICT}('a rank is missing, mpirun says error')")
def an_error_of_mpirun_is_taken_for_one_of_the_program(m: Patch) -> None:
    m.setattr(outcome, "UNCLEAR", (0,))


@mutation(f"{VERDICT}('survivors went on, a file is damaged')")
def survivors_make_up_for_a_damaged_file(m: Patch) -> None:
    m.setattr(outcome.Outcome, "damaged", ())


@mutation("tests/runtime/test_deadlock.py::test_a_process_that_is_gone()")
def a_lost_rank_is_an_error_of_the_program(m: Patch) -> None:
    m.setattr(deadlock, "LOST", 1)


@mutation(f"{LOCK}test_who_holds_it('a process that has ended')")
def a_process_that_has_ended_holds_its_lock(m: Patch) -> None:
    m.setattr(processes, "state", lambda pid, started: "running")


@mutation(f"{LOCK}test_who_holds_it('a number used again')")
def a_process_is_known_by_its_number_alone(m: Patch) -> None:
    right = processes.state
    m.setattr(processes, "state", lambda pid, _: right(pid, processes.start_time(pid)))


@mutation(f"{LOCK}test_who_holds_it('another host, long ago')")
def a_lock_of_another_host_is_for_ever(m: Patch) -> None:
    m.setattr(lock, "STALE_SECONDS", float("inf"))


@mutation(f"{LOCK}test_a_lock_that_a_third_job_has_just_made_stays({NEW})")
def a_stale_lock_is_removed_without_a_second_look(m: Patch) -> None:
    m.setattr(lock.RunLock, "_remove", lambda self, holder: self.path.unlink())


@mutation(f"{LOCK}test_whose_lock_was_taken_over_writes_no_more({NEW})")
def a_lock_that_is_there_is_ours(m: Patch) -> None:
    m.setattr(lock.RunLock, "mine", lambda self: self.path.exists())


@mutation(f"{METRICS}test_a_damaged_file_never_blocks_a_resume({NEW}, 'garbage')")
def damaged_lines_are_thrown_away(m: Patch) -> None:
    m.setattr(metrics, "_aside", lambda path: Path("/dev/null"))


@mutation(f"{METRICS}test_what_is_no_file_is_set_aside({NEW}, 'fifo')")
def what_is_no_file_is_read_as_an_empty_one(m: Patch) -> None:
    m.setattr(metrics.plain, "contents", lambda path, most: b"")
