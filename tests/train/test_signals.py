"""Signals at every place of a training: it saves what there is to save and leaves by status 75."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from meshmpi import checkpoint
from meshmpi.training import stopping
from meshmpi.training.metrics import read_metrics
from meshmpi.training.signals import PATIENCE_SECONDS, STOPPED, StopSignals, blocked_prefix, described, noted
from meshmpi.transformer.tasks.language_model import LanguageModelTask
from meshmpi.transformer.training import trainer
from tests.soak import signals as soak
from tests.train.small import run_of, small

pytestmark = pytest.mark.usefixtures("cache")


def run(tmp_path, name, *overrides, resume=False):
    more = ("evaluate.every=2", "model.residual_dropout=0.1", "sample.tokens=5")
    result, lines = run_of(small(tmp_path, *more, *overrides), tmp_path / name, resume=resume)
    return result, "\n".join(lines)


def records(folder):
    return [(r["step"], key, r[key]) for r in read_metrics(folder) for key in ("loss", "held_out_loss") if key in r]


def raising_at(place, monkeypatch):
    """Has a signal arrive at a place of the run."""
    original = getattr(trainer.Trainer, place)

    def with_signal(self, *args, **more):
        if place != "_evaluate" or self.done == 2:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *args, **more)

    monkeypatch.setattr(trainer.Trainer, place, with_signal)


@pytest.mark.parametrize(
    ("place", "step"), [("_evaluate", 2), ("save", 6), ("_sample", 6), ("one_step", 1), ("_between_steps", 1)]
)
def test_a_stopped_run_goes_on_as_if_never_stopped(tmp_path, monkeypatch, place, step):
    run(tmp_path, "whole")
    with monkeypatch.context() as patched:
        raising_at(place, patched)
        result, text = run(tmp_path, "parts")
    assert (result.step, result.stopped_by) == (step, "SIGTERM")
    assert result.checkpoint.name == f"step-{step:08d}"
    assert f"stopping after step {step}, on SIGTERM" in text
    run(tmp_path, "parts", resume=True)
    found = records(tmp_path / "parts")
    if place == "_sample":  # evaluated before it stopped and once more
        assert found.pop() == found[-1]
    assert found == records(tmp_path / "whole")


@pytest.mark.parametrize("place", ["prepare", "batches", "describe"])
def test_before_the_first_step_nothing_is_saved(tmp_path, monkeypatch, place):
    """While data are read, while the step is compiled, and afterwards."""
    original = getattr(LanguageModelTask, place)

    def with_signal(self, *args):
        signal.raise_signal(signal.SIGUSR1)
        return original(self, *args)

    monkeypatch.setattr(LanguageModelTask, place, with_signal)
    result, text = run(tmp_path, "run")
    assert (result.step, result.stopped_by, result.checkpoint) == (0, "SIGUSR1", None)
    assert "before the first step: there is nothing to save" in text
    assert not checkpoint.find(tmp_path / "run" / "checkpoints")


def test_a_signal_while_a_checkpoint_is_read_keeps_it(tmp_path, monkeypatch):
    run(tmp_path, "run", "train.steps=3")
    before = records(tmp_path / "run")
    with monkeypatch.context() as patched:
        raising_at("resume", patched)
        result, _ = run(tmp_path, "run", resume=True)
    assert result.stopped_by == "SIGTERM"
    assert records(tmp_path / "run")[: len(before)] == before
    run(tmp_path, "whole")
    run(tmp_path, "run", resume=True)
    assert records(tmp_path / "run")[-2:] == records(tmp_path / "whole")[-2:]


def test_a_time_limit_stops_after_the_step(tmp_path):
    result, text = run(tmp_path, "run", "train.time_limit=1")
    assert result.step == 1 and result.stopped_by.startswith("train.time_limit of 1, which leaves")
    assert "stopping after step 1, on train.time_limit of 1" in text
    run(tmp_path, "run", resume=True)
    run(tmp_path, "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_second_interrupt_ends_at_once_others_do_not():
    with StopSignals() as outer:
        with StopSignals() as inner:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert inner.name == outer.name == noted() == "SIGTERM"
    assert noted() == ""


# ---- processes -------------------------------------------------------------------------------


def script(tmp_path, text):
    """A program that listens from its first line on."""
    file = tmp_path / "program.py"
    file.write_text(f"from meshmpi.training.signals import *\nlisten_for_life()\n{text}")
    return [sys.executable, str(file)]


def started(command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **more}
    return subprocess.Popen(command, text=True, **pipes)


def signalled(process, number):
    """Status, output and errors of a process that gets a signal as soon as it says that it is ready."""
    assert "ready" in process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def training(tmp_path, *more, prefix=()):
    """A launching process of a training on two ranks."""
    config = tmp_path / "config.toml"
    config.write_text(soak.config(tmp_path / "text.txt", 600))
    words = ["-m", "meshmpi", "train", str(config), "--ranks", "2", "--out", str(tmp_path / "run"), *more]
    return started([*prefix, sys.executable, *words], stderr=subprocess.STDOUT)


@pytest.mark.matrix
def test_a_program_with_nothing_to_save_ends_within_its_patience(tmp_path):
    """The main thread is inside a call to C here, and never comes to a place to leave."""
    slow = script(
        tmp_path,
        "import ctypes\nprint('ready', flush=True)\nsleep = ctypes.CDLL(None).sleep\nwhile True:\n    sleep(60)\n",
    )
    status, _, err = signalled(started(slow), signal.SIGTERM)
    assert status == STOPPED
    assert err.startswith("stopped by SIGTERM before the first step")


def test_a_signal_during_the_exit_changes_nothing(tmp_path):
    late = script(
        tmp_path,
        "import os, time\nwork_begins()\n"
        "class Last:\n"  # goes while modules are cleared, long after atexit functions
        "    def __del__(self, write=os.write, sleep=time.sleep):\n"
        "        write(1, b'ready\\n')\n"
        "        sleep(1.0)\n"
        "last = Last()\n",
    )
    status, _, err = signalled(started(late), signal.SIGTERM)
    assert (status, err) == (0, "")


def test_blocked_signals_wait_for_the_program():
    prefix = blocked_prefix()
    if not prefix:
        pytest.skip("this env cannot block signals")
    text = (
        "import signal, time; print('ready', flush=True); time.sleep(1)\n"
        "from meshmpi.training.signals import listen_for_life, noted\n"
        "listen_for_life(); print(noted())\nraise SystemExit(3)"
    )
    status, out, err = signalled(started([*prefix, sys.executable, "-c", text]), signal.SIGUSR1)
    assert (status, out.strip()) == (3, "SIGUSR1"), err


def test_a_launching_process_behind_env_is_stopped_while_python_starts(tmp_path):
    """As docs/cluster.md advises; Python itself has no handler yet."""
    prefix = blocked_prefix()
    if not prefix:
        pytest.skip("this env cannot block signals")
    process = training(tmp_path, prefix=prefix)
    while not blocks(process.pid, signal.SIGTERM):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    assert "step 1" not in out and "Traceback" not in out


def blocks(pid, number):
    with open(f"/proc/{pid}/status") as file:
        blocked = next(line for line in file if line.startswith("SigBlk"))
    return bool(int(blocked.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.matrix
def test_a_few_trials_of_the_soak():
    """`python -m tests.soak signals`: two trials on 2 ranks, resumed and compared."""
    options = argparse.Namespace(trials=2, quick=True, ranks=[2], limit=120.0, steps=120, resumed=1.0, seed=3)
    for row in soak.run(options):
        assert not row.failed, row


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launching_process_hands_the_request_on(tmp_path, number):
    process = training(tmp_path, "--set", "train.steps=1000000", "--set", "evaluate.every=0")
    for line in process.stdout:
        if line.startswith("step "):
            break
    began = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    name = signal.Signals(number).name
    assert f", on {name} at the launching process\n" in out and "SIGUSR1" not in out
    assert re.search("stopping after step [1-9]", out) and "Traceback" not in out
    assert time.monotonic() - began < 30
    assert checkpoint.find(tmp_path / "run" / "checkpoints")
    assert not list(tmp_path.glob(".run.stop-*"))


def launching(tmp_path, ranks_do):
    """A launching process of one rank, which says "ready" and then does this."""
    (tmp_path / "rank.py").write_text(
        "import time\nfrom meshmpi.training.signals import *\nlisten_for_life()\n"
        f"from meshmpi.training.signals import described\nprint('ready', flush=True)\n{ranks_do}"
    )
    text = (
        "import sys; from meshmpi.training import signals; signals.listen_for_life()\n"
        "from pathlib import Path; from meshmpi.commands.starting import on_ranks\n"
        f"run = Path({str(tmp_path / 'runs' / 'x')!r})\n"
        "sys.exit(on_ranks(1, ['train'], module='rank', run=run))"
    )
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    return started([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_ranks_learn_which_signal_the_launching_process_got(tmp_path, number):
    process = launching(
        tmp_path, "work_begins()\nwhile not described():\n    time.sleep(0.01)\nprint(described())\nraise SystemExit(3)"
    )
    status, out, err = signalled(process, number)
    at_launch = "" if number == signal.SIGUSR1 else " at the launching process"
    assert (status, out) == (3, f"{signal.Signals(number).name}{at_launch}\n"), err
    assert not list((tmp_path / "runs").glob(".*"))


@pytest.mark.matrix
def test_ranks_with_nothing_to_save_tell_what_the_launching_process_got(tmp_path):
    process = launching(tmp_path, "while True:\n    time.sleep(60)\n")
    status, _, err = signalled(process, signal.SIGINT)
    assert status == STOPPED
    assert err.startswith("stopped by SIGINT at the launching process before the first step")
    assert err.count("stopped by") == 1


def test_the_launching_process_waits_for_ranks_that_save(tmp_path):
    """Its own patience is over before: it has no work, but a job."""
    process = launching(
        tmp_path,
        f"work_begins()\ntime.sleep({PATIENCE_SECONDS} + 1.5)\nprint('saved', described())\nraise SystemExit(STOPPED)",
    )
    status, out, err = signalled(process, signal.SIGTERM)
    assert (status, err) == (STOPPED, "")
    assert out == "saved SIGTERM at the launching process\n"


def test_a_signal_to_one_rank_is_told_as_before(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_STOP_SIGNAL", str(tmp_path / "none"))
    with StopSignals():
        signal.raise_signal(signal.SIGUSR1)
        assert described() == "SIGUSR1"
        (tmp_path / "none").write_text("SIGINT")
        assert described() == "SIGINT at the launching process"


def test_of_reasons_the_launching_process_comes_first():
    """A host that does not see the file knows the SIGUSR1 only."""
    assert stopping._reason(["", "SIGUSR1"]) == "SIGUSR1 on rank 1"
    assert stopping._reason(["SIGUSR1", "SIGINT at the launching process"]).startswith("SIGINT at")
    assert stopping._reason(["SIGTERM"]) == "SIGTERM"


@pytest.mark.matrix
def test_a_second_interrupt_of_the_launching_process_ends_its_job(tmp_path):
    (tmp_path / "deaf.py").write_text(
        "import signal, sys, time\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, lambda number, frame: print('asked', number, flush=True))\n"
        "print('ready', flush=True)\n"
        "while True:\n    time.sleep(60)\n"
    )
    text = "import sys; from meshmpi.commands.starting import on_ranks; sys.exit(on_ranks(1, ['train'], module='deaf'))"
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    process = started([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path})
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == f"asked {int(signal.SIGUSR1)}\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
