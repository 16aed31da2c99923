"""``python -m apps.transformer translate``: its commands and what they say of mistakes."""

from __future__ import annotations

import io
import sys

import pytest

from apps.transformer import translate
from meshmpi import cli
from tests.train.test_translation import cache, small  # noqa: F401  (the fixture)


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def sets(tmp_path, *more):
    return [f"--set={item}" for item in small(tmp_path, *more)]


def test_commands_one_after_the_other(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.toml"
    config.write_text('title = "letters from behind"\n')
    assert translate.main(["prepare", str(config), *sets(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "found: 400" in out and "repeated" in out and "held-out tokens of a vocabulary" in out
    run = str(tmp_path / "run")
    assert translate.main(["train", str(config), *sets(tmp_path), "--out", run]) == 0
    assert "step 6/6" in capsys.readouterr().out
    assert cli.main(["sample", run]) == 1
    assert "run of task 'translation', which does not continue texts" in capsys.readouterr().err
    words = ["evaluate", run, "--sentences", "2", "--beams", "1", "--alpha", "0"]
    assert translate.main(words) == 0
    out = capsys.readouterr().out
    assert "held-out loss:" in out and "BLEU of 2 held-out sentences" in out

    def translated(text, *more):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        status = translate.main(["translate", run, *more])
        found = capsys.readouterr()
        return status, found.out, found.err

    status, out, _ = translated(b"abc\n\nfga\n", "--beams", "1")
    assert status == 0 and len(out.splitlines()) == 3 and out.splitlines()[1] == ""
    (tmp_path / "in.txt").write_text("abc\n\nfga\n")
    assert translated(b"", "--beams", "1", "--input", str(tmp_path / "in.txt"))[1] == out
    for text, message in (
        (b"", "DataError: standard input holds no text"),
        (b"abc\na\xff\n", "standard input:2 is not UTF-8: byte 0xff"),
        (b"abc\nabcdefgabcdefg\n", "standard input:2 has 15 tokens, the model takes 12"),
        ("где\n".encode(), "standard input:1 is written in cyrillic letters"),
    ):
        status, _, err = translated(text)
        assert status == 1 and message in err and "Traceback" not in err


def test_runs_of_other_tasks(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text("")
    assert translate.main(["prepare", str(config)]) == 1
    assert "the task of" in capsys.readouterr().err
    assert translate.main(["evaluate", str(tmp_path / "nowhere")]) == 1
    assert "CheckpointError: there is no checkpoint in" in capsys.readouterr().err
