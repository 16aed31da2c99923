"""Several hosts, as network namespaces of this machine: which rank is where, and what is shared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.namespaces import Hosts, unavailable

pytestmark = [pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-"), pytest.mark.matrix]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one of these tests run at a time, in all processes of this machine."""
    with open(Path(tempfile.gettempdir(), "meshmpi-tests-of-hosts.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def started(where: str, dealt: str, *program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a module on the hosts ``h1:2,h2:2``."""
    ranks = sum(int(part.partition(":")[2]) for part in where.split(","))
    command = [sys.executable, "-m", "meshmpi.launch", "-n", str(ranks), "--hosts", where, "--threads", "1"]
    command += ["--option=--rank-by", f"--option={dealt}", "-m", *program]
    # One at a time: interfaces that come and go disturb launchers that begin just then.
    with alone(), Hosts(where.count(",") + 1, [folder]) as hosts:
        environment = {**os.environ, **hosts.environment(), "TMPDIR": str(folder)}
        environment |= {"MESHMPI_SHARED_FOLDER": str(folder), "MESHMPI_CACHE": str(folder / "cache")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("where", "mesh", "between"),
    [
        ("h1:2,h2:2", "rows:2;cols:2", "rows"),
        ("h1:2,h2:2", "all:4", "all"),
        ("h1:2,h2:1,h3:1", "rows:2;cols:2", "rows+cols"),
        ("h1:3,h2:2", "all:5", "all"),
    ],
)
@pytest.mark.parametrize("dealt", ["slot", "node"])
def test_a_mesh_on_several_hosts(where: str, mesh: str, between: str, dealt: str, tmp_path: Path):
    """Whether the launcher fills one host after the other, or deals ranks out in turns."""
    ranks = sum(int(part.partition(":")[2]) for part in where.split(","))
    done = started(where, dealt, "tests.runtime.mpi_programs.hosts", mesh, between, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    turns = {"slot": "in order", "node": "in turns"}[dealt]
    assert f"{where.count(',') + 1} hosts, {ranks} ranks dealt out {turns}" in done.stdout


def test_the_doctor_says_which_axes_cross_the_network(tmp_path: Path):
    done = started("h1:2,h2:2", "slot", "meshmpi", "doctor", "--mesh", "rows:2;cols:2", folder=tmp_path)
    assert "mesh {rows: 2, cols: 2}: between hosts: rows; inside a host: cols" in done.stdout, done.stdout + done.stderr
