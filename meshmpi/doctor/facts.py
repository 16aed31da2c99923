"""What the doctor's checks read: answers of other processes, of the kernel and the environment."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.dims import MeshShape
from meshmpi.errors import MeshmpiError
from meshmpi.job import in_job, started_by
from meshmpi.launch.launch import launch
from meshmpi.launch.launchers import Launcher, find_launcher, launcher_at
from meshmpi.runtime.cores import Cores, available_cores
from meshmpi.runtime.probe import MARK
from meshmpi.runtime.processes import stop_session
from meshmpi.version import VERSION

ANSWER_SECONDS = 60.0
"""For what must be imported or compiled.  Assumption: a cold network file system takes less."""
_INSIDE = ["-m", "meshmpi.doctor.inside"]
_PROBE = ["-m", "meshmpi.runtime.probe"]


@dataclass(frozen=True)
class Answer:
    """What another process said."""

    lines: Sequence[str]  # its standard output
    text: str = ""  # the end of its error output
    status: int = 0  # exit status; negative: the number of the signal that ended it
    seconds: float = 0.0  # it took
    late: bool = False  # whether it was stopped after the time limit

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.late:
            return f"it did not end within {self.seconds:.0f} s"
        if self.status < 0:
            return f"it was ended by {signal.Signals(-self.status).name}"
        return f"it ended with status {self.status}"


@dataclass(frozen=True)
class Facts:
    """What is known of this machine; what could not be found out is empty."""

    environment: Mapping[str, str]  # variables of the reporting process
    wanted: int  # ranks that were asked for
    folder: Path  # where checkpoints are going to be
    cores: Cores  # which this process may use
    parts: Mapping[str, Mapping[str, Any]]  # answers of `meshmpi.doctor.inside`, by part
    died_in: str  # the part in which that process ended, or empty
    inside: Answer  # that process
    library: Mapping[str, Any]  # what `meshmpi.runtime.probe --alone` said, with "error" where MPI does not load
    library_answer: Answer  # that process
    launcher: Launcher | None  # the mpirun that meshmpi uses
    launcher_error: str  # why there is none
    on_path: Launcher | None  # the mpirun that a shell would take
    jobs: Sequence[Sequence[Mapping[str, Any]]] = ()  # the lists printed by the ranks; one list where they are one job
    job_answer: Answer | None = None  # the processes of the job; None where none was started
    inside_job: bool = False  # whether the doctor itself is a rank
    mesh: MeshShape | None = None  # of the program that is going to run

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """What each process that was started said."""
        return [rank for job in self.jobs for rank in job]

    @property
    def kind(self) -> str:
        """Kind of the MPI library: a key of `meshmpi.launch.launchers.LAUNCHERS`, or empty."""
        return kind_of(str(self.library.get("library", "")))


def kind_of(library: str) -> str:
    """The kind of an MPI library, by its version text; empty for others."""
    marks = {"Open MPI": "openmpi", "Intel": "intel", "MPICH": "mpich"}
    return next((kind for mark, kind in marks.items() if mark in library), "")


def gather(ranks: int | None, mpi: str | None, folder: Path, seconds: float, mesh: MeshShape | None = None) -> Facts:
    """Asks everything."""
    here = in_job()
    # First, since the other ranks have begun theirs, see `take_part`.
    job = take_part(seconds) if here else None
    inside = ask([sys.executable, *_INSIDE], ANSWER_SECONDS)
    parts, died_in = _parts(inside)
    # Whoever initialised MPI in a rank's place would take that rank's seat; loading it is harmless.
    alone = ask([sys.executable, *_PROBE, "--alone"], ANSWER_SECONDS)
    said = jobs_in(alone)
    library = said[0][0] if said else {"error": alone.text.strip() or alone.end}
    launcher, error = None, ""
    try:
        launcher = find_launcher(mpi)
    except MeshmpiError as e:
        error = str(e)
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    wanted = ranks if ranks is not None else mesh.size if mesh is not None else 2
    possible = "error" not in library and (launcher is not None or wanted == 1)
    if not here and not in_bare_step() and wanted > 0 and possible:
        job = _started(wanted, mpi, seconds)
    jobs = jobs_in(job) if job is not None else []
    if here and jobs:
        wanted = sum(map(len, jobs))
    on_path = launcher_at(found) if found else None
    asked = (dict(os.environ), wanted, folder, available_cores())
    return Facts(*asked, parts, died_in, inside, library, alone, launcher, error, on_path, jobs, job, here, mesh)


def take_part(seconds: float) -> Answer:
    """What every rank does where the doctor itself was started as a job."""
    started = sys.modules.get("meshmpi.guard.abort")  # not imported here: it needs NumPy
    if started is not None:
        started.give_place()  # its child has been the rank, and MPI cannot be started in one twice
    return ask([sys.executable, *_PROBE], seconds)


def in_bare_step() -> bool:
    """Whether srun started several of this process without telling them of each other."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return tasks.isdigit() and int(tasks) > 1 and not in_job()


def _started(ranks: int, mpi: str | None, seconds: float) -> Answer:
    began = time.perf_counter()
    try:
        done = launch(ranks, _PROBE, mpi=mpi, timeout_seconds=seconds, capture_output=True)
    except (MeshmpiError, OSError) as e:
        return Answer((), str(e), 1, time.perf_counter() - began)
    took = time.perf_counter() - began
    late = took >= seconds and done.returncode != 0
    return Answer(done.stdout.splitlines(), done.stderr[-4000:], done.returncode, took, late)


