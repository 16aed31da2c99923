"""Whether processes that are started together become one job, and the job works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshmpi.doctor.facts import Answer, Facts
from meshmpi.doctor.findings import BROKEN, WARNING, Finding
from meshmpi.runtime.world import in_job

CLOCK_SECONDS = 2.0
"""Difference of two hosts' clocks that is worth a line: file times then mislead."""
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_CAUSES = (
    (
        "as root",
        "run-as-root",
        "Open MPI refuses to start programs of root.",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    (
        "not enough slots",
        "no-slots",
        "the launcher counts fewer slots than ranks.",
        "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    ),
    (
        "No space left on device",
        "no-space",
        "a file system that MPI uses is full.",
        "df -h /dev/shm ${TMPDIR:-/tmp}\nexport TMPDIR=$HOME/tmp   # or another with space",
    ),
    (
        "Bus error",
        "no-space",
        "shared memory was promised and is not there.",
        "df -h /dev/shm   # docker run --shm-size=1g, or free it",
    ),
)
"""Text that a failing launcher prints -> name of the finding, what it means, what to do."""


def slurm(facts: Facts) -> Iterator[Finding]:
    """Tasks of Slurm that know nothing of each other."""
    env = facts.environment
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if tasks > 1 and not in_job():
        pmi = "pmix" if facts.kind == "openmpi" else "pmi2"
        yield Finding(
            BROKEN,
            "slurm-no-pmi",
            f"srun started {tasks} tasks without telling them of each other (no PMI).",
            f"They are {tasks} jobs of one rank each, all of which do the same work.",
            f"srun --mpi={pmi} ...      # `srun --mpi=list` shows what this Slurm has, or without"
            f" srun:\npython -m meshmpi.launch -n {tasks} train.py",
        )
    elif tasks == 0 and _number(env, "SLURM_NTASKS") > 1 and not in_job():
        n = _number(env, "SLURM_NTASKS")
        yield Finding(
            WARNING,
            "slurm-alone",
            f"this is a Slurm job of {n} tasks (SLURM_NTASKS={n}), and this process is one alone.",
            "A program started like this one has one rank; srun or a launcher starts the others.",
            f"python -m meshmpi.launch -n {n} train.py   # or: meshmpi train CONFIG --ranks {n}",
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else 0


def one_job(facts: Facts) -> Iterator[Finding]:
    """N processes that are N jobs of one rank."""
    if not facts.ranks:
        return
    if facts.inside_job:
        expected = next((n for name in _SIZES if (n := _number(facts.environment, name))), 0)
    else:
        expected = facts.wanted
    sizes = [int(job[0].get("size", 0)) for job in facts.jobs]
    if expected > 1 and sizes[0] == 1:
        by = "the launcher" if facts.launcher is None else facts.launcher.path
        by = "this job's launcher" if facts.inside_job else by
        yield Finding(
            BROKEN,
            "singletons",
            f"{by} starts {expected} processes, and each of them is rank 0 of 1.",
            "The launcher and the MPI library are of different kinds, or their management"
            " interfaces (PMI) do not match.",
            f"python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'\n"
            f"python -m meshmpi.launch --mpi {facts.kind or 'openmpi'} -n {expected}"
            " train.py",
        )


def ends(facts: Facts) -> Iterator[Finding]:
    """A job that hangs, fails, or says nothing."""
    answer = facts.job_answer
    errors = [f"{r['python']} on {r['host']}: {r['error']}" for r in facts.ranks if "error" in r]
    if answer is None or (answer.status == 0 and not answer.late and facts.ranks and not errors):
        return
    text = "\n".join([*answer.lines, answer.text, *errors])
    known = next((row for row in _CAUSES if row[0] in text), None)
    if known is not None:
        _, name, meaning, paste = known
        yield Finding(
            BROKEN,
            name,
            f"a job of {_size(facts)} did not start: {meaning}",
            "Programs of several ranks end in the same way.",
            paste,
        )
    elif errors:
        yield Finding(
            BROKEN,
            "rank-without-mpi",
            f"of {_size(facts)}, {len(errors)} could not load MPI: {errors[0]}",
            "The others wait for it, or the launcher ends them.",
            "env | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|MPI4PY)'   # on that host",
        )
    elif answer.late:
        yield _hangs(facts, answer)
    else:
        last = " | ".join([line.strip() for line in text.splitlines() if line.strip()][-6:])
        yield Finding(
            BROKEN,
            "job-failed",
            f"a job of {_size(facts)} failed: {answer.end}. {last}",
            "Programs of several ranks end in the same way.",
            f"python -m meshmpi.launch -n {max(facts.wanted, 1)} -m meshmpi.runtime.probe",
        )


def _size(facts: Facts) -> str:
    if facts.inside_job:
        return "these ranks"
    return f"{facts.wanted} rank{'s' * (facts.wanted != 1)}"


def _hangs(facts: Facts, answer: Answer) -> Finding:
    variable = {
        "openmpi": "export OMPI_MCA_pml=ob1 OMPI_MCA_btl=^tcp,ofi   # one host: no network at all",
        "mpich": "export FI_PROVIDER=tcp   # the network that is always there",
        "intel": "export I_MPI_FABRICS=shm   # one host: no network at all",
    }
    return Finding(
        BROKEN,
        "job-hangs",
        f"a job of {_size(facts)} was stopped: in {answer.seconds:.0f} s it did not start MPI and"
        " exchange one message.",
        "Mostly a network that is tried and never answers, or a host name without an address.",
        variable.get(facts.kind, variable["openmpi"]),
    )


def messages(facts: Facts) -> Iterator[Finding]:
    """Messages that arrive with other bytes than were sent."""
    bad = [rank["rank"] for rank in facts.ranks if not rank.get("message_intact", True)]
    if bad:
        yield Finding(
            BROKEN,
            "messages-damaged",
            f"a message of 1 MiB arrived with other bytes on rank {', '.join(map(str, bad))}.",
            "Sums over ranks would be wrong, silently.",
            "export OMPI_MCA_smsc=^cma   # Open MPI: without copies from process to process",
        )


def clocks(facts: Facts) -> Iterator[Finding]:
    """Hosts whose clocks differ, as read just after a barrier."""
    first: dict[str, float] = {}
    for rank in facts.ranks:
        if "clock" in rank:
            first.setdefault(rank["host"], rank["clock"])
    if len(first) < 2:
        return
    early, late = min(first, key=first.__getitem__), max(first, key=first.__getitem__)
    seconds = first[late] - first[early]
    if seconds > CLOCK_SECONDS:
        yield Finding(
            WARNING,
            "clocks-differ",
            f"the clock of {late} is {seconds:.1f} s ahead of that of {early}.",
            "Times of files and in logs of several hosts then contradict each other.",
            "sudo chronyc makestep   # or ask the administrators of the site",
        )
