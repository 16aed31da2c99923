"""Cores, threads, binding, and the library of matrix products."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import BROKEN, WARNING, Finding
from meshmpi.launch.command import THREAD_VARIABLES


def threads(facts: Facts) -> Iterator[Finding]:
    """More threads of all ranks than cores."""
    ranks = max(_on_one_host(facts), 1)
    for name in THREAD_VARIABLES:
        text = facts.environment.get(name, "").split(",")[0]
        asked = int(text) if text.isdigit() else 0
        if asked * ranks > max(facts.cores.physical, ranks):
            each = max(1, facts.cores.physical // ranks)
            yield Finding(
                WARNING,
                "too-many-threads",
                f"{name}={asked} and {ranks} rank{'s' * (ranks != 1)} make {asked * ranks} threads"
                f" on {facts.cores.physical} cores.",
                "Ranks take cores from each other in the middle of collectives: many times slower.",
                f"export {name}={each}   # or unset it: the launcher divides cores by ranks",
            )
            return


def _on_one_host(facts: Facts) -> int:
    hosts = [rank["host"] for rank in facts.ranks]
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return max(counts, default=facts.wanted)


def pinning(facts: Facts) -> Iterator[Finding]:
    """Ranks that share cores while others are idle; a process that was given only a few."""
    of_host: dict[str, list[Mapping[str, Any]]] = {}
    for rank in facts.ranks:
        if "affinity" in rank:
            of_host.setdefault(rank["host"], []).append(rank)
    for host, ranks in of_host.items():
        used = {cpu for rank in ranks for cpu in rank["affinity"]}
        there = int(ranks[0]["cores"] or len(used))
        if len(used) < min(len(ranks), there):
            yield _crowded(host, ranks, sorted(used), there)
    lent = len(os.sched_getaffinity(0))
    total = os.cpu_count() or lent
    if lent < total and lent < facts.wanted <= total and not facts.ranks:
        yield _confined(lent, total, facts.wanted)


def _crowded(host: str, ranks: Sequence[Mapping[str, Any]], used: Sequence[int], there: int) -> Finding:
    return Finding(
        WARNING,
        "ranks-on-one-core",
        f"{len(ranks)} ranks on {host} share core{'s' * (len(used) != 1)} {', '.join(map(str, used))} of {there}.",
        "They take turns, and each waits for the others in every collective.",
        "taskset -cp $$        # the cores of this shell; start from one that has more, or\n"
        "export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none"
        " I_MPI_PIN=0   # where the launcher binds",
    )


def _confined(lent: int, total: int, ranks: int) -> Finding:
    return Finding(
        WARNING,
        "few-cores",
        f"this shell may use {lent} of {total} cores, for {ranks} ranks.",
        "A batch system lends what was asked for; `taskset` and containers confine as well.",
        f"# ask for more, as: #SBATCH --ntasks={ranks} --cpus-per-task=1",
    )


def matrix_products(facts: Facts) -> Iterator[Finding]:
    """A library of matrix products that is missing, or forced to slow routines."""
    blas, env = facts.parts.get("blas", {}), facts.environment
    error = str(blas.get("error", ""))
    if "MESHMPI_BLAS" in error:
        yield Finding(
            BROKEN,
            "blas-forced",
            error.removeprefix("ConfigError: ").split(". ")[0] + ".",
            "No step can be compiled.",
            "unset MESHMPI_BLAS   # or: pip install 'meshmpi[mkl]'",
        )
    elif blas.get("library") == "numpy" and not env.get("MESHMPI_BLAS"):
        yield Finding(
            WARNING,
            "blas-unknown",
            "neither OpenBLAS nor MKL was found behind NumPy; products go through np.matmul.",
            "Small products then cost several times more, and bfloat16 is converted.",
            "python -m pip install --force-reinstall numpy   # its wheel brings OpenBLAS",
        )
    core = env.get("OPENBLAS_CORETYPE")
    if core and str(blas.get("library", "")).startswith("openblas"):
        yield Finding(
            WARNING,
            "openblas-coretype",
            f"OPENBLAS_CORETYPE={core} chooses the routines of matrix products.",
            "OpenBLAS would by itself take the fastest for this processor.",
            "unset OPENBLAS_CORETYPE",
        )
