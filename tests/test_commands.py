"""Every command of `meshmpi` runs once, in the order in which a user meets them, on one small run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi import cli

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
    "run": "run -n 2 --show script.py --steps 3",
}
ELSEWHERE = {"export"}
"""Needs a checkpoint to write like: tests/pretrained/test_commands.py."""
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
    assert {*of_parser(cli._parser())} == {*COMMANDS} - {"train again"} | ELSEWHERE


def test_run_starts_a_program_with_its_own_options(tmp_path: Path):
    (tmp_path / "ranks.py").write_text("import sys; from mpi4py import MPI; print(MPI.COMM_WORLD.size, *sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "meshmpi", "run", "-n", "2", str(tmp_path / "ranks.py"), "-n", "5", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0 and done.stdout == 2 * "2 -n 5 --help\n", done.stdout + done.stderr


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
    for name, line in COMMANDS.items():
        status = cli.main(line.split(" "))
        said = capfd.readouterr()
        assert status == 0 and said.out, f"{name}: {said.out}{said.err}"
        if name == "train again":
            assert "resumed from run/checkpoints/step-00000004" in said.out and "train run --set" in said.out
            assert "schedule of the learning rate has 1,000 steps and the run 6" in said.out
