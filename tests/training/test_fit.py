"""`mm.fit` trains any step: forms of data, resume to the bit, evaluations, guards, callbacks, signals, arguments."""

from __future__ import annotations

import csv
import itertools
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.errors import TrainingError
from meshmpi.launch.launch import launch
from meshmpi.training.metrics import read_metrics
from meshmpi.training.signals import STOPPED
from tests.training.small import Rows, batch, network

QUIET = {"every": 2, "plot": False}


def fit(tmp_path, data=batch, steps=6, name="run", mesh="all:2", layout="batch:all", **more):
    """Result, printed lines, and losses by step."""
    step, finite = network(mm.SimulatedMesh(mesh), layout)
    lines = []
    settings = {"log": QUIET, "finite": finite, "say": lines.append, **more}
    result = mm.fit(step, data, steps=steps, folder=tmp_path / name, **settings)
    return result, lines, losses(tmp_path / name)


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


# ---- data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [Rows(), [batch(n) for n in range(6)], (batch(n) for n in itertools.count())],
    ids=["reader", "list", "generator"],
)
def test_every_form_of_data_gives_the_same_losses(tmp_path, data):
    expected = fit(tmp_path, name="function")[2]
    assert len(expected) == 6 and expected[6] < expected[1]
    assert fit(tmp_path, data, name="other")[2] == expected


def test_a_list_begins_anew_and_an_iterator_ends(tmp_path):
    two = [batch(0), batch(1)]
    assert fit(tmp_path, two, name="list")[2] == fit(tmp_path, lambda n: two[n % 2], name="function")[2]
    with pytest.raises(mm.DataError, match=r"the data end after 2 batches, before the run does\. Give fewer steps"):
        fit(tmp_path, iter(two), name="iterator")
    with pytest.raises(mm.DataError, match="the data end after 0 batches"):
        fit(tmp_path, [], name="nothing")


def test_feeds_may_be_named_by_tensors(tmp_path):
    step, _ = network(mm.SimulatedMesh("all:1"))
    graph = step.fetches["loss"].graph
    tensors = {op.output.name: op.output for op in graph.operations if op.output.name in ("x", "t")}
    result = mm.fit(
        step,
        lambda n: {tensors[name]: array for name, array in batch(n).items()},
        steps=2,
        folder=tmp_path / "run",
        log=QUIET,
        say=lambda line: None,
    )
    assert result.step == 2


# ---- resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("form", ["function", "reader", "generator"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path, form, background):
    forms = {"function": lambda: batch, "reader": Rows, "generator": lambda: (batch(n) for n in itertools.count())}
    how = {"checkpoint": {"every": 3, "background": background}, "resume": "auto"}
    whole = fit(tmp_path, forms[form](), 8, "whole")[2]
    fit(tmp_path, forms[form](), 5, "parts", **how)
    result, lines, found = fit(tmp_path, forms[form](), 8, "parts", **how)
    assert found == whole and result.step == 8
    assert any("resumed from" in line and "step 5" in line for line in lines)


def test_a_resumed_run_goes_on_in_another_layout(tmp_path):
    fit(tmp_path, steps=4, checkpoint=2)
    _, lines, found = fit(tmp_path, steps=8, mesh="rows:2;cols:3", layout="batch:rows;hidden:cols", resume=True)
    assert any("another mesh" in line for line in lines)
    expected = fit(tmp_path, steps=8, name="whole")[2]
    assert [found[n] for n in range(1, 9)] == pytest.approx([expected[n] for n in range(1, 9)], rel=1e-4)


def test_other_data_and_an_empty_folder_cannot_be_resumed(tmp_path):
    fit(tmp_path, Rows("mine"))
    with pytest.raises(mm.CheckpointError, match="was trained on other data: their digest was mine, now it is yours"):
        fit(tmp_path, Rows("yours"), resume=True)
    with pytest.raises(mm.CheckpointError):
        fit(tmp_path, name="nothing", resume=True)


def test_an_earlier_run_is_renamed(tmp_path):
    fit(tmp_path)
    _, lines, _ = fit(tmp_path)
    assert any("renamed the earlier run" in line for line in lines) and (tmp_path / "run.1").exists()


