"""Results of checking layouts: differences against bounds, and the first wrong operation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from meshmpi.ir.program import Source


@dataclass(frozen=True)
class Difference:
    """How far a tensor in one layout is from what one rank makes of the same inputs."""

    tensor: str  # its name, or ``variable NAME`` for what a step leaves in a variable
    source: Source  # where the user made it
    apart: float  # the largest difference of an element; infinite where only one is finite
    bound: float  # what rounding alone may come to (`bounds`), at the element that exceeds it most
    ratio: float  # difference divided by bound there; above 1 it is not rounding
    from_one: float = 0.0  # the largest difference from what one rank computes from the start
    wrong: int = 0  # how many elements are beyond their bounds, counted on every rank that holds them
    elements: int = 0  # how many were compared
    undecided: int = 0  # how many have no bound, since a decision before them lies within rounding
    where: str = ""  # the element, as ``"batch=3, hidden=0"``, its rank, and both values

    @property
    def ok(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        return (
            f"{self.tensor}: {self.wrong:,} of {self.elements:,} elements differ by more than"
            f" rounding, at {self.where}, bound {self.bound:.2g}"
        )


@dataclass
class Check:
    """One layout on one mesh."""

    mesh: str
    layout: str
    differences: dict[str, Difference] = field(default_factory=dict)  # by tensor, in graph order; variables last
    first: Difference | None = None  # of the first tensor, in graph order, that is beyond its bound
    instruction: str = ""  # what made it, as text
    stage: str = ""  # "lowering", or the pass after which the program is wrong, or "running"
    native: bool = False  # whether it is wrong by generated kernels only, and right by NumPy's
    error: str = ""  # what was raised instead of an answer
    refused: str = ""  # why the layout is illegal, where lowering found it so
    remedy: str = ""  # what would make it legal
    named: bool = False  # whether the caller named the layout: an illegal one is a mistake then

    @property
    def ok(self) -> bool:
        return self.first is None and not self.error and not (self.refused and self.named)

    def __str__(self) -> str:
        name = f"layout '{self.layout}' on mesh {self.mesh}"
        if self.refused:
            return f"{name} is illegal: {self.refused} {self.remedy}".rstrip()
        if self.error:
            return f"{name} fails ({self.stage}): {self.error}"
        if self.first is None:
            return f"{name} computes what one rank does"
        lines = [f"{name} is WRONG. First difference: {self.first.source}", f"  {self.first}"]
        if self.instruction:
            lines.append(f"  made by {self.instruction}")
        if self.native:
            lines.append("  it is right by NumPy's kernels; by the generated ones")
        if self.stage == "lowering":
            lines.append("  the program as lowered, without passes, is wrong already")
        else:
            lines.append(f"  the program as lowered is right; it is wrong after the pass '{self.stage}'")
        return "\n".join(lines)


@dataclass
class Report:
    """What `mm.verify` found."""

    checks: list[Check]  # one for each layout tried, illegal ones included
    precision: str  # "float64" or "own"
    skipped: list[str] = field(default_factory=list)  # about layouts and kernels that were not tried, as sentences
    native: bool = False  # whether programs were run by generated kernels, too

    @property
    def ok(self) -> bool:
        """Whether some were tried, all compute what one rank does, and no named one is illegal."""
        return bool(self.tried) and all(c.ok for c in self.checks)

    @property
    def wrong(self) -> list[Check]:
        """Those that compute something else, fail, or were named and are illegal."""
        return [c for c in self.checks if not c.ok]

    @property
    def tried(self) -> list[Check]:
        """Those of legal layouts."""
        return [c for c in self.checks if not c.refused]

    def data(self) -> dict[str, Any]:
        """Verdict, layouts and the first difference of each wrong one, for programs."""
        checks = [
            {
                "mesh": c.mesh,
                "layout": c.layout,
                "ok": c.ok,
                "refused": c.refused,
                "error": c.error,
                "stage": c.stage,
                "first": None if c.first is None else {"source": str(c.first.source), "difference": str(c.first)},
            }
            for c in self.checks
        ]
        return {"ok": self.ok, "precision": self.precision, "skipped": self.skipped, "checks": checks}

    def largest(self) -> dict[str, tuple[Difference, Check]]:
        """Tensor -> the difference nearest to (or farthest beyond) its bound, over all layouts."""
        worst: dict[str, tuple[Difference, Check]] = {}
        for c in self.checks:
            for name, d in c.differences.items():
                if name not in worst or d.ratio > worst[name][0].ratio:
                    worst[name] = d, c
        return worst

    def table(self, rows: int | None = None) -> str:
        """The largest differences, those nearest to their bounds first.

        Difference and bound are of the operation alone, computed from the same inputs; the column
        "one rank" has the difference from what one rank computes from the start.

        Args:
            rows: Most of them; None for all, in graph order.
        """
        worst = list(self.largest().items())
        if rows is not None:
            worst = sorted(worst, key=lambda item: -item[1][0].ratio)[:rows]
        width = max([len(n) for n, _ in worst], default=6)
        lines = [f"{'tensor':{width}}  difference      bound  of it   one rank  made at, in layout"]
        for name, (d, c) in worst:
            share = f"{100 * d.ratio:.0f} %" if d.ratio < 100 else "beyond"
            unsure = f", {d.undecided} undecided" if d.undecided else ""
            lines.append(
                f"{name:{width}}  {d.apart:10.2e} {d.bound:10.2e} {share:>6} {d.from_one:10.2e}"
                f"  {d.source.short}{unsure}, '{c.layout}' on {c.mesh}"
            )
        return "\n".join(lines)

    def text(self, rows: int = 12) -> str:
        """All of it for a reader: verdict, wrong layouts, largest differences."""
        wrong = [c for c in self.wrong if not c.refused]
        illegal = [c for c in self.wrong if c.refused]
        refused = Counter(c.refused for c in self.checks if c.refused and not c.named)
        lines = [self._verdict(len(wrong)), *self.skipped]
        lines += [f"{n} illegal: {why}" for why, n in refused.items()]
        for found, what in ((illegal, "illegal"), (wrong, "wrong")):
            lines += [str(c) for c in found[:5]]
            if len(found) > 5:
                lines.append(f"and {len(found) - 5} more layouts are {what}.")
        if any(c.differences for c in self.checks):
            lines += ["Largest differences of an operation from one rank, against the bound of rounding:"]
            lines.append(self.table(rows))
        return "\n".join(lines)

    def _verdict(self, wrong: int) -> str:
        tried = len(self.tried)
        if not tried:
            return "No layout was tried: nothing is verified."
        in_what = "in float64" if self.precision == "float64" else "in the types of the graph"
        in_what += ", by NumPy's kernels and by generated ones" if self.native else ""
        if wrong:
            return f"{wrong} of {tried} layouts are wrong, {in_what}."
        if tried == 1:
            return f"1 layout computes what one rank does, {in_what}."
        return f"{tried} layouts compute what one rank does, {in_what}."

    def __str__(self) -> str:
        return self.text()
