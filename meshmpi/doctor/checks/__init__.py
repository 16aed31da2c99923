"""From facts to findings, one file per subject; a check is a function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshmpi.doctor.checks import job, library, packages, processors, storage
from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import Finding, found

Check = Callable[[Facts], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    packages.required,
    packages.versions_of_ranks,
    library.mpi4py,
    library.loading,
    library.launchers,
    library.root,
    library.host_name,
    job.slurm,
    job.allocation,
    job.one_job,
    job.ends,
    job.messages,
    job.clocks,
    processors.threads,
    processors.pinning,
    processors.matrix_products,
    processors.compiler,
    processors.cache,
    storage.checkpoints,
    storage.shared_memory,
    storage.temporary,
    storage.copying,
    storage.memory,
)


def examine(facts: Facts) -> list[Finding]:
    """All findings, in the order of the checks.

    A check that fails itself is reported like anything else: the doctor has to survive the patient.
    """
    out: list[Finding] = []
    for check in CHECKS:
        try:
            out += check(facts)
        except Exception as error:
            name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
            out.append(found("check-failed", f"the check {name} ended with {type(error).__name__}: {error}."))
    return out