@pytest.mark.matrix
def test_a_killed_job_goes_on_to_the_bit(tmp_path):
    """Rank 1 of 2 is killed after step 6; the second job begins at step 4."""

    def job(name, *more):
        argv = ["-m", "tests.training.mpi_programs.fitting", str(tmp_path / name), "10", *more]
        return launch(2, argv, timeout_seconds=60, capture_output=True, environment={"RANKS": "2"})

    assert job("whole").returncode == 0
    assert job("parts", "6").returncode == 69
    done = job("parts")
    assert done.returncode == 0 and "step-00000004, step 4" in done.stdout, done.stdout + done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for rank in range(2):
        assert [r["step"] for r in read_metrics(tmp_path / "whole", rank) if "seconds" in r] == list(range(1, 11))


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_launching_process_hands_signals_on(tmp_path, number):
    """A script started by ``meshmpi run`` saves and leaves by 75."""
    argv = [sys.executable, "-m", "meshmpi", "run", "-n", "2", "-m", "tests.training.mpi_programs.fitting"]
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "RANKS": "2"}
    with subprocess.Popen([*argv, str(tmp_path / "run"), "100000000"], env=environment, **more) as process:
        limit = time.monotonic() + 60
        while not checkpoint.find(tmp_path / "run" / "checkpoints"):
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, text
    told = rf"{number.name} (at the launching process|on rank \d)"
    (stopped,) = re.findall(rf"stopping after step (\d+), on {told}", text)
    assert f"step-{int(stopped[0]):08d}" in text.split("stopping after")[1]


# ---- numbers ---------------------------------------------------------------------------------


def poisoned(number):
    feeds = batch(number)
    if number == 2:
        feeds["x"][0, 0] = np.nan
    return feeds


def test_a_step_that_is_not_finite_stops_the_run_before_its_update(tmp_path):
    with pytest.raises(
        TrainingError,
        match=r"step 3: loss or gradients are not finite.*began here: feed 'x'.*Continue with resume=True",
    ):
        fit(tmp_path, poisoned, checkpoint=1)
    fit(tmp_path, resume=True)  # the checkpoint after step 2 is good
    assert losses(tmp_path / "run") == fit(tmp_path, name="whole")[2]


def test_or_is_skipped(tmp_path):
    result, lines, found = fit(tmp_path, poisoned, guard={"non_finite": "skip"})
    assert result.step == 6 and np.isnan(found[3]) and np.isfinite(found[6])
    assert any("the update of step 3 is skipped" in line for line in lines)
    assert [r["step"] for r in read_metrics(tmp_path / "run") if r.get("skipped")] == [3]


def test_without_the_flag_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(TrainingError, match=r"loss of step 3 is nan; its update was made, as the step does not watch"):
        fit(tmp_path, poisoned, finite=None)


def test_evaluations(tmp_path):
    asked = []

    def evaluate():
        asked.append(len(losses(tmp_path / "run")))
        return {"loss": 1.5, "accuracy": np.float32(0.25)}

    result, lines, _ = fit(tmp_path, evaluate=evaluate, evaluate_every=2)
    assert asked == [2, 4, 6] and result.evaluation.measures == {"accuracy": 0.25}
    assert any(line.startswith("evaluation after step 2: loss 1.5000, accuracy 0.2500") for line in lines)
    records = [r for r in read_metrics(tmp_path / "run") if "accuracy" in r]
    assert [(r["step"], r["held_out_loss"]) for r in records] == [(2, 1.5), (4, 1.5), (6, 1.5)]
    assert fit(tmp_path, evaluate=lambda: 2)[0].evaluation.loss == 2.0
    with pytest.raises(mm.ConfigError, match=r"evaluate\(\) returned \{'loss': 'low'\}"):
        fit(tmp_path, evaluate=lambda: {"loss": "low"})


# ---- callbacks -------------------------------------------------------------------------------


