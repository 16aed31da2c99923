"""A run folder that an older version wrote still resumes, and its model is still used.

`old_run` was written by commit 062789b on 2 ranks with ``d_ff`` stored split; it was stopped after step 2 of 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.pretrained.model import open_model
from meshmpi.transformer.pretrained.scoring import Scorer
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.saved import open_run

LOSSES, HELD_OUT = [4.170909881591797, 4.169661045074463], 4.169355392456055
"""Losses of steps 3 and 4, and the held-out loss after them, when commit 062789b went on itself."""


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(Path(__file__).parent / "old_run", tmp_path / "run")


@pytest.mark.parametrize("mesh", ["all:2", "all:1"])
def test_it_resumes(folder, mesh):
    settings = open_run(folder).settings
    train(settings, folder, mesh=mm.SimulatedMesh(mesh), resume=True, say=lambda line: None)
    rows = read_metrics(folder)
    assert [r["loss"] for r in rows if r.get("step", 0) > 2 and "loss" in r] == pytest.approx(LOSSES, rel=1e-5)
    assert [r["held_out_loss"] for r in rows if "held_out_loss" in r][-1] == pytest.approx(HELD_OUT, rel=1e-5)


def test_every_setting_is_read(folder):
    """Settings that the run wrote down are those that are read back."""
    written = json.loads((folder / "settings.json").read_text())
    found = open_run(folder).settings
    for section, values in written.items():
        if isinstance(values, dict) and section != "baselines":
            mine = getattr(found, section)
            assert {k: getattr(mine, k) for k in values} == values


def test_its_model_and_vocabulary_are_used(folder, capsys):
    model = open_model(folder)
    assert model.tokenizer().decode(model.tokenizer().encode("To be")) == "To be"
    assert Scorer(model, mm.SimulatedMesh("all:1")).loaded()["decoder/embedding"].shape == (model.config.vocab, 16)
    assert cli.main(["checkpoint", "ls", str(folder)]) == 0
    assert "step-00000002" in capsys.readouterr().out
