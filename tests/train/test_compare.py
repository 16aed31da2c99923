"""`meshmpi compare`: what differs between runs, also between unfinished and old ones."""

from __future__ import annotations

import json
import re

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.errors import DataError
from meshmpi.training.callback import Callback
from meshmpi.training.compare import FACTS, comparison, plot_comparison, read_run, read_runs
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.run import train
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.trainer import Trainer
from tests.train.small import TEXT, small


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, a longer one with other settings on another mesh, and one that was cut short."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(TEXT)

    def settings(*overrides):
        more = ("evaluate.every=3", "evaluate.windows=6", "sample.tokens=0", "checkpoint.at_end=false")
        return load(Settings, None, small(root, *more, *overrides))

    quiet = {"say": lambda line: None}
    train(settings(), root / "a", mesh=mm.SimulatedMesh("all:1"), **quiet)
    longer = settings("train.steps=9", "optimizer.learning_rate=0.01")
    train(longer, root / "b", mesh=mm.SimulatedMesh("all:2"), **quiet)

    class Fails(Callback):
        def on_step(self, step):
            if step.number == 4:
                raise KeyboardInterrupt

    cut = Trainer(settings("train.seed=1"), mm.SimulatedMesh("all:1"), root / "c", **quiet)
    cut.callbacks.append(Fails())
    (root / "c").mkdir()
    (root / "c" / "settings.json").write_text((root / "a" / "settings.json").read_text())
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    return root


def row(text, label, which=0):
    """Values of a row; training losses stand above held-out ones."""
    found = [line for line in text.splitlines() if line.strip().startswith(f"{label}  ")]
    return found[which].strip()[len(label) :].split()


def test_the_table_of_two_runs(runs):
    text = comparison(read_runs([runs / "a", runs / "b"]))
    assert text.splitlines()[0].split() == ["a", "b"]
    assert row(text, "train.steps") == ["6", "9"]
    assert row(text, "optimizer.learning_rate") == ["0.001", "0.01"]
    assert "train.batch" not in text  # equal
    assert row(text, "steps done") == ["6", "of", "6", "9", "of", "9"]
    assert row(text, "mesh") == ["{all:", "1}", "{all:", "2}"]
    a, b = read_run(runs / "a"), read_run(runs / "b")
    at = sorted(set(a.losses()) & set(b.losses()))
    assert at == [1, 2, 3, 4, 5, 6]
    assert row(text, "step 6")[0] == f"{a.losses()[6]:.4f}"
    held_out = [f"{r.losses('held_out_loss')[3]:.4f}" for r in (a, b)]
    assert row(text, "step 3", -1) == held_out
    assert len(re.findall(r"^  last ", text, re.MULTILINE)) == 2
    assert row(text, "tokens/s (median step)")[0] != "-"
    sent = row(text, "MB sent per rank and step")
    assert float(sent[0]) == 0 < float(sent[1])
    memory = [json.loads((runs / r / FACTS).read_text())["memory_bytes"] for r in "ab"]
    assert row(text, "MB of memory per rank") == [f"{m / 1e6:.4g}" for m in memory]


def test_an_unfinished_run_and_one_without_steps_compare(runs, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "settings.json").write_text((runs / "a" / "settings.json").read_text())
    text = comparison(read_runs([runs / "a", runs / "c"]))
    assert row(text, "steps done") == ["6", "of", "6", "4", "of", "6"]
    text = comparison(read_runs([runs / "a", tmp_path / "new"]))
    assert row(text, "steps done") == ["6", "of", "6", "0", "of", "6"]
    assert row(text, "tokens/s (median step)")[1] == "-"
    assert "settings that differ" not in text


def test_one_run_alone_is_a_summary(runs):
    text = comparison(read_runs([runs / "a"]))
    assert "settings that differ" not in text
    assert row(text, "step 6") == [f"{read_run(runs / 'a').losses()[6]:.4f}"]


def test_names_tell_runs_apart(runs, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").symlink_to(runs / "a")
    names = [r.name for r in read_runs([runs / "a", tmp_path / "x" / "a"])]
    assert names == [f"{runs.name}/a", "x/a"]


def test_the_picture_has_the_curves_of_all(runs, tmp_path, capsys):
    image = pytest.importorskip("matplotlib.image", reason="the extra 'plot' is not installed")
    path = tmp_path / "both.png"
    assert cli.main(["compare", str(runs / "a"), str(runs / "b"), "--png", str(path)]) == 0
    assert f"drew {path}" in capsys.readouterr().out
    assert image.imread(path).shape[:2] == (600, 960)
    alone = plot_comparison([read_run(runs / "a")], tmp_path / "one.png")
    assert alone.read_bytes() != path.read_bytes()


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    with pytest.raises(DataError, match="is not the folder of a run: settings.json"):
        read_runs([runs / "a", tmp_path / "nowhere"])
    assert cli.main(["compare", str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        read_run(tmp_path)
