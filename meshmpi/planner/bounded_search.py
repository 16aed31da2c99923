"""Searches the best layout for a graph, a number of ranks and a memory limit, by predicted time.

Plain data parallelism is priced first, then candidates in the order of a quick estimate, except those whose lower
bound exceeds the best time or whose variables do not fit. Then single dimensions of the best layout are changed, and
variables split. A given function returns prices: no graph is known here. A search ends after a given amount of work,
told in the seconds that it takes about: so its answer depends neither on the machine nor on what else that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from meshmpi.amounts import amount
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.planner.candidates import Candidate, LowerBound, Work, candidates, data_parallel, mesh_shapes, splitting
from meshmpi.planner.machine import Machine

EXHAUSTIVE = 64
"""Up to this number of candidates, all are priced.  Status: assumption."""
PRICED_PER_SECOND, LISTED_PER_SECOND = 9000, 2500
"""Operations of a graph that are lowered, optimised and priced, and candidates that are listed, in a second of work:
the rates of the quickstart and of the paper's model with 2 layers on an Intel Xeon with AMX (8,000 to 14,000)."""
Looked = Callable[[int, int, str], object]
"""Called with how much is done, of how much, and what is looked at and best until then, as text."""


@dataclass(frozen=True)
class _Texts:
    """A layout as text: mesh, layout and storage as `mm.compile` takes them, slots as optimizers do."""

    mesh: str
    layout: str
    storage: str
    slots: str

    def __str__(self) -> str:
        stored = f", storage '{self.storage}'" if self.storage else ""
        stored += f", optimizer storage '{self.slots}'" if self.slots else ""
        return f"mesh {self.mesh}, layout '{self.layout}'{stored}"


@dataclass(frozen=True)
class Priced(_Texts):
    """A layout with its price: seconds of a step; peak memory and bytes sent, both per rank.

    The memory that a `Screen` prices is an estimate.
    """

    seconds: float
    memory: int
    bytes_sent: int

    def __str__(self) -> str:
        price = f"{1e3 * self.seconds:.4g} ms, {amount(self.memory, 'B')}, {amount(self.bytes_sent, 'B')} sent"
        return f"{super().__str__()}: {price}"


@dataclass(frozen=True)
class Rejected(_Texts):
    """A layout that cannot be used, and why; ``memory`` in bytes per rank, where that was the reason."""

    reason: str
    memory: int = 0

    def __str__(self) -> str:
        return f"rejected {super().__str__()}: {self.reason}"


Price = Callable[[Candidate], "Priced | Rejected"]


class Screen(NamedTuple):
    """A cheaper graph that orders layouts alike, such as a model with fewer layers: its digest and prices."""

    work: Work
    price: Price


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    ranking: tuple[Priced, ...]  # priced layouts that fit, fastest first
    rejected: tuple[Rejected, ...]  # layouts that do not fit, in the order tried
    tried: int  # number of candidates priced, rejected, or passed over as slower than the best
    considered: int  # number of all candidates
    complete: bool  # whether all were tried, and none that may fit was left without a full price
    seconds: float  # processor time that it took

    @property
    def best(self) -> Priced | None:
        """The fastest layout that fits."""
        return self.ranking[0] if self.ranking else None

    def data(self) -> dict[str, Any]:
        """Everything, for programs: times in seconds, memory in bytes per rank."""
        return asdict(self)

    def report(self, most: int = 5) -> str:
        """The best layouts and the reasons against others, as text."""
        how = "all that may be best" if self.complete else "the most promising; --seconds tries more"
        lines = [f"{self.tried} of {self.considered} layouts looked at ({how}) in {self.seconds:.1f} s"]
        lines += [f"  {k + 1}. {p}" for k, p in enumerate(self.ranking[:most])]
        if not self.ranking:
            lines.append("  no layout fits")
        lines += [f"  {r}" for r in self.rejected[:most]]
        if len(self.rejected) > most:
            lines.append(f"  {len(self.rejected) - most} more were rejected")
        return "\n".join(lines)


