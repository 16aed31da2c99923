"""The C compiler of generated kernels and the folder that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import WARNING, Finding
from meshmpi.doctor.mounts import is_network, mount_of

_SLOW = "NumPy computes instead: the same results, several times slower."


def compiler(facts: Facts) -> Iterator[Finding]:
    """No compiler, one that does not work, or one without OpenMP."""
    part = facts.parts.get("compiler", {})
    error = str(part.get("error", ""))
    named = next((n for n in ("MESHMPI_CC", "CC") if facts.environment.get(n)), "")
    unset = f"unset {named}                  # {named}={facts.environment.get(named, '')}\n"
    install = (unset if named else "") + "sudo apt install gcc        # or: module load gcc"
    if "no C compiler was found" in error:
        yield Finding(WARNING, "compiler-missing", error.split(". ")[0] + ".", _SLOW, install)
    elif "cannot build a trivial file" in error or "did not run" in error:
        yield Finding(WARNING, "compiler-broken", error.split(". ")[0] + ".", _SLOW, install)
    elif error and "No module named" not in error:
        yield Finding(WARNING, "compiler-broken", f"{error}.", _SLOW, install)
    elif part.get("openmp") is False:
        yield Finding(
            WARNING,
            "compiler-no-openmp",
            f"{part['command']} does not know -fopenmp.",
            "Generated kernels use one thread each.",
            "sudo apt install gcc libgomp1",
        )


def cache(facts: Facts) -> Iterator[Finding]:
    """A kernel cache that is passed over, cannot be written, or lies on a network."""
    part = facts.parts.get("compiler", {})
    used = str(part.get("folder", ""))
    if "build_error" in part:
        yield Finding(
            WARNING,
            "kernel-cache-unusable",
            f"a library could not be built in {used}: {part['build_error']}",
            _SLOW,
            _elsewhere(),
        )
    if not used:
        return
    if part.get("refused"):
        yield Finding(
            WARNING,
            "kernel-cache-refused",
            f"compiled kernels are kept in {used}, as {part['refused']}.",
            "Each host, or each start, compiles them anew: seconds to minutes.",
            _elsewhere(),
        )
        return
    mount = mount_of(Path(used))
    if is_network(mount.kind):
        yield Finding(
            WARNING,
            "kernel-cache-on-network",
            f"the kernel cache {used} is on a network file system ({mount.kind} at {mount.at}).",
            "It works; at a start of thousands of ranks each waits for that file server.",
            "export MESHMPI_CACHE=${TMPDIR:-/tmp}/meshmpi   # a folder of the node itself",
        )


def _elsewhere() -> str:
    return "export MESHMPI_CACHE=/path/with/space   # yours, writable by you alone, not noexec"
