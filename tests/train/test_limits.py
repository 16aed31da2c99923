"""Until when a run may go on: times as text, Slurm's answer, the margin for a step and a save."""

from __future__ import annotations

import os
import time

import pytest

from meshmpi.errors import ConfigError
from meshmpi.training import stopping
from meshmpi.training.stopping import TimeLimit, find_limit, process_age, seconds_of, slurm_duration, slurm_seconds_left


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5", 1.5), ("2:00", 7200), ("0:01:30", 90), ("1-02:00", 93600), (" 7 ", 7)]
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2", "2h", "-5", "1:00:00:00"])
def test_what_is_no_time(text):
    with pytest.raises(ConfigError, match=r"'train.time_limit' is '.*', which is not a time"):
        seconds_of(text)


@pytest.mark.parametrize(("text", "seconds"), [("42", 42), ("5:00", 300), ("1:00:01", 3601), ("2-00:00:00", 172800)])
def test_durations_as_slurm_writes_them(text, seconds):
    assert slurm_duration(text) == seconds


def squeue(folder, monkeypatch, text, status=0):
    """Puts a squeue that answers so on PATH."""
    folder.mkdir(exist_ok=True)
    file = folder / "squeue"
    file.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def test_slurm_is_asked(tmp_path, monkeypatch):
    squeue(tmp_path / "a", monkeypatch, "1-00:00:10")
    assert slurm_seconds_left() == 86410
    assert "Slurm job 17 leaves 24:00:" in str(find_limit(""))
    squeue(tmp_path / "b", monkeypatch, "UNLIMITED")
    assert slurm_seconds_left() is None
    assert find_limit("").reached() == ""
    assert str(find_limit("")) == "no time limit"


def test_the_variable_must_do_where_slurm_does_not_answer(tmp_path, monkeypatch):
    squeue(tmp_path / "a", monkeypatch, "slurm_load_jobs error", status=1)
    assert slurm_seconds_left() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert 900 < slurm_seconds_left() < 1001


def test_outside_of_a_job_there_is_no_limit(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm_seconds_left() is None
    assert find_limit("").reached() == ""


def test_the_earlier_limit_counts(tmp_path, monkeypatch):
    squeue(tmp_path / "a", monkeypatch, "10:00")
    assert "train.time_limit of 0:05" in str(find_limit("0:05"))
    assert "Slurm job 17" in str(find_limit("2:00"))


def test_the_setting_counts_from_the_start_of_the_process(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    age = process_age()
    assert age > 0
    short, long = find_limit(f"{age + 5:.3f}"), find_limit(f"{age + 500:.3f}")
    assert short.reached() == ""  # before the first step
    for limit in (short, long):
        limit.took(step=0.1)
    assert short.reached() != ""  # less than what an end needs
    assert long.reached() == ""


def test_time_for_a_step_and_a_save_is_kept():
    limit = TimeLimit(100.0, "a limit", save=3.0)
    assert limit.margin == stopping.LEAVE_SECONDS + stopping.SAVE_FACTOR * 3.0
    limit.took(step=2.0)
    limit.took(save=1.0)  # measured: the estimate is forgotten
    limit.took(step=1.0)
    expected = stopping.LEAVE_SECONDS + stopping.STEP_FACTOR * 2.0 + stopping.SAVE_FACTOR * 1.0
    assert limit.margin == expected
    assert limit.reached() == ""
    limit.took(save=90.0)
    assert limit.reached().startswith("a limit, which leaves ")
