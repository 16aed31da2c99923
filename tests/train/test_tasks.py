"""Tasks: what a run learns is chosen by a setting or given; the paper's translation models."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import checkpoint, cli
from meshmpi.commands.model import model_of
from meshmpi.commands.planning import plan_of
from meshmpi.errors import CheckpointError, ConfigError
from meshmpi.runtime.feeding import BlockFeeder
from meshmpi.training.callback import Sample
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.models import encoder_decoder_parameter_count, paper_translation_model
from meshmpi.transformer.tasks.base import Task
from meshmpi.transformer.tasks.language_model import LanguageModelTask
from meshmpi.transformer.tasks.registry import TASKS, task_class
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.evaluation import HeldOutLoss
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.saved import open_run
from meshmpi.transformer.training.settings import Settings
from tests.train.test_loop import run, settings

pytestmark = pytest.mark.usefixtures("cache")

CONFIGS = Path(__file__).resolve().parents[2] / "apps" / "transformer" / "configs"
PRINTED = (0.15, 0.24, 0.42, 0.77, 1.48, 2.89)
"""Billions of parameters in the paper's Table 3."""


def test_every_choice_of_the_setting_has_a_class():
    choices = get_args(get_type_hints(Settings)["task"])
    for name in choices:
        assert issubclass(task_class(name), Task) and task_class(name).name == name
    assert set(choices) == set(TASKS)
    with pytest.raises(ConfigError, match="there is no task 'translate'. Did you mean 'transl"):
        task_class("translate")
    with pytest.raises(ConfigError, match="'task' is 'lmm'"):
        load(Settings, None, ["task=lmm"])


class Counting(LanguageModelTask):
    """A task of a user's own: another sample and another evaluation."""

    def evaluation(self, held_out, total, seconds):
        found = super().evaluation(held_out, total, seconds)
        return HeldOutLoss(found.loss, seconds, {"sum": total}, None, found.tokens, found.share)

    def sample(self, variables, layout):
        return Sample("one\ntwo", {"lines": 2.0}, "what it says")


def test_a_task_of_ones_own(tmp_path):
    lines = []
    result = train(
        settings(tmp_path), tmp_path / "run", mesh=mm.SimulatedMesh("all:2"), say=lines.append, task=Counting
    )
    assert result.sample == "one\ntwo" and result.measures == {"lines": 2.0}
    records = read_metrics(tmp_path / "run")
    assert records[-1] == {"step": 8, "lines": 2.0}
    held = [r for r in records if "held_out_loss" in r]
    assert all("bits_per_byte" not in r and r["sum"] > r["held_out_loss"] for r in held)
    assert "---- what it says ----\none\ntwo\n----" in lines
    assert any("sum " in line and "bits/byte" not in line for line in lines)


def test_first_values_from_elsewhere(tmp_path):
    """As fine-tuning needs them; a resumed run keeps its own."""
    first, _ = run(tmp_path, "one", "train.steps=3")

    def initialize(trainer):
        assert trainer.done == 0
        checkpoint.load(open_run(tmp_path / "one").manifest, trainer.step.variables)

    made = settings(tmp_path, "train.steps=0")
    mesh = mm.SimulatedMesh("all:1")
    other = train(made, tmp_path / "two", mesh=mesh, say=[].append, initialize=initialize)
    assert other.step == 0
    np.testing.assert_allclose(other.evaluation.loss, first.evaluation.loss, rtol=1e-6)

    def never(trainer):
        raise AssertionError("a resumed run was given first values")

    train(made, tmp_path / "two", mesh=mesh, say=[].append, initialize=never, resume=True)


def test_feeds_that_a_program_does_not_need_are_left_out():
    with mm.Graph() as graph:
        x, _ = mm.placeholder("x", "batch:4"), mm.placeholder("unused", "batch:4")
        y = mm.reduce_sum(x)
    step = mm.compile(graph, mm.SimulatedMesh("all:2"), "batch:all", fetches=[y])
    feeder = BlockFeeder(step, ("x", "unused"))
    assert dict(feeder.held) == {"x": None}
    fed = feeder.feeds({"x": np.ones(4, np.float32), "unused": np.ones(4, np.float32)})
    assert float(step(fed)[y]) == 4.0


def test_an_opened_run_knows_its_model(tmp_path):
    run(tmp_path, "run", "train.steps=1")
    saved = open_run(tmp_path / "run")
    assert saved.config.d_model == 16 and saved.vocabulary.size == saved.config.vocab
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        open_run(tmp_path / "elsewhere")


# ---- the paper's translation models ----------------------------------------------------------


def paper_settings(k, *more):
    sizes = [f"model.d_ff={2048 * 2**k}", f"model.heads={4 * 2**k}"]
    return load(Settings, CONFIGS / "paper_mt.toml", [*sizes, *more])


@pytest.mark.parametrize("k", range(6))
def test_paper_translation_models(k):
    made = paper_settings(k)
    config = task_class(made.task).transformer(made, 32512)
    assert config.with_options(activation_dtype="") == paper_translation_model(k)
    count = encoder_decoder_parameter_count(config)
    assert f"{count / 1e9:.2f}" == f"{PRINTED[k]:.2f}"
    assert (made.train.batch, made.train.steps) == (128, 154_000)


@pytest.mark.parametrize("k", range(6))
def test_paper_translation_models_lower_for_128_ranks(k):
    """One layer of each; heads 4 do not fill 8 ranks, which is legal."""
    layout = "mesh.layout=batch:rows;vocab:cols;d_ff:cols;heads:cols"
    settings = paper_settings(k, "model.layers=1", "mesh.shape=rows:16;cols:8", layout)
    report, _ = plan_of(model_of(settings, "paper", mm.MeshShape(settings.mesh.shape)), "")
    assert "(128 ranks)" in report and "all_reduce over cols" in report


@pytest.mark.matrix
def test_the_largest_is_planned_on_128_ranks(capsys):
    words = ["plan", str(CONFIGS / "paper_mt.toml"), "--set", "model.d_ff=65536"]
    words += ["--set", "model.heads=128", "--mesh", "rows:16;cols:8", "--layout"]
    assert cli.main([*words, "batch:rows;vocab:cols;d_ff:cols;heads:cols"]) == 0
    out = capsys.readouterr().out
    assert "2,885,451,776 parameters, mesh {rows: 16, cols: 8} (128 ranks)" in out
