"""Enumerates the layouts of a graph on a mesh: which are legal, and why the others are not.

Names and integers only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshmpi.dims import Axes, MeshShape
from meshmpi.graph import Graph

Choice = dict[str, Axes]
"""Dimension -> the axes it is split over."""
MOST_LISTED = 20_000
"""Layouts listed before a sample is drawn without listing them all.  Status: assumption; this many
take about a second."""


@dataclass(frozen=True)
class Layouts:
    """The layouts of a graph on one mesh shape."""

    mesh: MeshShape
    legal: tuple[str, ...]  # as text, the empty one first
    possible: int  # how many assignments of axes to dims there are, legal or not
    exhausted: bool  # whether ``legal`` has all that are legal
    clashes: tuple[tuple[str, str, str], ...] = field(repr=False)  # (dim, dim, where a tensor has both)

    def __str__(self) -> str:
        known = f"{len(self.legal):,} of {self.possible:,} assignments"
        if not self.exhausted:
            return f"mesh {self.mesh}: a sample of {known}"
        illegal = self.possible - len(self.legal)
        text = f"mesh {self.mesh}: {known} of axes to dimensions are legal"
        if not illegal:
            return text
        shown = "; ".join(f"{a} and {b} ({where})" for a, b, where in self.clashes[:3])
        more = f" and {len(self.clashes) - 3} more pairs" if len(self.clashes) > 3 else ""
        return f"{text}; {illegal:,} split a tensor twice over one axis: these have a tensor in common: {shown}{more}"


def splittable(graph: Graph) -> list[str]:
    """Dims that a user's layout may mention: not those that the library named for itself."""
    return [n for n in graph.dim_names if not n.startswith("_") and n not in graph.aligned]


def clashes(graph: Graph) -> dict[tuple[str, str], str]:
    """Pairs of dims that some tensor or variable has both of -> where the first such was made."""
    found: dict[tuple[str, str], str] = {}
    known = splittable(graph)
    shapes = [(t.shape, t.source) for o in graph.operations for t in o.outputs]
    shapes += [(v.shape, v.source) for v in graph.variables.values()]
    for shape, source in shapes:
        names = [n for n in known if shape.find(n) >= 0]
        for pair in itertools.combinations(names, 2):
            if pair not in found:
                found[pair] = f"{source.name} made at {source.short}"
    return found


def legal_layouts(graph: Graph, mesh: MeshShape, sample: int | None = None, seed: int = 0) -> Layouts:
    """The layouts of a graph: all that are legal, or a seeded sample of at most ``sample`` with the empty one.

    A layout gives each dimension no axis, one, or several in any order; it is illegal when a tensor
    has two dimensions on one axis.
    """
    search = _Search(graph, mesh)
    found = list(itertools.islice(search.completions({}), None if sample is None else MOST_LISTED))
    whole = sample is None or len(found) < MOST_LISTED
    if sample is not None and len(found) > sample:
        rng = random.Random(seed)
        found = [found[0], *rng.sample(found[1:], sample - 1)] if whole else search.drawn(sample, rng)
        whole = False
    listed = tuple(as_text(c) for c in found)
    rows = tuple((a, b, where) for (a, b), where in search.pairs.items())
    return Layouts(mesh, listed, len(search.choices) ** len(search.names), whole, rows)


def as_text(choice: Choice) -> str:
    """``{"a": ("rows", "cols")}`` -> ``"a:rows+cols"``."""
    return ";".join(f"{n}:{'+'.join(axes)}" for n, axes in choice.items() if axes)


class _Search:
    """The layouts that have no pair of clashing dims on one axis; the first that it finds is the empty one."""

    def __init__(self, graph: Graph, mesh: MeshShape):
        self.names, self.pairs = splittable(graph), clashes(graph)
        self.choices = [p for n in range(len(mesh.names) + 1) for p in itertools.permutations(mesh.names, n)]

    def fitting(self, name: str, done: Choice) -> Iterator[Axes]:
        """The axes that a dim can have besides what is chosen."""
        others = [n for n in done if (n, name) in self.pairs or (name, n) in self.pairs]
        taken = {axis for n in others for axis in done[n]}
        return (axes for axes in self.choices if taken.isdisjoint(axes))

    def completions(self, done: Choice) -> Iterator[Choice]:
        """All layouts that begin with ``done``, dims in order."""
        if len(done) == len(self.names):
            yield dict(done)
            return
        name = self.names[len(done)]
        for axes in self.fitting(name, done):
            yield from self.completions({**done, name: axes})

    def drawn(self, sample: int, rng: random.Random) -> list[Choice]:
        """The empty layout and others, each by giving axes to the dims in random order: no name is favoured."""
        drawn: dict[str, Choice] = {"": dict.fromkeys(self.names, ())}
        for _ in range(50 * sample):
            if len(drawn) == sample:
                break
            choice: Choice = {}
            for name in rng.sample(self.names, len(self.names)):
                choice[name] = rng.choice(list(self.fitting(name, choice)))
            ordered = {n: choice[n] for n in self.names}
            drawn[as_text(ordered)] = ordered
        return list(drawn.values())
