"""train --init-from and export: fine-tuning a checkpoint and writing the result back."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import meshmpi as mm
from meshmpi.transformer.pretrained import architecture
from meshmpi.transformer.pretrained.model import open_model
from tests.pretrained.command_line import (
    ESM,
    GPT2,
    T5,
    byte_tokenizer,
    held_out_loss,
    log_probabilities,
    made,
    on_ranks,
    refused,
    run,
    settings_file,
    table,
    written,
)

pytestmark = pytest.mark.usefixtures("simulated")


def test_fine_tuning_and_writing_back(tmp_path, capsys, simulated_training):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    config = settings_file(tmp_path)
    common = ("train", config, "--init-from", folder, "--set", "optimizer.learning_rate=0.01")
    out = run(capsys, *common, "--out", tmp_path / "run")
    assert f"first values are those of {folder}" in out
    # Before any step the model is the checkpoint's.
    before = run(capsys, *common, "--out", tmp_path / "zero", "--set", "train.steps=0")
    file = written(tmp_path / "lines", "the sea and\n")
    assert held_out_loss(out) < held_out_loss(before)
    untouched = table(run(capsys, "score", tmp_path / "zero", file))
    tuned = table(run(capsys, "score", tmp_path / "run", file))
    assert untouched[0][1] == tuned[0][1] == "10"  # a run has no token before the first
    assert float(tuned[0][2]) > float(untouched[0][2])
    logs = log_probabilities(folder, GPT2, open_model(folder).tokenizer().encoded("the sea an").ids)
    ids = open_model(folder).tokenizer().encoded("the sea and").ids
    expected = sum(logs[i, t] for i, t in enumerate(ids[1:]))
    assert float(untouched[0][2]) == pytest.approx(expected, abs=2e-4)
    # Written back, only the first positions have changed.
    run(capsys, "export", tmp_path / "run", tmp_path / "out", "--like", folder, "--max-shard", "20 KB")
    old, new = load_file(folder / "model.safetensors"), {}
    for part in (tmp_path / "out").glob("*.safetensors"):
        new |= load_file(part)
    assert sorted(old) == sorted(new)
    positions = "transformer.wpe.weight"
    np.testing.assert_array_equal(new[positions][12:], old[positions][12:])
    assert not np.array_equal(new[positions][:12], old[positions][:12])
    assert (tmp_path / "out" / "tokenizer.json").exists()
    scored = table(run(capsys, "score", tmp_path / "out", file))
    assert float(scored[0][2]) > float(table(run(capsys, "score", folder, file))[0][2])
    # A run goes on from a run, and resumes.
    again = run(
        capsys, "train", config, "--init-from", tmp_path / "run", "--out", tmp_path / "b", "--set", "train.steps=0"
    )
    assert held_out_loss(again) == pytest.approx(held_out_loss(out), rel=1e-5)
    more = run(capsys, *common, "--out", tmp_path / "run", "--resume", "--set", "train.steps=4")
    assert "resumed from" in more and "first values" not in more


def test_a_given_vocabulary_replaces_the_tokenizer(tmp_path, capsys, simulated_training):
    folder = made(tmp_path / "m", GPT2)
    config = settings_file(tmp_path, **{"data.vocabulary": '"bytes"'})
    run(capsys, "train", config, "--init-from", folder, "--out", tmp_path / "run")
    found = open_model(tmp_path / "run")
    assert found.manifest.about["vocabulary"] == {"kind": "bytes"}
    assert (found.config.length, found.config.vocab) == (12, 300)


def test_what_cannot_be_fine_tuned(tmp_path, capsys):
    config = settings_file(tmp_path)
    for name, values, kind in (("e", ESM, "encoder"), ("t", T5, "encoder_decoder")):
        folder = made(tmp_path / name, values)
        refused(
            capsys,
            f"is of kind {kind}, the task is 'lm'",
            "train",
            config,
            "--init-from",
            folder,
            "--out",
            tmp_path / "run",
        )
    folder = made(tmp_path / "m", GPT2)
    refused(capsys, "m has no tokenizer", "train", config, "--init-from", folder, "--out", tmp_path / "run")
    refused(capsys, "m exists already", "export", folder, folder, "--like", folder)


def test_a_dry_run_has_the_sizes_of_the_checkpoint(tmp_path, capsys):
    folder = byte_tokenizer(made(tmp_path / "m", GPT2))
    out = run(capsys, "train", settings_file(tmp_path), "--init-from", folder, "--dry-run")
    count = mm.transformer.parameter_count(architecture(GPT2).config.with_options(length=12))
    assert f"{count:,}" in out


@pytest.mark.matrix
def test_fine_tuning_on_two_ranks(tmp_path, capsys, simulated_training):
    folder = made(tmp_path / "m", GPT2)
    config = settings_file(tmp_path, **{"data.vocabulary": '"bytes"'})
    common = ("train", config, "--init-from", folder)
    expected = held_out_loss(run(capsys, *common, "--out", tmp_path / "simulated"))
    done = on_ranks(tmp_path, 2, *common, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert held_out_loss(done.stdout) == pytest.approx(expected, rel=1e-5)
    done = on_ranks(tmp_path, 2, "export", tmp_path / "run", tmp_path / "out", "--like", folder, "--layout", "storage")
    assert done.returncode == 0, done.stderr
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(load_file(folder / "model.safetensors"))
