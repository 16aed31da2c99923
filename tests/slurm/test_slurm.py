"""The batch scripts of slurm/, submitted to a real Slurm that runs for these tests only.

Every run that is stopped, requeued or preempted must end with the losses and the variables of one
that was never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from meshmpi import checkpoint
from meshmpi.launch.launch import launch
from meshmpi.runtime import processes
from meshmpi.training.metrics import read_metrics
from tests.slurm.cluster import Cluster, missing
from tests.soak import signals as soak

ROOT = Path(__file__).parents[2]
VENV = Path(sys.prefix)
SECONDS = 300.0
"""For one job to come to a state; on an idle machine they take seconds."""
CONFIG = """
[data]
corpus = "{text}"
[model]
length = 8
d_model = 16
d_ff = 32
heads = 2
d_kv = 8
layers = 1
residual_dropout = 0.1
[train]
steps = 400
batch = 64
log_every = 5
plot = false
[evaluate]
every = 150
[sample]
tokens = 5
"""
TWO_NODES = ("--mesh", "rows:2;cols:1", "--layout", "batch:rows;heads:cols;d_ff:cols;vocab:cols")


class Site:
    """A cluster, and a folder to submit from."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.environment = {"VENV": str(VENV), "MESHMPI_CACHE": str(folder / "cache")}
        # Other tests make networks and remove them; a connection over one of these would hang.
        self.environment["OMPI_MCA_btl_tcp_if_include"] = "lo"
        shutil.copytree(ROOT / "slurm", folder / "slurm")
        text = folder / "text.txt"
        text.write_text("".join(f"the {k % 7} foxes jump over {k % 5} dogs\n" for k in range(120)))
        (folder / "config.toml").write_text(CONFIG.format(text=text))

    def submit(self, *words: str, **variables: str) -> str:
        """Submits from the folder; returns the number of the job."""
        return self._run("sbatch", "--parsable", *words, **variables).split(";")[0]

    def _run(self, *words: str, **variables: str) -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            timeout=60,
            check=False,
            env={**self.cluster.environment, **self.environment, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def chain(self, *words: str, **variables: str) -> list[str]:
        """Submits a chain; returns the numbers of its jobs."""
        return self._run("slurm/chain.sh", *words, **variables).split()

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        text = self.cluster.command("scontrol", "show", "job", job)
        return re.findall(rf"\b{name}=(\S*)", text)[0]

    def wait(self, job: str, *states: str) -> str:
        """Waits until a job is in one of the states; returns its exit status."""
        limit = time.monotonic() + SECONDS
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < limit, f"job {job} is {state}: {self.all_output()}"
            assert states != ("COMPLETED",) or state != "FAILED", self.all_output()
            time.sleep(0.2)
        return self.field(job, "ExitCode")

    def wait_for_text(self, pattern: str, text: str) -> None:
        """Waits until output files of jobs contain a text."""
        limit = time.monotonic() + SECONDS
        while text not in self.output(pattern):
            assert time.monotonic() < limit, self.all_output()
            time.sleep(0.05)

    def output(self, pattern: str) -> str:
        """What jobs have written so far."""
        return "".join(p.read_text() for p in sorted(self.folder.glob(pattern)))

    def all_output(self) -> str:
        """For the message of a failure."""
        return f"{self.output('*.out')}\n{self.cluster.logs()}"

    def never_stopped(self, name: str, *words: str) -> Path:
        """The folder of a run outside of Slurm, on two ranks."""
        folder = self.folder / f"never-stopped-{name}"
        if not folder.exists():
            done = launch(
                2,
                ["-m", "meshmpi", "train", str(self.folder / "config.toml"), *words, "--out", str(folder)],
                timeout_seconds=SECONDS,
                capture_output=True,
                environment=self.environment,
            )
            assert done.returncode == 0, done.stderr
        return folder


@pytest.fixture(scope="module")
def own_cluster():
    """One for each process of pytest: their daemons cost nothing while there is no job."""
    why = missing()
    if not why and not (VENV / "bin" / "meshmpi").exists():
        why = f"meshmpi is not installed in {VENV}"
    if why:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="msl-")))
        cluster = Cluster(folder / "c")
        stack.callback(cluster.stop)
        cluster.start()
        (folder / "jobs").mkdir()
        yield Site(cluster, folder / "jobs")