class Seen(mm.Callback):
    def __init__(self):
        self.calls = []

    def on_begin(self, done, last):
        self.calls.append(("begin", self.run.done, self.run.mesh.shape.size))

    def on_step(self, step):
        self.calls.append(("step", step.number, step.reports["largest"] >= step.loss))

    def on_evaluate(self, number, evaluation):
        self.calls.append(("evaluate", number, evaluation.loss))

    def on_save(self, path, seconds):
        self.calls.append(("save", path.name))

    def on_end(self, stopped_by):
        self.calls.append(("end", stopped_by))

    def on_failure(self, error):
        self.calls.append(("failure", type(error).__name__))


def test_callbacks_see_everything_in_order(tmp_path):
    seen = Seen()
    fit(tmp_path, steps=2, callbacks=[seen], evaluate=lambda: 0.5, checkpoint=1)
    assert seen.calls == [
        ("begin", 0, 2),
        ("step", 1, True),
        ("save", "step-00000001"),
        ("step", 2, True),
        ("save", "step-00000002"),
        ("evaluate", 2, 0.5),
        ("end", ""),
    ]
    seen = Seen()
    with pytest.raises(TrainingError):
        fit(tmp_path, poisoned, callbacks=[seen])
    assert seen.calls[-1] == ("failure", "TrainingError")


def test_csv_goes_on_where_it_was(tmp_path):
    fit(tmp_path, steps=4, callbacks=[mm.CSVLogger()], checkpoint=3)
    fit(tmp_path, steps=6, callbacks=[mm.CSVLogger()], resume=checkpoint.find(tmp_path / "run" / "checkpoints")[-1])
    with open(tmp_path / "run" / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4, 5, 6]
    assert {int(r["step"]): float(r["loss"]) for r in rows} == losses(tmp_path / "run")


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit(tmp_path, callbacks=[mm.WandbLogger(project="mine")])
    (found,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(found.glob("*.wandb"))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    fit(tmp_path, log={**QUIET, "tensorboard": True})
    assert list((tmp_path / "run" / "tensorboard").iterdir())


# ---- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"data": {"x": 1}}, "data is one mapping, {'x': 1}. Give lambda step: feeds"),
        ({"data": 3}, "data is 3."),
        ({"steps": -1}, "fit: steps is -1. It must be at least 0."),
        ({"steps": "many"}, "fit: steps is 'many', which is not a whole number. Give an int."),
        ({"checkpoint": {"evry": 3}}, "fit: checkpoint: evry is not a setting. Did you mean 'every'?"),
        ({"checkpoint": "often"}, "fit: checkpoint is 'often', which is not a whole number or a dict."),
        ({"guard": 3}, "fit: guard is 3, which is not a dict. Give a dict, by name."),
        ({"guard": {"non_finite": "skp"}}, "fit: guard: non_finite is 'skp'. Did you mean 'skip'?"),
        ({"log": {"every": 0}}, "fit: log: every is 0."),
        ({"loss": "los"}, "loss= is 'los', which is not a scalar that the step returns."),
        ({"loss": "error"}, "loss= is 'error', which is not a scalar that the step returns."),
        ({"learning_rate": "rate"}, "learning_rate= is 'rate'"),
        ({"evaluate": 0.5}, "fit: evaluate is 0.5, which is not a function."),
        ({"callbacks": [print]}, "which is not a Callback. Subclass mm.Callback, and give an object of it."),
    ],
)
def test_wrong_arguments_are_told_with_a_remedy(tmp_path, more, text):
    with pytest.raises(mm.MeshmpiError) as caught:
        fit(tmp_path, **more)
    assert text in str(caught.value)


def test_a_step_without_a_loss(tmp_path):
    with pytest.raises(mm.ArgumentError, match=r"step is 3, which is not a CompiledStep\. Give what mm.compile"):
        mm.fit(3, batch, steps=1, folder=tmp_path)
    with mm.Graph() as graph:
        x = mm.placeholder("x", [mm.Dimension("a", 3)])
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[mm.square(x)])
    with pytest.raises(mm.ConfigError, match="returns no scalar, and so no loss"):
        mm.fit(step, lambda n: {"x": np.ones(3)}, steps=1, folder=tmp_path)
