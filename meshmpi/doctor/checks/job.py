"""Checks that processes started together form one job, and that the job works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import Finding, found
from meshmpi.job import in_job, told_size

CLOCK_SECONDS = 2.0
"""Difference of two hosts' clocks that is worth a line: file times then mislead."""
_ALLOCATIONS = (
    ("FLUX_URI", "Flux", "flux", "flux run -n N"),
    ("LSB_JOBID", "LSF with jsrun", "jsrun", "jsrun -n N -a 1 -c 1"),
    ("PBS_JOBID", "ALPS", "aprun", "aprun -n N"),
    ("PBS_JOBID", "PBS with PALS", "palstat", "mpiexec -n N"),
)
"""Variable of an allocation -> whose it is, a program that it has, and how ranks are started in it."""
_CAUSES = {
    "as root": ("run-as-root/job", "Open MPI refuses to start programs of root."),
    "not enough slots": ("no-slots", "the launcher counts fewer slots than ranks."),
    "No space left on device": ("no-space", "a file system that MPI uses is full."),
    "Bus error": ("no-space/shared", "shared memory was promised and is not there."),
}
"""Text that a failing launcher prints -> name of the finding, and what it means."""
_CURES_OF_HANGS = {
    "openmpi": "export OMPI_MCA_pml=ob1 OMPI_MCA_btl=^tcp,ofi   # one host: no network at all",
    "mpich": "export FI_PROVIDER=tcp   # the network that is always there",
    "intel": "export I_MPI_FABRICS=shm   # one host: no network at all",
}


def slurm(facts: Facts) -> Iterator[Finding]:
    """Tasks of Slurm that know nothing of each other."""
    tasks, n = (_number(facts.environment, name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if in_job():
        return
    if tasks > 1:
        pmi = "pmix" if facts.kind == "openmpi" else "pmi2"
        what = f"srun started {tasks} tasks without telling them of each other (no PMI)."
        yield found("slurm-no-pmi", what, pmi=pmi, tasks=tasks)
    elif tasks == 0 and n > 1:
        what = f"this is a Slurm job of {n} tasks (SLURM_NTASKS={n}), and this process is one alone."
        yield found("slurm-alone", what, tasks=n)


def allocation(facts: Facts) -> Iterator[Finding]:
    """An allocation whose own launcher starts ranks, and in which this process is alone."""
    if facts.inside_job or facts.ranks:
        return
    path = facts.environment.get("PATH")
    for variable, name, program, command in _ALLOCATIONS:
        if variable in facts.environment and shutil.which(program, path=path):
            what = f"this is an allocation of {name} ({variable}), and this process is one alone."
            yield found("allocation-alone", what, command=command)
            return


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else 0


def one_job(facts: Facts) -> Iterator[Finding]:
    """N processes that are N jobs of one rank."""
    if not facts.ranks:
        return
    expected = facts.wanted
    if facts.inside_job:
        expected = told_size(facts.environment) or _number(facts.environment, "SLURM_STEP_NUM_TASKS")
    if expected > 1 and int(facts.jobs[0][0].get("size", 0)) == 1:
        by = "the launcher" if facts.launcher is None else facts.launcher.path
        by = "this job's launcher" if facts.inside_job else by
        what = f"{by} starts {expected} processes, and each of them is rank 0 of 1."
        yield found("singletons", what, kind=facts.kind or "openmpi", ranks=expected)


def ends(facts: Facts) -> Iterator[Finding]:
    """A job that hangs, fails, or says nothing."""
    answer = facts.job_answer
    errors = [f"{r['python']} on {r['host']}: {r['error']}" for r in facts.ranks if "error" in r]
    if answer is None or (answer.status == 0 and not answer.late and facts.ranks and not errors):
        return
    text = "\n".join([*answer.lines, answer.text, *errors])
    size = "these ranks" if facts.inside_job else f"{facts.wanted} rank{'s' * (facts.wanted != 1)}"
    known = next((row for mark, row in _CAUSES.items() if mark in text), None)
    if known is not None:
        yield found(known[0], f"a job of {size} did not start: {known[1]}")
    elif errors:
        yield found("rank-without-mpi", f"of {size}, {len(errors)} could not load MPI: {errors[0]}")
    elif answer.late:
        what = f"a job of {size} was stopped: in {answer.seconds:.0f} s it did not start MPI and exchange one message."
        yield found("job-hangs", what, cure=_CURES_OF_HANGS[facts.kind or "openmpi"])
    else:
        last = " | ".join([line.strip() for line in text.splitlines() if line.strip()][-6:])
        yield found("job-failed", f"a job of {size} failed: {answer.end}. {last}", ranks=max(facts.wanted, 1))


def messages(facts: Facts) -> Iterator[Finding]:
    """Messages that arrive with other bytes than were sent."""
    bad = [rank["rank"] for rank in facts.ranks if not rank.get("message_intact", True)]
    if bad:
        ranks = ", ".join(map(str, bad))
        yield found("messages-damaged", f"a message of 1 MiB arrived with other bytes on rank {ranks}.")


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
        yield found("clocks-differ", f"the clock of {late} is {seconds:.1f} s ahead of that of {early}.")
