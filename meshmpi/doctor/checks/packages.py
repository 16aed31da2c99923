"""Python packages: there, importable, of one version on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import BROKEN, Finding
from meshmpi.doctor.inside import REQUIRED


def required(facts: Facts) -> Iterator[Finding]:
    """Packages that do not import, or end the process that imports them."""
    broken = ""
    for name in REQUIRED:
        error = facts.parts.get(name, {}).get("error")
        missing = f"No module named '{name}'" in str(error)
        if error and (missing or not broken):  # one broken package may break those that import it
            broken = broken or name
            what = f"{name} is not installed" if missing else f"{name} does not import: {error}"
            yield Finding(
                BROKEN,
                "package-missing" if missing else "package-broken",
                f"{what}.",
                "meshmpi cannot run without it.",
                f"python -m pip install --force-reinstall {name}",
            )
    if facts.died_in:
        yield _died(facts)


def _died(facts: Facts) -> Finding:
    end, part = facts.inside.end, facts.died_in
    told = f" Its last words: {facts.inside.text.strip()[-300:]}" if facts.inside.text else ""
    core = facts.environment.get("OPENBLAS_CORETYPE")
    if "SIGILL" in end and core:
        return Finding(
            BROKEN,
            "openblas-coretype",
            f"OPENBLAS_CORETYPE={core} chooses routines that this processor does not have:"
            f" the process that tried '{part}' was ended by SIGILL.",
            "Every rank would be ended in its first matrix product.",
            "unset OPENBLAS_CORETYPE",
        )
    return Finding(
        BROKEN,
        "package-broken",
        f"the process that tried '{part}' did not survive: {end}.{told}",
        "Every rank would end in the same way.",
        "python -X faulthandler -m meshmpi.doctor.inside   # shows where",
    )


def versions_of_ranks(facts: Facts) -> Iterator[Finding]:
    """Ranks that run different versions, or different states of meshmpi's sources."""
    for name in dict.fromkeys(n for rank in facts.ranks for n in rank["versions"]):
        told = _by_value({k: rank["versions"].get(name) for k, rank in enumerate(facts.ranks)})
        if told:
            yield _mixed(name, told)
    told = _by_value({k: rank["sources"] for k, rank in enumerate(facts.ranks)})
    if told:
        places = sorted(dict.fromkeys(rank["package"] for rank in facts.ranks))
        yield _mixed("the sources of meshmpi", f"{told}; in {', '.join(places)}")
    libraries = {k: _first(rank) for k, rank in enumerate(facts.ranks)}
    told = _by_value(libraries)
    if told:
        yield _mixed("the MPI library", told)


def _first(rank: Mapping[str, Any]) -> str:
    return str(rank.get("library", "none")).splitlines()[0].split(",")[0].strip()


def _by_value(values: Mapping[int, Any]) -> str:
    """``"2.4.6 on rank 0; 1.26.4 on ranks 1, 2"``, or nothing where all are equal."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) < 2:
        return ""
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in groups.items()
    )


def _mixed(name: str, told: str) -> Finding:
    return Finding(
        BROKEN,
        "versions-differ",
        f"{name} differs between ranks: {told}.",
        "Ranks then lower different programs or round differently, and replicated values part.",
        "env | grep -E '^(PATH|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH)='   # on each host:"
        " use one environment, on a file system that all hosts see",
    )
