"""`meshmpi verify`: its exit status; and commands whose output nobody reads to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshmpi import cli

BROKEN_PIPE = 141
MODEL = """
import meshmpi as mm

def build():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:6")
        mm.reduce_sum(mm.einsum([x, mm.get_variable("w", "io:6;hidden:2")], "batch:4;hidden:2"))
    return graph
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    name = f"model_{os.getpid()}_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:build"


@pytest.mark.parametrize(
    ("layouts", "status", "said"),
    [
        (["batch:rows"], 0, ["1 layout computes what one rank does"]),
        (["batch:zz"], 1, ["No layout was tried: nothing is verified.", "'zz'", "{rows: 2}"]),
        (
            ["batch:rows", "batch:rows;io:rows"],
            1,
            ["1 layout computes", "layout 'batch:rows;io:rows' on mesh {rows: 2} is illegal: "],
        ),
        (["all"], 0, ["4 layouts compute what one rank does", "4 of 8 assignments"]),
    ],
)
def test_verify_fails_where_a_named_layout_is_illegal(model, layouts, status, said, capsys):
    assert cli.main(["verify", model, "--mesh", "rows:2", "--layouts", *layouts]) == status
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == [], out


def test_verify_says_what_would_make_a_layout_legal(model, capsys):
    assert cli.main(["verify", model, "--mesh", "rows:2", "--layouts", "batch:row"]) == 1
    assert "Did you mean 'rows'?" in capsys.readouterr().out


# ---- pipes -----------------------------------------------------------------------------------


def unread(*arguments: str, code: str = "", buffered: bool = True) -> tuple[int, str]:
    """Exit status and stderr of a command whose stdout has no reader any more."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    reading, writing = os.pipe()
    os.close(reading)
    program = ["-c", code] if code else ["-m", "meshmpi", *arguments]
    done = subprocess.run(
        [sys.executable, *program], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=environment
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("rows", [0, 20_000])  # shorter than a buffer and longer
def test_status_whose_output_nobody_reads_ends_as_by_sigpipe(rows, buffered):
    code = (
        "import sys; from meshmpi import cli; from meshmpi.guard import status\n"
        f"status.read = lambda run: []\nstatus.table = lambda rows: 'row\\n' * {rows + 1}\n"
        "sys.exit(cli.main(['status', 'run']))"
    )
    assert unread(code=code, buffered=buffered) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_that_nobody_reads_says_nothing(arguments):
    status, said = unread(*arguments)  # argparse itself passes over an error of a write
    assert (status in (0, BROKEN_PIPE), said) == (True, "")


def test_another_broken_pipe_is_no_matter_of_the_user(monkeypatch):
    def broken(options):
        raise BrokenPipeError("of a link between hosts")

    monkeypatch.setattr("meshmpi.transformer.training.saved.open_run", broken)
    with pytest.raises(BrokenPipeError, match="between hosts"):
        cli.main(["sample", "run"])


def test_json_that_is_read_to_its_end_is_whole(tmp_path):
    code = (
        "import sys; from meshmpi import cli; from meshmpi.guard import status\n"
        "status.read = lambda run: []\nsys.exit(cli.main(['status', 'run', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, {"ranks": []}, "")