@pytest.fixture
def site(own_cluster: Site):
    """The cluster, while no other process of pytest runs jobs: two cores are few."""
    with open(f"{tempfile.gettempdir()}/meshmpi-slurm.lock", "w") as lock:
        # Held during one test only: a process that waits for its next test must not keep it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield own_cluster


def same(found: Path, expected: Path) -> None:
    """Asserts equal losses, evaluations and variables, bit for bit."""
    assert soak.records(found) == soak.records(expected)
    assert soak.variables(found) == soak.variables(expected)


# ---- one node --------------------------------------------------------------------------------


def test_a_warning_saves_requeues_and_goes_on_bit_equal(site: Site):
    job = site.submit("--ntasks-per-node=2", "slurm/train.sbatch", "config.toml")
    out = f"meshmpi-{job}.out"
    site.wait_for_text(out, "\nstep ")
    site.cluster.command("scancel", "--batch", "--signal=USR1", job)
    site.wait_for_text(out, "back into the queue")
    site.wait_for_text(out, "resumed from")
    assert site.wait(job, "COMPLETED") == "0:0"
    assert site.field(job, "Restarts") == "1"
    text = site.output(out)
    assert "on SIGUSR1 on rank" in text and "Traceback" not in text
    same(site.folder / f"runs/config-{job}", site.never_stopped("line"))


def test_preempted_jobs_save_and_come_back(site: Site):
    job = site.submit("--ntasks-per-node=2", "slurm/preemptible.sbatch", "config.toml")
    out = f"meshmpi-spare-{job}.out"
    site.wait_for_text(out, "\nstep ")
    urgent = site.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", "-o", "u")
    site.wait(urgent, "COMPLETED")
    assert site.wait(job, "COMPLETED") == "0:0"
    text = site.output(out)
    assert "stopping after step" in text and "resumed from" in text and "Traceback" not in text
    same(site.folder / f"runs/config-{job}", site.never_stopped("line"))


def test_a_run_stops_before_the_time_limit_of_its_job(site: Site):
    """No signal is involved: the job asks for none, and Slurm's own would come at the limit."""
    job = site.submit(
        "--ntasks-per-node=1",
        "--time=1",
        "--signal=USR2@0",
        "slurm/train.sbatch",
        "config.toml",
        "--set",
        "train.steps=100000000",
        "--set",
        "evaluate.every=0",
        MESHMPI_REQUEUE="0",
    )
    assert site.wait(job, "FAILED", "TIMEOUT", "COMPLETED") == "75:0", site.all_output()
    text = site.output(f"meshmpi-{job}.out")
    assert f"on the time limit of Slurm job {job}, which leaves" in text
    assert checkpoint.find(site.folder / f"runs/config-{job}" / "checkpoints")


def test_an_array_of_runs(site: Site):
    (site.folder / "sweep.txt").write_text("--set train.seed=1\n--set train.seed=2\n")
    job = site.submit("--array=1-2", "--ntasks-per-node=1", "slurm/array.sbatch", "sweep.txt", "config.toml")
    for task in (1, 2):
        site.wait(f"{job}_{task}", "COMPLETED")
    first, second = (read_metrics(site.folder / f"runs/sweep-{job}/{k}") for k in (1, 2))
    assert first[-1]["step"] == second[-1]["step"] == 400
    assert first[0]["loss"] != second[0]["loss"]


def test_a_chain_goes_on_where_the_job_before_stopped(site: Site):
    options = ("--ntasks-per-node=2", "slurm/train.sbatch", "config.toml")
    first, second, third = site.chain("3", "runs/chain", *options)
    site.wait_for_text(f"meshmpi-{first}.out", "\nstep ")
    site.cluster.command("scancel", "--batch", "--signal=USR1", first)
    assert site.wait(first, "FAILED") == "75:0", site.all_output()
    site.wait(second, "COMPLETED")
    assert "resumed from" in site.output(f"meshmpi-{second}.out")
    site.wait(third, "CANCELLED")
    same(site.folder / "runs/chain", site.never_stopped("line"))


def test_the_benchmark(site: Site):
    job = site.submit(
        "--ntasks-per-node=2", "slurm/benchmark.sbatch", "config.toml", "20", MESHMPI_CALIBRATE="--quick --repeats 1"
    )
    site.wait(job, "COMPLETED")
    text = site.output(f"meshmpi-bench-{job}.out")
    assert re.search(r"measured per rank and step: [\d.]+ ms \(predicted [\d.]+", text), text


