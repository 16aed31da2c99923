"""The doctor as tasks of a real Slurm: what it says when srun and the MPI library do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmpi.launch.launchers import find_launcher
from tests.doctor.test_environments import ROOT, environment
from tests.slurm.cluster import Cluster, missing

SECONDS = 180


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    if find_launcher().kind != "openmpi":
        pytest.skip("what is expected here is written for Open MPI")
    with tempfile.TemporaryDirectory(prefix="msl-") as folder:
        started = Cluster(Path(folder) / "c", nodes=1)
        try:
            started.start()
            yield started
        finally:
            started.stop()


@pytest.mark.parametrize(
    ("mpi", "finding", "ranks"), [("none", "slurm-no-pmi", 0), ("pmi2", "singletons", 1), ("pmix", "", 2)]
)
def test_tasks_of_srun(cluster: Cluster, tmp_path: Path, mpi: str, finding: str, ranks: int):
    done = subprocess.run(
        ["srun", f"--mpi={mpi}", "-n", "2", sys.executable, "-m", "meshmpi", "doctor", "--json"],
        env={**environment(tmp_path), "SLURM_CONF": str(cluster.folder / "slurm.conf")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    report = json.loads(done.stdout)  # one object: one task spoke
    named = [f["name"] for f in report["findings"] if f["level"] == "broken"]
    assert named == ([finding] if finding else []), report["findings"]
    assert [rank["size"] for rank in report["ranks"]] == [ranks] * ranks
    assert (done.returncode != 0) == bool(finding)