def ask(command: Sequence[str], seconds: float) -> Answer:
    """Runs a command to its end, or to the time limit, with all processes it starts."""
    began = time.perf_counter()
    # A rank's launcher may have left it an open file by which its child can answer.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        close_fds=False,
        start_new_session=True,
    ) as process:
        late = False
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            stop_session(process)
            out, err = process.communicate()
    took = time.perf_counter() - began
    return Answer(out.splitlines(), err[-4000:], process.returncode, took, late)


def _parts(answer: Answer) -> tuple[dict[str, dict[str, Any]], str]:
    """The parts that were answered, and the one that was begun but not answered."""
    parts: dict[str, dict[str, Any]] = {}
    begun = ""
    for said in (json.loads(line) for line in answer.lines if line.startswith("{")):  # others are a library's
        if "begins" in said:
            begun = said["begins"]
        else:
            parts[said.pop("part")] = said
    return parts, "" if begun in parts else begun


def jobs_in(answer: Answer) -> list[list[dict[str, Any]]]:
    """The lists that probes printed, wherever a launcher put them in its lines."""
    _, *parts = "\n".join(answer.lines).split(MARK)
    jobs = [json.JSONDecoder().raw_decode(part)[0] for part in parts]
    return [job for job in jobs if job]


def heading(facts: Facts) -> str:
    """What is there, right or wrong, as text."""
    library = facts.library
    lines = [
        f"meshmpi {VERSION} in {Path(__file__).parents[1]}, Python {platform.python_version()} ({sys.executable})",
        f"host {socket.gethostname()}: {platform.platform()}",
        f"cores: {facts.cores.physical} physical, {facts.cores.logical} logical",
        "packages: " + ", ".join(f"{n} {part['version']}" for n, part in facts.parts.items() if "file" in part),
    ]
    if "library" in library:
        first = str(library["library"]).splitlines()[0].split(",")[0]
        lines.append(f"MPI library: {first.strip()}, {library['library_file']} ({found_by(facts)})")
    if facts.launcher is not None:
        lines.append(f"MPI launcher: {facts.launcher.path} ({facts.launcher.kind} {facts.launcher.major})")
    if facts.inside_job:
        lines.append(f"started by: {started_by(facts.environment)}")
    for job in facts.jobs:
        hosts = list(dict.fromkeys(rank["host"] for rank in job))
        size = job[0].get("size", "?")
        seconds = max((rank.get("init_seconds", 0.0) for rank in job), default=0.0)
        lines.append(f"job: {size} rank{'s' * (size != 1)} on {', '.join(hosts)}, MPI_Init {seconds:.2f} s")
        if facts.mesh is not None:
            lines.append(_mesh_line(facts.mesh, [hosts.index(rank["host"]) for rank in job]))
    blas, compiler = facts.parts.get("blas", {}), facts.parts.get("compiler", {})
    if "library" in blas:
        lines.append(
            f"matrix products: {blas['library']} {blas['version']}, {blas['threads']} threads;"
            f" bfloat16: {blas['bfloat16'] or 'converted to float32'}"
            f" ({blas['measured']})"
        )
    if "command" in compiler:
        lines.append(f"C compiler: {compiler['command']}, kernels kept in {compiler['folder']}")
    return "\n".join(lines)


def _mesh_line(mesh: MeshShape, host_of: Sequence[int]) -> str:
    """Which axes cross the network, where the ranks of a job are on these hosts."""
    if mesh.size != len(host_of):
        return f"mesh {mesh}: it needs {mesh.size} ranks, this job has {len(host_of)}"
    between = mesh.axes_between(sorted(host_of))  # as `Mesh` numbers its ranks: host by host
    inside = [n for n, size in mesh.axes if n not in between and size > 1]
    crossing, staying = (", ".join(axes) or "no axis" for axes in (between, inside))
    return f"mesh {mesh}: between hosts: {crossing}; inside a host: {staying}"


def found_by(facts: Facts) -> str:
    """How mpi4py came to the MPI library it loaded."""
    file = str(facts.library.get("library_file", ""))
    if facts.environment.get("MPI4PY_LIBMPI"):
        return "named by MPI4PY_LIBMPI"
    if file.startswith(sys.prefix + os.sep):
        return "found in this Python environment"
    folders = facts.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any(folder and os.path.realpath(folder) == os.path.dirname(file) for folder in folders):
        return "found through LD_LIBRARY_PATH"
    return "found by the system's loader"


_NETWORK = "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 afs 9p panfs fuse.sshfs fuse.glusterfs fuse.ceph"
_TABLE = Path("/proc/self/mounts")


class Mount(NamedTuple):
    """A mounted file system: where, and of which kind."""

    at: str
    kind: str


def mount_of(folder: Path, table: str | None = None) -> Mount:
    """The file system of a folder, which need not exist yet."""
    path = os.path.realpath(folder)
    text = _TABLE.read_text() if table is None else table
    best = Mount("/", "")
    for line in text.splitlines():
        at, kind = line.split()[1:3]
        at = at.encode().decode("unicode_escape")  # a blank is written as \040
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best.at):
            best = Mount(at, kind)
    return best


def is_network(kind: str) -> bool:
    """Whether files of such a system lie on other machines."""
    return kind in _NETWORK.split()
