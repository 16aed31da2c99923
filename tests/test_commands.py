"""Every command of `meshmpi` runs once, in the order in which a user meets them, on one small run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.commands import doctor, training
from meshmpi.commands.command import watched
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings

SMALL = (
    "data.corpus=text.txt",
    "model.length=8",
    "model.d_model=8",
    "model.d_ff=16",
    "model.heads=2",
    "model.d_kv=4",
    "model.layers=1",
    "train.steps=4",
    "train.batch=4",
    "checkpoint.every=2",
    "evaluate.every=0",
    "sample.tokens=0",
)
SETS = " ".join(f"--set {item}" for item in SMALL)
COMMANDS = {
    "train": f"train quickstart {SETS} --out run",
    "train again": "train run --set train.steps=6",
    "sample": "sample run --tokens 4",
    "plan": f"plan quickstart {SETS} --mesh rows:2;cols:2 --layout batch:rows;d_ff:cols",
    "search": f"search quickstart 2 {SETS} --machine tpuv2 --seconds 1",
    "search of a function": "search model:graph --ranks 2 --machine tpuv2",
    "plan of a function": "plan model:graph --ranks 2 --layout batch:all",
    "show of settings": f"show quickstart {SETS} --ranks 2",
    "calibrate": "calibrate --quick --repeats 1 --out machine.toml",
    "verify": "verify model:graph --mesh rows:2",
    "show": "show model:graph --mesh rows:2 --layout batch:rows --out graph.html",
    "status": "status run",
    "compare": "compare run",
    "checkpoint ls": "checkpoint ls run",
    "checkpoint verify": "checkpoint verify run",
    "checkpoint diff": "checkpoint diff run run",
    "checkpoint convert": "checkpoint convert run converted --mesh rows:2 --layout d_ff:rows",
    "checkpoint export": "checkpoint export run arrays.safetensors",
    "score": "score run lines",
    "generate": "generate run --prompt the --tokens 3",
    "doctor": "doctor --ranks 0",
    "run": "run --ranks 2 --show script.py --steps 3",
}
ELSEWHERE = {"export"}
"""Needs a checkpoint to write like: tests/pretrained/test_fine_tuning.py."""
TEXT_ONLY = {"train", "run"}
"""They have no answer: what they do is in files."""
MODEL = """
import meshmpi as mm

def graph():
    with mm.Graph() as g:
        x = mm.placeholder("x", "batch:4;d:6")
        y = mm.reduce_sum(mm.tanh(x))
    return {"graph": g, "fetches": {"y": y}}
"""


def of_parser(parser: argparse.ArgumentParser, before: str = "") -> Iterator[str]:
    """The commands that a parser knows; those with parts are their parts."""
    parts = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not parts:
        yield before.strip()
    for action in parts:
        for name, part in action.choices.items():
            yield from of_parser(part, f"{before} {name}")


def test_every_command_is_here():
    again = {"train again", "search of a function", "plan of a function", "show of settings"}
    assert {*of_parser(cli._parser())} == {*COMMANDS} - again | ELSEWHERE


def leaves(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of commands without parts, by name."""
    parts = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not parts:
        yield before.strip(), parser
    for action in parts:
        for name, part in action.choices.items():
            yield from leaves(part, f"{before} {name}")


def test_all_commands_with_an_answer_give_it_as_json():
    without = {name for name, parser in leaves(cli._parser()) if "--json" not in parser._option_string_actions}
    assert without == TEXT_ONLY


