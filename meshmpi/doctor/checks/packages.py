"""Python packages: there, importable, of one version on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import Finding, found
from meshmpi.doctor.inside import REQUIRED


def required(facts: Facts) -> Iterator[Finding]:
    """Packages that do not import, or end the process that imports them."""
    broken = ""
    for name in REQUIRED:
        error = facts.parts.get(name, {}).get("error")
        missing = f"No module named '{name}'" in str(error)
        if missing:
            yield found("package-missing", f"{name} is not installed.", name=name)
        elif error and not broken:  # one broken package may break those that import it
            yield found("package-broken", f"{name} does not import: {error}.", name=name)
        broken = broken or (name if error else "")
    if not facts.died_in:
        return
    end, part, core = facts.inside.end, facts.died_in, facts.environment.get("OPENBLAS_CORETYPE")
    if "SIGILL" in end and core:
        what = (
            f"OPENBLAS_CORETYPE={core} chooses routines that this processor does not have:"
            f" the process that tried '{part}' was ended by SIGILL."
        )
        yield found("openblas-coretype/died", what)
        return
    last = f" Its last words: {facts.inside.text.strip()[-300:]}" if facts.inside.text else ""
    yield found("package-broken/died", f"the process that tried '{part}' did not survive: {end}.{last}")


def versions_of_ranks(facts: Facts) -> Iterator[Finding]:
    """Ranks that run different versions, or different states of meshmpi's sources."""
    names = dict.fromkeys(n for rank in facts.ranks for n in rank["versions"])
    told = {name: _by_value([rank["versions"].get(name) for rank in facts.ranks]) for name in names}
    sources = _by_value([rank["sources"] for rank in facts.ranks])
    places = ", ".join(sorted(dict.fromkeys(rank["package"] for rank in facts.ranks)))
    told["the sources of meshmpi"] = f"{sources}; in {places}" if sources else ""
    libraries = [str(rank.get("library", "none")) for rank in facts.ranks]
    told["the MPI library"] = _by_value([text.splitlines()[0].split(",")[0].strip() for text in libraries])
    for name, values in told.items():
        if values:
            yield found("versions-differ", f"{name} differs between ranks: {values}.")


def _by_value(values: list[Any]) -> str:
    """``"2.4.6 on rank 0; 1.26.4 on ranks 1, 2"``, or nothing where all are equal."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return ""
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in groups.items()
    )
