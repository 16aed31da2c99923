"""The configurations of apps/transformer: they load, and describe the models that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.commands.model import model_of
from meshmpi.commands.planning import plan_of
from meshmpi.transformer.models import paper_language_model, parameter_count
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings, transformer_config

CONFIGS = Path(__file__).resolve().parents[2] / "apps" / "transformer" / "configs"
LAYOUT = "batch:rows;vocab:cols;d_ff:cols;heads:cols"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_config_builds_its_graph(path):
    settings = load(Settings, path, ["model.layers=1", "model.d_ff=64", "model.d_model=32"])
    built = build_training_graph(settings, transformer_config(settings.model, 65))
    assert built.updates and settings.title


def test_nanogpt_recipe():
    settings = load(Settings, CONFIGS / "nanogpt_shakespeare_char.toml")
    config = transformer_config(settings.model, 65)
    # nanoGPT reports 0.80 M without the 64 x 128 position vectors.
    assert parameter_count(config) - 64 * 128 == 795_904
    assert (settings.train.steps, settings.train.batch, config.length) == (2000, 12, 64)
    assert settings.baselines == {"nanoGPT README": 1.88}


@pytest.mark.parametrize("k", range(7))
def test_paper_language_models(k):
    sizes = [f"model.d_ff={4096 * 2**k}", f"model.heads={4 * 2**k}"]
    settings = load(Settings, CONFIGS / "paper_lm.toml", sizes)
    config = transformer_config(settings.model, 32768)
    assert config.with_options(activation_dtype="") == paper_language_model(k)
    assert (settings.train.batch, settings.train.steps) == (256, 136_000)


def test_yardstick_has_the_size_of_its_peers():
    settings = load(Settings, CONFIGS / "yardstick.toml")
    count = parameter_count(transformer_config(settings.model, 256))
    assert count == 2 * 8192 * 512 + 256 * 512 + 4 * (4 * 512 * 512 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512) + 2 * 512


def test_largest_model_of_the_paper_is_planned_on_its_mesh(capsys):
    words = ["plan", str(CONFIGS / "paper_lm.toml"), "--set", "model.d_ff=262144"]
    words += ["--set", "model.heads=256", "--mesh", "rows:16;cols:32", "--layout", LAYOUT]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "4,899,222,528 parameters, mesh {rows: 16, cols: 32} (512 ranks)" in out
    assert "all_reduce over rows" in out and "bytes of memory" in out


def test_dry_run(tmp_path, capsys):
    words = ["train", str(CONFIGS / "yardstick.toml"), "--dry-run", "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--mesh", "a:2"]) == 0
    assert "bytes sent" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert cli.main([*words, "--ranks", "3", "--set", "model.layers=1"]) == 0  # starts no ranks
    out = capsys.readouterr().out
    assert out.count("mesh {all: 3} (3 ranks)") == 1 and not (tmp_path / "run").exists()
    assert "this machine was not measured" in out or "predicted on" in out
    tpu = ["--set", "model.layers=1", "--set", "mesh.machine=tpuv2"]
    assert cli.main([*words, *tpu]) == 0 and "predicted on TPUv2" in capsys.readouterr().out


def test_report_can_show_the_program():
    settings = load(Settings, CONFIGS / "yardstick.toml", ["model.layers=1"])
    text, data = plan_of(model_of(settings, "yardstick", mm.MeshShape("all:1")), "", program=True)
    assert "program on mesh {all: 1}" in text and "program on mesh {all: 1}" in data["program"]