def documented_keys() -> dict[str, tuple[set[str], str]]:
    """The keys of each command's answer, and the notes that name further ones, by the table in docs/commands.md."""
    page = (Path(__file__).parents[1] / "docs" / "commands.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): ({part.strip(" `") for part in row[2].split(",")}, row[3]) for row in rows}


def test_every_answer_is_documented():
    assert {*documented_keys()} == {name for name, _ in leaves(cli._parser())} - TEXT_ONLY


def test_the_doctor_suggests_names_without_the_command_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        doctor.main(["--jsn"])
    assert "there is no argument '--jsn'. Did you mean '--json'?" in capsys.readouterr().err


def test_commands_that_look_at_a_model_name_it_and_its_ranks_alike():
    parsers = dict(leaves(cli._parser()))
    shared = {"--set", "--storage", "--mesh", "--layout", "--ranks", "--json", "--help-settings"}
    for name in ("plan", "search", "show", "verify"):
        known = parsers[name]
        assert shared <= {*known._option_string_actions}, name
        assert next(a for a in known._actions if a.dest == "model").help.startswith("a TOML file"), name


def test_help_fits_a_screen_and_help_settings_has_the_rest(capsys: pytest.CaptureFixture[str]):
    for name, parser in leaves(cli._parser()):
        assert len(parser.format_help().splitlines()) < 60, name
    for name in ("train", "plan", "search", "show", "verify"):
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help-settings"])
        assert end.value.code == 0 and "[optimizer]" in capsys.readouterr().out, name


@pytest.mark.parametrize(
    "line, said",
    [
        ("plan quickstart --layuot x", ["usage: meshmpi plan", "there is no argument '--layuot'", "'--layout'?"]),
        ("plann quickstart", ["usage: meshmpi [", "there is no command 'plann'. Did you mean 'plan'?"]),
        ("checkpoint list run", ["usage: meshmpi checkpoint [", "there is no action 'list'. "]),
        ("checkpoint vrify run", ["there is no action 'vrify'. Did you mean 'verify'?"]),
        ("doctor --jsn", ["usage: meshmpi doctor", "there is no argument '--jsn'. Did you mean '--json'?"]),
        ("run --rnaks 2 a.py", ["usage: meshmpi run", "there is no argument '--rnaks'. Did you mean '--ranks'?"]),
        ("run a.py", ["usage: meshmpi run", "required: -n/--ranks"]),
        ("run -n 2 --bind cor a.py", ["usage: meshmpi run", "--bind cannot be 'cor'. Did you mean 'core'?"]),
        ("plan", ["usage: meshmpi plan", "required: model"]),
        ("show a b", ["usage: meshmpi show", "there is no argument 'b'"]),
        ("plan quickstart --ranks two", ["usage: meshmpi plan", "argument --ranks: invalid int value: 'two'"]),
    ],
)
def test_errors_show_the_usage_of_the_command(line: str, said: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and [words for words in said if words not in err] == [], err


@pytest.mark.parametrize(
    "line, said",
    [
        ("plan quickstart --ranks 3 --mesh rows:2", "3"),
        ("search model:graph", "a search needs a number of ranks"),
        ("search model:graph 2 --ranks 3", "RANKS is 2, and --ranks 3"),
        ("show model:grahp", "Did you mean 'graph'?"),
        ("verify model:graph --set a=1", "a function does not take settings"),
        ("plan model:graph --ranks 0", "--ranks is 0"),
    ],
)
def test_wrong_numbers_of_ranks_and_models(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    (tmp_path / "model.py").write_text(MODEL)
    assert cli.main(line.split()) == 1
    assert said in capsys.readouterr().err


def test_with_json_everything_else_goes_to_stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    import meshmpi.planner.report as report

    right = report.planned
    monkeypatch.setattr(report, "planned", lambda *a, **k: print("on the way") or right(*a, **k))
    assert cli.main(["plan", "quickstart", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["ranks"] == 1 and "on the way" in said.err


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    words = ["search", "quickstart", "2", "--machine", "tpuv2", "--seconds", "0.2", "--set", "model.layers=1"]
    assert cli.main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("meshmpi.training.progress.is_terminal", lambda stream: True)
    assert cli.main(words) == 0
    drawn = capsys.readouterr().err
    assert "layouts, 0:00" in drawn and "of " in drawn and "best " in drawn, drawn


def test_progress_tells_the_time_taken_and_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr("meshmpi.training.progress.is_terminal", lambda stream: True)
    monkeypatch.setattr("meshmpi.commands.command.time.monotonic", lambda: next(now))
    monkeypatch.setattr("meshmpi.training.progress.bar", lambda done, total, text, width: f"{done}/{total} {text}|")
    with watched("layouts") as looked:
        for done, total in ((0, 8), (1, 8), (5, 8), (0, 3), (1, 3)):
            looked(done, total, "x")
    drawn = capsys.readouterr().err.replace("\r\x1b[K", "").split("|")[:-1]
    # Each drawing reads the clock twice, so 20 s pass between two of them.
    assert drawn == [
        "0/8 layouts, 0:10, x",
        "1/8 layouts, 0:30, 2:20 left, x",
        "5/8 layouts, 0:50, 0:24 left, x",
        "0/3 layouts, 1:10, x",
        "1/3 layouts, 1:30, 0:40 left, x",
    ]


def test_a_shell_is_given_completions(tmp_path: Path):
    pytest.importorskip("argcomplete")
    answer, line = tmp_path / "answer", "meshmpi pl"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    environment |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-m", "meshmpi"], env=environment, check=True, timeout=60)
    assert answer.read_text().split() == ["plan"]


def test_run_starts_a_program_with_its_own_options(tmp_path: Path):
    (tmp_path / "ranks.py").write_text("import sys; from mpi4py import MPI; print(MPI.COMM_WORLD.size, *sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "meshmpi", "run", "-n", "2", str(tmp_path / "ranks.py"), "-n", "5", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0 and done.stdout == 2 * "2 -n 5 --help\n", done.stdout + done.stderr


def test_a_run_goes_on_with_as_many_ranks(tmp_path: Path):
    settings = load(Settings, None, ["train.steps=40"])
    for ranks, more in [(1, ""), (4, " --ranks 4")]:
        done = training._next_commands(settings, tmp_path, "meshmpi", ranks, stopped=False)
        assert f"meshmpi train {tmp_path}{more} --set train.steps=80\n" in done
        stopped = training._next_commands(settings, tmp_path, "meshmpi", ranks, stopped=True)
        assert stopped.endswith(f"meshmpi train {tmp_path}{more}")


def test_a_text_in_place_of_settings_is_recognised(tmp_path: Path):
    (tmp_path / "own.txt").write_text("To be or not to be\n")
    with pytest.raises(mm.ConfigError, match=r"--set data\.corpus=.*own\.txt"):
        load(Settings, tmp_path / "own.txt", [])


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"meshmpi {mm.__version__}\n"


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("meshmpi.transformer.training.setup.make_mesh", lambda s: mm.SimulatedMesh(s.shape or "all:1"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (tmp_path / "lines").write_text("the fox\n")
    (tmp_path / "model.py").write_text(MODEL)
    documented = documented_keys()
    for name, line in COMMANDS.items():
        status = cli.main(line.split(" "))
        said = capfd.readouterr()
        assert status == 0 and said.out, f"{name}: {said.out}{said.err}"
        if name.split()[0] not in TEXT_ONLY:
            shutil.rmtree(tmp_path / "converted", ignore_errors=True)
            assert cli.main([*line.split(" "), "--json"]) == 0, name
            found = json.loads(capfd.readouterr().out)
            keys, notes = documented[name.split(" of ")[0]]
            further = [key for key in found if key not in keys and f"`{key}`" not in notes]
            assert isinstance(found, dict) and keys <= {*found} and further == [], f"{name} --json: {[*found]}"
        if name == "train again":
            assert "resumed from run/checkpoints/step-00000004" in said.out and "train run --set" in said.out
            assert "schedule of the learning rate has 1,000 steps and the run 6" in said.out
