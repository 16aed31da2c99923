"""Cores, threads, binding, and the library of matrix products."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import Finding, found
from meshmpi.launch.command import THREAD_VARIABLES


def threads(facts: Facts) -> Iterator[Finding]:
    """More threads of all ranks than cores."""
    hosts = [rank["host"] for rank in facts.ranks]
    ranks = max(max(map(hosts.count, hosts), default=facts.wanted), 1)
    for name in THREAD_VARIABLES:
        text = facts.environment.get(name, "").split(",")[0]
        asked = int(text) if text.isdigit() else 0
        if asked * ranks > max(facts.cores.physical, ranks):
            what = (
                f"{name}={asked} and {ranks} rank{'s' * (ranks != 1)} make {asked * ranks} threads"
                f" on {facts.cores.physical} cores."
            )
            yield found("too-many-threads", what, name=name, each=max(1, facts.cores.physical // ranks))
            return


def pinning(facts: Facts) -> Iterator[Finding]:
    """Ranks that share cores while others are idle; a process that was given only a few."""
    of_host: dict[str, list[Mapping[str, Any]]] = {}
    for rank in facts.ranks:
        if "affinity" in rank:
            of_host.setdefault(rank["host"], []).append(rank)
    for host, ranks in of_host.items():
        used = sorted({cpu for rank in ranks for cpu in rank["affinity"]})
        there = int(ranks[0]["cores"] or len(used))
        if len(used) < min(len(ranks), there):
            cores = f"core{'s' * (len(used) != 1)} {', '.join(map(str, used))} of {there}"
            yield found("ranks-on-one-core", f"{len(ranks)} ranks on {host} share {cores}.")
    lent = len(os.sched_getaffinity(0))
    total = os.cpu_count() or lent
    if lent < total and lent < facts.wanted <= total and not facts.ranks:
        what = f"this shell may use {lent} of {total} cores, for {facts.wanted} ranks."
        yield found("few-cores", what, ranks=facts.wanted)


def matrix_products(facts: Facts) -> Iterator[Finding]:
    """A library of matrix products that is missing, or forced to slow routines."""
    blas, env = facts.parts.get("blas", {}), facts.environment
    error = str(blas.get("error", ""))
    if "MESHMPI_BLAS" in error:
        yield found("blas-forced", error.removeprefix("ConfigError: ").split(". ")[0] + ".")
    elif blas.get("library") == "numpy" and not env.get("MESHMPI_BLAS"):
        what = "neither OpenBLAS nor MKL was found behind NumPy; products go through np.matmul."
        yield found("blas-unknown", what)
    core = env.get("OPENBLAS_CORETYPE")
    if core and str(blas.get("library", "")).startswith("openblas"):
        yield found("openblas-coretype", f"OPENBLAS_CORETYPE={core} chooses the routines of matrix products.")