# ---- several nodes ---------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["mpirun", "pmix"])
def test_two_nodes_stop_and_go_on(site: Site, interface: str):
    if interface == "pmix":
        _needs(site, "pmix")
    job = site.submit("--ntasks-per-node=1", "slurm/train_multinode.sbatch", "config.toml", MESHMPI_LAUNCH=interface)
    out = f"meshmpi-nodes-{job}.out"
    site.wait_for_text(out, "\nstep ")
    site.cluster.command("scancel", "--batch", "--signal=USR1", job)
    assert site.wait(job, "COMPLETED") == "0:0"
    assert site.field(job, "NumNodes") == "2" and site.field(job, "Restarts") == "1"
    text = site.output(out)
    assert "stopping after step" in text and "resumed from" in text and "Traceback" not in text
    same(site.folder / f"runs/config-{job}", site.never_stopped("nodes", *TWO_NODES))


@pytest.mark.parametrize("interface", ["mpirun", "pmix"])
def test_a_lost_node_is_not_a_job_that_has_finished(site: Site, interface: str):
    """All processes of the second node go at once; mpirun may end with status 0 then."""
    if interface == "pmix":
        _needs(site, "pmix")
    job = site.submit(
        "--ntasks-per-node=1",
        "slurm/train_multinode.sbatch",
        "config.toml",
        "--set",
        "checkpoint.every=20",
        MESHMPI_LAUNCH=interface,
    )
    out = f"meshmpi-nodes-{job}.out"
    site.wait_for_text(out, "wrote ")
    here = processes.marked("SLURMD_NODENAME=n2")
    lost = [pid for pid in processes.marked(f"SLURM_JOB_ID={job}") if pid in here]
    assert lost
    for pid in lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    site.wait_for_text(out, "back into the queue")
    site.wait_for_text(out, "resumed from")
    assert site.wait(job, "COMPLETED") == "0:0"
    assert site.field(job, "Restarts") == "1"
    same(site.folder / f"runs/config-{job}", site.never_stopped("nodes", *TWO_NODES))


def test_a_job_that_loses_ranks_again_and_again_fails(site: Site):
    job = site.submit("--ntasks-per-node=1", "slurm/train.sbatch", "config.toml", MESHMPI_MOST_RESTARTS="0")
    out = f"meshmpi-{job}.out"
    site.wait_for_text(out, "\nstep ")
    for pid in processes.marked(f"SLURM_JOB_ID={job}"):
        if b"start.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    assert site.wait(job, "FAILED").startswith("137:"), site.all_output()
    assert "given up" in site.output(out)


def test_pmi2_with_mpich(site: Site):
    _needs(site, "pmi2")
    library = Path("/usr/lib", f"{os.uname().machine}-linux-gnu", "libmpich.so.12")
    if not library.exists():
        pytest.skip(f"there is no {library}: apt-get install libmpich12")
    (site.folder / "lib").mkdir()
    (site.folder / "lib" / "libmpi.so.12").symlink_to(library)  # its name in the common ABI
    job = site.submit(
        "--ntasks-per-node=1",
        "slurm/train_multinode.sbatch",
        "config.toml",
        MESHMPI_LAUNCH="pmi2",
        MPI4PY_MPIABI="mpich",
        LD_LIBRARY_PATH=str(site.folder / "lib"),
    )
    out = f"meshmpi-nodes-{job}.out"
    site.wait_for_text(out, "\nstep ")
    site.cluster.command("scancel", "--signal=TERM", job)  # to the ranks themselves
    assert site.wait(job, "COMPLETED") == "0:0"
    text = site.output(out)
    assert "stopping after step" in text and "resumed from" in text and "Traceback" not in text


def _needs(site: Site, interface: str) -> None:
    plugins = site.cluster.command("srun", "--mpi=list", timeout=20)
    if interface not in plugins.split():
        pytest.skip(f"this Slurm has no --mpi={interface}")
    done = subprocess.run(
        ["srun", f"--mpi={interface}", "true"],
        env=site.cluster.environment,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"srun --mpi={interface} does not work here: {done.stderr.splitlines()[0]}")
