"""The C compiler of generated kernels and the folder that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshmpi.doctor.facts import Facts, is_network, mount_of
from meshmpi.doctor.findings import Finding, found


def compiler(facts: Facts) -> Iterator[Finding]:
    """No compiler, one that does not work, or one without OpenMP."""
    part = facts.parts.get("compiler", {})
    error = str(part.get("error", ""))
    named = next((n for n in ("MESHMPI_CC", "CC") if facts.environment.get(n)), "")
    unset = f"unset {named}                  # {named}={facts.environment[named]}\n" if named else ""
    if "no C compiler was found" in error:
        yield found("compiler-missing", error.split(". ")[0] + ".", unset=unset)
    elif "cannot build a trivial file" in error or "did not run" in error:
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