def search(
    work: Work,
    ranks: int,
    machine: Machine,
    price: Price,
    *,
    seconds: float = 30.0,
    most_axes: int = 2,
    axis_names: Sequence[str] = ("rows", "cols", "planes"),
    meshes: Sequence[MeshShape] = (),
    screen: Screen | None = None,
    slots: bool = False,
    memory_limit: int = 0,
    looked: Looked | None = None,
) -> SearchResult:
    """Searches meshes, computation layouts and storage layouts.

    Args:
        work, price: Digest of the graph; lowers it in a layout and predicts, or says why that cannot be used.
        ranks, machine: Size of the job, and what it runs on.
        seconds: Work, see `PRICED_PER_SECOND`; what is priced with it is ranked.  Listing takes at most half.
        most_axes, axis_names: Maximum number of axes of the meshes that are tried, and their names.
        meshes: The only meshes to try.
        screen: Searched first; what it finds best is then priced in full.
        slots: Whether prices depend on where optimizer slots are kept, so that this is searched too.
        memory_limit: Bytes per rank, which `price` keeps too; 0: none.
        looked: Hears how far it is.

    Raises:
        ConfigError: No time, or no axis.
    """
    if seconds <= 0 or not 1 <= most_axes <= len(axis_names):
        raise ConfigError(
            f"a search of {seconds:g} seconds on meshes of up to {most_axes} axes.",
            f"Give more than 0 seconds and 1 to {len(axis_names)} axes.",
        )
    first = screen or Screen(work, price)
    search_time = seconds * (0.8 if screen else 1.0)
    began = time.process_time()
    started = LayoutSearch(first, machine, search_time, slots, LowerBound(work, machine), memory_limit, looked)
    shapes = list(meshes) or mesh_shapes(ranks, most_axes, axis_names)
    started.try_one(data_parallel(first.work, shapes[0], machine))
    found, left = list[Candidate](), list(shapes)
    while left and (not found or started.spent < search_time / 2):
        listed = candidates(first.work, left.pop(0), machine)
        found += listed
        started.spent += len(listed) / LISTED_PER_SECOND
    found.sort(key=lambda c: c.guess)
    started.limit_seconds = max(search_time, started.spent + search_time / 2)
    tried = started.price_all(found)
    started.refine()
    ranking, complete = started.ranking(), tried == len(found) and not left
    if screen is not None:
        every = len(ranking)
        ranking, priced = _in_full(ranking, Screen(work, price), started, seconds)
        complete = complete and (bool(ranking) or priced == every)
    return SearchResult(
        tuple(p for _, p in ranking), tuple(started.rejected), tried, len(found), complete, time.process_time() - began
    )


def _in_full(
    ranking: Sequence[tuple[Candidate, Priced]], by: Screen, started: LayoutSearch, seconds: float
) -> tuple[list[tuple[Candidate, Priced]], int]:
    """What fits of those that work is left to price, one at least; and how many that were."""
    out: list[tuple[Candidate, Priced]] = []
    left = max(1, int((seconds - started.spent) * PRICED_PER_SECOND / max(1, by.work.operations)))
    for priced, (candidate, _) in enumerate(ranking[:left]):
        started.tell(priced, min(left, len(ranking)), f"in full: {candidate}")
        found = by.price(candidate)
        if isinstance(found, Rejected):
            started.rejected.append(found)
        else:
            out.append((candidate, found))
    return sorted(out, key=lambda p: (p[1].seconds, p[1].layout)), min(left, len(ranking))


