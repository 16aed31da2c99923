"""One job at a time writes the folder of a run: two processes, stale locks, other hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.runtime import processes
from meshmpi.training import lock, starting
from meshmpi.training.lock import LOCK, STALE_SECONDS, RunLock, held, myself, why_held

OTHER = {"host": "elsewhere", "boot": "b"}
SLURM = {"slurm": "7", "slurm_restart": 0}


def gone() -> dict[str, int]:
    """A process that has ended."""
    with subprocess.Popen(["sleep", "10"]) as process:
        found = {"pid": process.pid, "start": processes.start_time(process.pid)}
        process.kill()
    return found


WHO = {
    "this process": ({}, 0, "it runs"),
    "a process that has ended": (gone(), 0, ""),
    "a number used again": ({"start": 5}, 0, ""),
    "this host before it was booted": ({"boot": "another"}, STALE_SECONDS + 1, ""),
    "another host, just now": (OTHER, 5, "it was there 5 s ago, and is given up after 90 s"),
    "another host, long ago": (OTHER, STALE_SECONDS, ""),
    "a Slurm job that runs": ({**OTHER, **SLURM}, 5, "it was there 5 s ago"),
    "a Slurm job that is over": ({**OTHER, **SLURM, "slurm": "8"}, 5, ""),
    "a Slurm job of which nothing is known": ({**OTHER, **SLURM, "slurm": "9"}, 5, "it was there"),
    "this Slurm job before it was requeued": ({**OTHER, **SLURM, "slurm": "6"}, 5, ""),
    "this job, whose rank 0 was lost": ({**OTHER, "job": "mine", "slurm": "6", "slurm_restart": 1}, 5, ""),
    "something that is no lock": (None, 5, "it was there 5 s ago"),
    "something that is no lock, long ago": (None, STALE_SECONDS, ""),
}
"""Holder -> what differs from this process, seconds since it was touched, why it is refused."""


@pytest.mark.parametrize("who", WHO)
def test_who_holds_it(who: str):
    differs, seconds, wanted = WHO[who]
    me = {**myself(), "job": "mine", "slurm": "6", "slurm_restart": 1}
    holder = {**me, "job": "", "slurm": "", **differs} if differs is not None else {}
    with pytest.MonkeyPatch.context() as m:
        m.setattr(lock, "slurm_state", {"7": "RUNNING", "8": "is over", "9": ""}.get)
        found = why_held(holder, me, seconds)
    assert found.startswith(wanted) and bool(found) == bool(wanted)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("echo RUNNING", "RUNNING"),
        ("echo COMPLETING", "COMPLETING"),
        ("echo COMPLETED", "is over"),
        ("true", "is over"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "is over"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", ""),
    ],
)
def test_what_slurm_says(tmp_path: Path, monkeypatch, answer: str, state: str):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert lock.slurm_state("7") == state


HOLDS = """
import sys, time
from meshmpi.training.lock import RunLock
held = RunLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
held.release()
"""


def other_process(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_two_processes(tmp_path: Path):
    with other_process(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"process {first.pid} of .* on host .* it runs"):
            RunLock(tmp_path)
        first.communicate()  # it ends well
    RunLock(tmp_path).release()
    with other_process(tmp_path) as second:
        second.kill()
    mine = RunLock(tmp_path)
    assert mine.mine()
    mine.release()
    assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path / "new").release()
    assert list(tmp_path.iterdir()) == [], "a folder without a run is not left behind"


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path):
    for _ in range(20):
        (tmp_path / LOCK).write_text(json.dumps({**myself(), **gone()}))
        found, barrier = list[RunLock](), threading.Barrier(8)

        def try_it(found=found, barrier=barrier) -> None:
            barrier.wait()
            try:
                found.append(RunLock(tmp_path))
            except ConfigError as error:
                assert "it runs" in str(error)

        threads = [threading.Thread(target=try_it) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [each.mine() for each in found].count(True) == 1
        for each in found:
            each.release()


def test_a_lock_that_a_third_job_has_just_made_stays(tmp_path: Path):
    third = RunLock(tmp_path)
    third._remove({**myself(), **gone()})  # what this job saw a moment ago
    assert third.mine() and [p.name for p in tmp_path.iterdir()] == [LOCK]
    third.release()


def test_whose_lock_was_taken_over_writes_no_more(tmp_path: Path):
    mine = RunLock(tmp_path)
    (tmp_path / LOCK).write_text(json.dumps({**myself(), "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="taken over .* on host elsewhere"):
        mine.check()
    mine.release()
    assert (tmp_path / LOCK).exists(), "it is the other's"
    (tmp_path / LOCK).unlink()
    with pytest.raises(ConfigError, match="somebody who removed its lock"):
        mine.check()


def test_a_holder_touches_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    mine = RunLock(tmp_path)
    os.utime(mine.path, (1.0, 1.0))
    limit = time.monotonic() + 30
    while lock.age(mine.path) > 100:
        assert time.monotonic() < limit
        time.sleep(0.02)
    mine.release()


def test_a_folder_that_is_renamed_is_held_again(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "metrics-rank-00000.jsonl").touch()
    with held(mm.SimulatedMesh("all:1"), folder):
        old = starting.set_aside(folder)
        assert old is not None and not (old / LOCK).exists() and (folder / LOCK).exists()
        lock.check_held(folder)
        with pytest.raises(ConfigError, match="it runs"):
            RunLock(folder)
    assert not (folder / LOCK).exists()


def test_a_second_training_is_refused(tmp_path: Path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (tmp_path / "c.toml").write_text(f'[data]\ncorpus = "{tmp_path / "text.txt"}"\n')
    words = ["-m", "meshmpi", "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")]
    with other_process(tmp_path / "run") as first:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"process {first.pid} of" in done.stderr and "Traceback" not in done.stderr
        assert [p.name for p in (tmp_path / "run").iterdir()] == [LOCK]
        first.communicate()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        RunLock(tmp_path / "run")
