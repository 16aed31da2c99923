"""Mistakes on the command line: one message with what, why and what to do; no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshmpi import cli

CONFIG = '[mesh]\nshape = "rows:2"\n\n[model]\nlayers = 1\n\n[train]\nsteps = 1\n'

MISTAKES = {
    "a configuration that does not exist": (
        ["train", "ran.toml", "--dry-run"],
        ["ConfigError", "ran.toml", "does not exist", "Did you mean 'run.toml'?"],
    ),
    "an override of a key that does not exist": (
        ["train", "run.toml", "--dry-run", "--set", "train.stepz=5"],
        ["ConfigError", "'stepz'", "--set train.stepz=5", "Did you mean 'steps'?"],
    ),
    "an override out of range": (
        ["train", "run.toml", "--dry-run", "--set", "train.steps=-1"],
        ["ConfigError", "'train.steps' is -1", "--set train.steps=-1", "at least 0"],
    ),
    "ranks that the mesh has not": (
        ["train", "run.toml", "--ranks", "3"],
        ["MeshError", "{rows: 2}", "needs 2 ranks", "has 3", "mpirun -n 2", "{rows: 3}"],
    ),
    "a run that does not exist": (["sample", "runs/none"], ["CheckpointError", "runs/none"]),
    "a key of another section": (
        ["train", "run.toml", "--dry-run", "--set", "layout=batch:rows"],
        ["ConfigError", "no key 'layout'", "the top level", "Did you mean 'mesh.layout'?"],
    ),
    "a layout over an axis that is not there": (
        ["train", "run.toml", "--dry-run", "--set", "mesh.layout=batch:row"],
        ["'batch'", "'row'", "{rows: 2}", "Did you mean 'rows'?"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_message(name: str, tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    Path("run.toml").write_text(CONFIG)
    arguments, words = MISTAKES[name]
    assert cli.main(arguments) == 1
    said = capfd.readouterr().err
    assert [w for w in words if w not in said] == [], said
    assert "Traceback" not in said and said.count("Error: ") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["there is no command 'trian'", "'train'"]),
        (["train", "--rank", "two"], ["--rank", "invalid int value: 'two'"]),
    ],
)
def test_a_command_or_option_that_does_not_exist(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert [w for w in words if w not in said] == [], said