class LayoutSearch:
    """A search under way."""

    def __init__(
        self,
        by: Screen,
        machine: Machine,
        seconds: float,
        slots: bool,
        whole: LowerBound,
        limit: int,
        looked: Looked | None = None,
    ):
        self.work, self.price, self.slots, self.looked = by.work, by.price, slots, looked
        self.lower_bound, self.whole, self.limit = LowerBound(by.work, machine), whole, limit
        self.spent, self.limit_seconds = 0.0, seconds  # work done, and allowed
        self.priced: list[tuple[Candidate, Priced]] = []
        self.rejected: list[Rejected] = []
        self._smallest: tuple[float, Candidate | None] = float("inf"), None  # of those that need too much memory
        self._seen: set[tuple[str, str, str, str]] = set()

    @property
    def best(self) -> float:
        """Seconds of the fastest that fits, as far as the price knows."""
        return min((p.seconds for _, p in self.priced if self._fits(p)), default=float("inf"))

    @property
    def late(self) -> bool:
        return self.spent > self.limit_seconds

    def tell(self, done: int, known: int, what: str) -> None:
        """Tells who wants to hear it how far the search is."""
        if self.looked is not None:
            self.looked(done, known, what)

    def _fits(self, found: Priced) -> bool:
        return not self.limit or found.memory <= self.limit

    def ranking(self) -> list[tuple[Candidate, Priced]]:
        """What was priced: what fits, fastest first, then what may not, smallest first."""
        return sorted(
            self.priced,
            key=lambda p: (0, p[1].seconds, p[1].layout) if self._fits(p[1]) else (1, p[1].memory, p[1].layout),
        )

    def price_all(self, found: Sequence[Candidate]) -> int:
        """Prices candidates that may win; returns how many were looked at before the work was done.

        Where they are many, a quarter of it is left for changes around the best.
        """
        share = 1.0 if len(found) <= EXHAUSTIVE else 0.75
        stop = self.spent + share * (self.limit_seconds - self.spent)
        tried = 0
        for k, c in enumerate(found):
            if c.bound >= self.best:
                tried += 1
            elif self.spent < stop or self._too_large(c):
                share_done = max(k / len(found), self.spent / self.limit_seconds)
                self.tell(int(99 * min(1, share_done)), 100, f"{k} of {len(found)}, best {1e3 * self.best:.4g} ms")
                self.try_one(c)
                tried += 1
        return tried

    def try_one(self, c: Candidate) -> None:
        """Prices a candidate that was not seen before."""
        if c.texts in self._seen:
            return
        self._seen.add(c.texts)
        found = self._too_large(c)
        if found is None:
            found = self.price(c)
            self.spent += self.work.operations / PRICED_PER_SECOND
        if isinstance(found, Rejected):
            self.rejected.append(found)
        else:
            self.priced.append((c, found))
        too_much = isinstance(found, Rejected) or not self._fits(found)
        if too_much and 0 < found.memory < self._smallest[0]:
            self._smallest = found.memory, c

    def _too_large(self, c: Candidate) -> Rejected | None:
        """Why a candidate needs no price, if its variables alone do not fit."""
        least = self.whole.least_bytes(c) if self.limit else 0
        if least <= self.limit:
            return None
        why = f"{amount(least, 'B')} per rank of variables alone, the limit is {amount(self.limit, 'B')}"
        return Rejected(*c.texts, why, least)

    def refine(self) -> None:
        """Changes the best layouts a dim at a time, and splits stored variables."""
        improved = True
        while improved and not self.late:
            before = self.best, self._smallest[0]
            # The best so far; where nothing fits, what needs least memory.
            fitting = [p for p in self.priced if self._fits(p[1])]
            start = min(fitting, key=lambda p: p[1].seconds)[0] if fitting else self._smallest[1]
            if start is None:
                return
            for c in (*self._stored(start), *self._neighbours(start)):
                if self.late:
                    return
                if c.bound < self.best:
                    self.try_one(c)
            improved = before != (self.best, self._smallest[0])

    def _neighbours(self, c: Candidate) -> Iterator[Candidate]:
        conflicts = self.work.conflicts()
        for d in self.work.splittable():
            for axis in ("", *splitting(c.mesh)):
                layout = {e: axes for e, axes in c.layout.items() if e != d}
                if axis:
                    if any(axis in layout.get(e, ()) and frozenset((d, e)) in conflicts for e in layout):
                        continue
                    layout[d] = (axis,)
                if layout != c.layout:
                    yield self.lower_bound.candidate(c.mesh, layout, c.storage, c.slots)

    def _stored(self, c: Candidate) -> Iterator[Candidate]:
        """The same with variables, or their slots, stored in parts over a free axis."""
        for axis in splitting(c.mesh):
            for d in self.work.splittable():
                if not any(d in dims for dims in self.work.variables) or d in c.layout:
                    continue
                together = [e for dims in self.work.variables if d in dims for e in dims]
                if any(axis in c.layout.get(e, ()) for e in together):
                    continue
                yield c._replace(storage={**c.storage, d: (axis,)})
                if self.slots and c.storage.get(d) != (axis,):
                    yield c._replace(slots={**c.slots, d: (axis,)})
