"""The doctor on broken machines, each with the healthy twin: there nothing is found."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshmpi.doctor.findings import found
from meshmpi.launch.launch import launch
from tests.doctor.environments import BROKEN, ROOT, Broken

_OF_JOBS = "OMPI_ PMI PRTE_ SLURM_ I_MPI PBS_ PALS_ LSB_ JSM_ FLUX_ ALPS_ OMP_ OPENBLAS_ MKL_"
_OF_JOBS += " MPI4PY_ MESHMPI_ CC TMPDIR LD_LIBRARY_PATH"
_DOCTOR = [sys.executable, "-m", "meshmpi", "doctor", "--json"]
_SECONDS = 120


def _can_mount() -> bool:
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and done.returncode == 0


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Without settings of this machine or an outer job; root is allowed, the cache is new."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(tuple(_OF_JOBS.split()))}
    folder.mkdir(exist_ok=True)
    return {
        **kept,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(ROOT),
        "MESHMPI_CACHE": str(folder / "cache"),
        **more,
    }


def ran(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": _SECONDS, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, env=env, cwd=cwd, check=False, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def diagnosed(command: list[str], env: dict[str, str], cwd: Path) -> tuple[dict, int]:
    done = ran(command, env, cwd)
    return json.loads(done.stdout), done.returncode


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    return *diagnosed([*_DOCTOR, "--ranks", "2"], environment(folder), folder), folder / "cache"


def test_nothing_is_broken_here(healthy):
    report, status, _ = healthy
    assert [f for f in report["findings"] if f["level"] == "broken"] == []
    assert status == 0 and report["verdict"] in ("ok", "warning")
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["parts"]["compiler"]["answer"] == 42


def _command(row: Broken, folder: Path) -> list[str]:
    command = [*row.wrapper, *_DOCTOR, *row.options]
    text = shlex.join([part.replace("{tmp}", str(folder)) for part in command])
    if row.shell:
        (folder / "full").mkdir()
        first = row.shell.replace("{tmp}", str(folder))
        return ["unshare", "--mount", "sh", "-c", f"{first}; exec {text}"]
    return shlex.split(text)


@pytest.mark.quick(4)
@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row.id)
def test_broken(row: Broken, tmp_path: Path, healthy):
    if not row.when:
        pytest.skip("this machine cannot be broken so")
    if row.shell and not _can_mount():
        pytest.skip("needs root, to mount a file system")
    shutil.copytree(healthy[2], tmp_path / "cache")  # what was measured and compiled here once
    row.before(tmp_path)

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(tmp_path)).replace("{root}", str(ROOT))

    env = environment(tmp_path, **{n: filled(v) for n, v in row.environment.items()})
    report, status = diagnosed(_command(row, tmp_path), env, tmp_path)
    findings = {f["name"]: f for f in reversed(report["findings"])}  # the first of each name
    names = {name.partition("/")[0] for name in row.names}
    assert names <= set(findings), report["findings"]
    listed = found(row.names[0], "")
    first = findings[listed.name]
    assert first["level"] == listed.level
    assert filled(row.says) in first["what"], first
    assert row.paste in first["paste"], first
    assert first["why"].endswith(".") and "check-failed" not in findings
    assert status == int(any(f["level"] == "broken" for f in report["findings"]))
    twin = [f["name"] for f in healthy[0]["findings"]]
    assert not names & set(twin), "the healthy machine has it too"


def test_an_empty_environment(tmp_path: Path, healthy):
    """Python alone: no package at all, no MPI, no launcher, no compiler."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    env = environment(tmp_path, PATH="/none")
    python = str(tmp_path / "venv" / "bin" / "python")
    report, status = diagnosed([python, *_DOCTOR[1:]], env, tmp_path)
    found = {f["name"]: f for f in report["findings"]}
    assert status == 1
    assert "mpi4py-missing" in found and "launcher-missing" in found
    missing = [f["what"] for f in report["findings"] if f["name"] == "package-missing"]
    assert "numpy is not installed." in missing and len(missing) == 7
    assert not {"mpi4py-missing", "package-missing", "launcher-missing"} & {f["name"] for f in healthy[0]["findings"]}


def test_under_mpirun_rank_0_speaks_for_all(tmp_path: Path):
    options = {"timeout_seconds": _SECONDS, "capture_output": True, "cwd": tmp_path}
    done = launch(2, _DOCTOR[1:], environment=environment(tmp_path), **options)
    report = json.loads(done.stdout)  # one object: one rank printed
    assert done.returncode == 0, report["findings"]
    assert sorted(rank["rank"] for rank in report["ranks"]) == [0, 1]
    assert not {"singletons", "versions-differ"} & {f["name"] for f in report["findings"]}


def test_the_text_has_everything(tmp_path: Path):
    done = ran([*_DOCTOR[:-1], "--ranks", "0"], environment(tmp_path, CC="false"), tmp_path)
    of_heading = ("Python ", "cores: ", "numpy ", "MPI library: ", "MPI launcher: ", "matrix products: ")
    for text in (*of_heading, "WARNING compiler-broken", "    unset CC"):
        assert text in done.stdout, done.stdout
    assert done.returncode == 0 and done.stdout.rstrip().endswith("warning.")
    assert not list((tmp_path / "cache").rglob("*doctor*"))
