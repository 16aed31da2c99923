"""Cores, threads, binding, the library of matrix products, and the compiler of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshmpi.doctor.facts import Facts, is_network, mount_of
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


def compiler(facts: Facts) -> Iterator[Finding]:
    """No compiler, one that does not work, or one without OpenMP."""
    part = facts.parts.get("compiler", {})
    error = str(part.get("error", ""))
    named = next((n for n in ("MESHMPI_CC", "CC") if facts.environment.get(n)), "")
    unset = f"unset {named}                  # {named}={facts.environment[named]}\n" if named else ""
    if "no C compiler was found" in error:
        yield found("compiler-missing", error.split(". ")[0] + ".", unset=unset)
    elif "cannot build a small file" in error or "did not run" in error:
        yield found("compiler-broken", error.split(". ")[0] + ".", unset=unset)
    elif error and "No module named" not in error:
        yield found("compiler-broken", f"{error}.", unset=unset)
    elif part.get("openmp") is False:
        yield found("compiler-no-openmp", f"{part['command']} does not know -fopenmp.")


def cache(facts: Facts) -> Iterator[Finding]:
    """A kernel cache that is passed over, cannot be written, or lies on a network."""
    part = facts.parts.get("compiler", {})
    used = str(part.get("folder", ""))
    if "build_error" in part:
        yield found("kernel-cache-unusable", f"a library could not be built in {used}: {part['build_error']}")
    if not used:
        return
    if part.get("refused"):
        yield found("kernel-cache-refused", f"compiled kernels are kept in {used}, as {part['refused']}.")
        return
    mount = mount_of(Path(used))
    if is_network(mount.kind):
        where = f"{mount.kind} at {mount.at}"
        yield found("kernel-cache-on-network", f"the kernel cache {used} is on a network file system ({where}).")
