"""Every layout that a graph has on a mesh: which are legal, and why the others are not.

Names and integers only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
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
    """The layouts of a graph on one mesh shape.

    Attributes:
        mesh: The mesh shape.
        legal: As text, the empty one first.
        possible: How many assignments of axes to dims there are, legal or not.
        exhausted: Whether ``legal`` has all that are legal.
        clashes: (dim, dim, where a tensor has both, in how many dims): the pairs that no axis may
            be given to at once, which is what makes an assignment illegal.
    """

    mesh: MeshShape
    legal: tuple[str, ...]
    possible: int
    exhausted: bool
    clashes: tuple[tuple[str, str, str], ...] = field(repr=False)

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


def axes_choices(mesh: MeshShape) -> list[Axes]:
    """No axis, each axis, and every ordered selection of several."""
    names = mesh.names
    return [p for n in range(len(names) + 1) for p in itertools.permutations(names, n)]


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
                file = source.file.rsplit("/", 1)[-1]
                found[pair] = f"{source.name} made at {file}:{source.line}"
    return found


def legal_layouts(graph: Graph, mesh: MeshShape, sample: int | None = None, seed: int = 0) -> Layouts:
    """The layouts of a graph: all that are legal, or a seeded sample of them.

    A layout gives each dimension no axis, one, or several in any order; it is illegal when a tensor
    has two dimensions on one axis.

    Args:
        graph: With gradients and updates.
        mesh: The mesh shape.
        sample: Maximum number of layouts; the empty one is always among them.
        seed: Seed of the sample.
    """
    names, pairs, choices = splittable(graph), clashes(graph), axes_choices(mesh)
    found: list[Choice] = []
    listing = _assignments(names, choices, pairs, {})
    most = MOST_LISTED if sample is not None else None
    found.extend(itertools.islice(listing, most))
    whole = most is None or len(found) < most
    if sample is not None and len(found) > sample:
        found = _sampled(found, whole, names, choices, pairs, sample, seed)
        whole = False
    listed = tuple(as_text(c) for c in found)
    rows = tuple((a, b, where) for (a, b), where in pairs.items())
    return Layouts(mesh, listed, len(choices) ** len(names), whole, rows)


def as_text(choice: Choice) -> str:
    """``{"a": ("rows", "cols")}`` -> ``"a:rows+cols"``."""
    return ";".join(f"{n}:{'+'.join(axes)}" for n, axes in choice.items() if axes)


def _fits(name: str, axes: Axes, done: Choice, pairs: dict[tuple[str, str], str]) -> bool:
    return not any(
        axis in taken
        for other, taken in done.items()
        if (other, name) in pairs or (name, other) in pairs
        for axis in axes
    )


def _assignments(
    names: Sequence[str], choices: Sequence[Axes], pairs: dict[tuple[str, str], str], done: Choice
) -> Iterator[Choice]:
    """All legal completions of ``done``, dims in order."""
    if len(done) == len(names):
        yield dict(done)
        return
    name = names[len(done)]
    for axes in choices:
        if _fits(name, axes, done, pairs):
            done[name] = axes
            yield from _assignments(names, choices, pairs, done)
            del done[name]


def _sampled(
    listed: list[Choice],
    whole: bool,
    names: Sequence[str],
    choices: Sequence[Axes],
    pairs: dict[tuple[str, str], str],
    sample: int,
    seed: int,
) -> list[Choice]:
    """The empty layout and ``sample - 1`` others, evenly drawn where all are known.

    Otherwise each gives axes to the dims in random order, so that none is favoured by its name.
    """
    rng, empty = random.Random(seed), dict.fromkeys(names, ())
    if whole:
        return [empty, *rng.sample(listed[1:], sample - 1)]
    drawn: dict[str, Choice] = {"": empty}
    for _ in range(50 * sample):
        if len(drawn) == sample:
            break
        choice: Choice = {}
        for name in rng.sample(names, len(names)):
            fitting = [axes for axes in choices if _fits(name, axes, choice, pairs)]
            choice[name] = rng.choice(fitting)
        ordered = {n: choice[n] for n in names}
        drawn[as_text(ordered)] = ordered
    return list(drawn.values())
