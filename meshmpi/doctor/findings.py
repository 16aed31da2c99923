"""What the doctor reports: a finding, and how findings are printed.

Knows nothing of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

BROKEN, WARNING = "broken", "warning"
"""Broken: programs do not run, or not as one job.  Warning: they run, but slowly or at a risk."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with this machine or its settings.

    Attributes:
        level: BROKEN or WARNING.
        name: The same in every version, for scripts and support tickets.
        what: What was found, with names and numbers; a sentence.
        why: What follows from it; a sentence.
        paste: Lines for a shell that repair it; lines for people begin with ``#``.
    """

    level: str
    name: str
    what: str
    why: str
    paste: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.level.upper()} {self.name}: {self.what}", f"  {self.why}"]
        lines += [f"    {line}" for line in self.paste.splitlines()]
        return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level of the findings, or "ok" without any."""
    levels = [finding.level for finding in findings]
    return next((level for level in (BROKEN, WARNING) if level in levels), "ok")


def summary(findings: Sequence[Finding]) -> str:
    """All findings as text, the broken ones first, and how many there are."""
    ordered = sorted(findings, key=lambda finding: finding.level != BROKEN)
    counts = {level: sum(f.level == level for f in findings) for level in (BROKEN, WARNING)}
    if not findings:
        return "Nothing wrong was found."
    total = f"{counts[BROKEN]} broken, {counts[WARNING]} warning{'s' * (counts[WARNING] != 1)}."
    return "\n\n".join([*map(str, ordered), total])
