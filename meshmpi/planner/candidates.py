"""Candidate layouts: which dimensions may share a mesh axis, and a quick estimate of each layout's time.

Works on a digest of the graph (`Work`): names and integers only. The estimate orders candidates, the arithmetic at
the highest rate bounds them; the predicted time of the real program decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshmpi.dims import MeshShape
from meshmpi.planner.machine import Machine

Names = tuple[str, ...]
Rules = Mapping[str, Names]
"""Dim -> mesh axes."""
MOST_SETS = 512
"""Sets of dims for one axis that are looked at.  Status: assumption; a Transformer has 40."""
KEPT = {1: 512, 2: 40, 3: 10}
"""Axes of the mesh -> sets kept for each of them, best guesses first."""


class Sum(NamedTuple):
    """A product, a gather or a scatter: sums over the dims that its output lacks."""

    inputs: tuple[Names, ...]  # dims of each input
    output: Names  # dims of the result
    flops_each: int  # floating-point operations at each point of all dims
    bytes_each: int  # bytes of one element of the result

    @property
    def dims(self) -> Names:
        return tuple(dict.fromkeys((*self.output, *(d for x in self.inputs for d in x))))


class Renaming(NamedTuple):
    """A value under other dims: where the dims are split otherwise, it is gathered."""

    old: Names
    new: Names
    bytes_each: int


@dataclass(frozen=True)
class Work:
    """What a graph does, by dims."""

    sizes: Mapping[str, int]  # dim -> size
    tensors: Mapping[Names, int]  # dims -> bytes of one element, summed over the tensors that have these dims
    variables: Mapping[Names, int] = field(default_factory=dict)  # dims -> the same of the variables, as stored
    sums: Mapping[Sum, int] = field(default_factory=dict)  # with how often each occurs
    renamings: Mapping[Renaming, int] = field(default_factory=dict)  # likewise
    operations: int = 1  # of the graph: pricing a layout takes time in proportion

    def conflicts(self) -> set[frozenset[str]]:
        """Pairs of dims that some tensor has both: they cannot share an axis."""
        return {frozenset(pair) for dims in self.tensors for pair in itertools.combinations(dims, 2)}

    def splittable(self) -> list[str]:
        """Dims of two elements or more, those of most work first."""
        work = {
            d: sum(n * math.prod(self.sizes[e] for e in s.dims) for s, n in self.sums.items() if d in s.dims)
            for d in self.sizes
        }
        return sorted((d for d in self.sizes if self.sizes[d] > 1), key=lambda d: (-work[d], d))


class Candidate(NamedTuple):
    """A layout to price."""

    mesh: MeshShape
    layout: Rules
    bound: float  # seconds that no program of this layout can beat
    guess: float  # seconds, guessed
    storage: Mapping[str, Names] = {}  # of stored variables that differ
    slots: Mapping[str, Names] = {}  # of optimizer slots that differ from theirs

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Mesh, layout, storage and storage of slots, as `mm.compile` and optimizers take them."""
        layout, storage, slots = map(rules_text, (self.layout, self.storage, self.slots))
        return str(self.mesh), layout, storage, slots


def rules_text(rules: Rules) -> str:
    """``"batch:rows;heads:rows+cols"``."""
    return ";".join(f"{d}:{'+'.join(axes)}" for d, axes in rules.items() if axes)


def splitting(mesh: MeshShape) -> Names:
    """The axes of a mesh that have more than one rank."""
    return tuple(a for a, n in mesh.axes if n > 1)


def mesh_shapes(ranks: int, most_axes: int, names: Sequence[str]) -> list[MeshShape]:
    """Meshes of this number of ranks, with one to ``most_axes`` axes of at least two ranks.

    Sizes ascend: a layout for the other order is one with the names of axes exchanged.
    """
    found = [sizes for n in range(1, most_axes + 1) for sizes in _ascending(ranks, n, 2)]
    return [MeshShape(list(zip(names, sizes, strict=False))) for sizes in found or [(ranks,)]]


def _ascending(n: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    if parts == 1 and n >= least:
        yield (n,)
    for first in range(least, n + 1) if parts > 1 else ():
        if n % first == 0:
            yield from ((first, *rest) for rest in _ascending(n // first, parts - 1, first))


def independent_sets(dims: Sequence[str], conflicts: set[frozenset[str]]) -> list[Names]:
    """Sets of dims of which no two conflict, the empty one included; at most `MOST_SETS`."""
    found: list[Names] = [()]
    for d in dims:
        more = [(*s, d) for s in found if not any(frozenset((d, other)) in conflicts for other in s)]
        found += more[: max(0, MOST_SETS - len(found))]
    return found


def data_parallel(work: Work, mesh: MeshShape, machine: Machine) -> Candidate:
    """Plain data parallelism: the dim with most work that no variable has, split over the whole mesh.

    Where there is none that is large enough, nothing is split.
    """
    stored = {d for dims in work.variables for d in dims}
    axes = splitting(mesh)
    free = (d for d in work.splittable() if d not in stored and work.sizes[d] >= mesh.size)
    layout = dict.fromkeys(itertools.islice(free, 1 if axes else 0), axes)
    return LowerBound(work, machine).candidate(mesh, layout)


def candidates(work: Work, mesh: MeshShape, machine: Machine) -> list[Candidate]:
    """Layouts of a graph on a mesh, best guesses first.

    Each axis splits a set of dims that no tensor has together; a dim that is chosen for several
    axes is split over all of them.
    """
    conflicts, lower_bound = work.conflicts(), LowerBound(work, machine)
    by_axis: list[list[Names]] = []
    for axis, size in mesh.axes:
        dims = [d for d in work.splittable() if work.sizes[d] >= size > 1]
        sets = independent_sets(dims, conflicts)
        alone = MeshShape([(axis, size)])
        sets.sort(key=lambda s: lower_bound.guess(alone, dict.fromkeys(s, (axis,))))
        by_axis.append(sets[: KEPT.get(len(mesh.axes), 6)])
    out: list[Candidate] = []
    sizes = mesh.sizes
    for chosen in itertools.product(*by_axis):
        if any(sizes[i - 1] == sizes[i] and chosen[i - 1] > chosen[i] for i in range(1, len(sizes))):
            continue  # the same with equal axes exchanged
        layout: dict[str, Names] = {}
        for axis, dims in zip(mesh.names, chosen, strict=True):
            for d in dims:
                layout[d] = (*layout.get(d, ()), axis)
        if any(work.sizes[d] < mesh.count(axes) for d, axes in layout.items()):
            continue
        if len(sizes) > 1 and layout and all(axes == mesh.names for axes in layout.values()):
            continue  # the same on the mesh of one axis
        out.append(lower_bound.candidate(mesh, layout))
    return sorted(out, key=lambda c: (c.guess, rules_text(c.layout)))


class LowerBound:
    """Quick times of layouts: one that no program beats, and a guess."""

    def __init__(self, work: Work, machine: Machine):
        self.work, self.machine = work, machine
        self._flops = [(s, n * s.flops_each * math.prod(work.sizes[d] for d in s.dims)) for s, n in work.sums.items()]

    def candidate(self, mesh: MeshShape, layout: Rules, *stored: Rules) -> Candidate:
        """A layout with its times; ``stored``: rules of storage and of slots, by default none."""
        return Candidate(mesh, layout, self.bound(mesh, layout), self.guess(mesh, layout), *stored)

    def bound(self, mesh: MeshShape, layout: Rules) -> float:
        """Seconds of the arithmetic at the fastest rate of the machine."""
        total = sum(f / self._parts(mesh, layout, s.dims) for s, f in self._flops)
        return total / self.machine.peak_of(*self.machine.products)

    def least_bytes(self, c: Candidate) -> int:
        """Bytes that the variables of a rank take, at least: they are there between steps."""
        rules = [c.layout, c.storage, c.slots]
        split = {d: dict.fromkeys(a for r in rules for a in r.get(d, ())) for d in self.work.sizes}
        return sum(
            each * math.prod(self.work.sizes[d] // c.mesh.count(c.mesh.in_mesh_order(split[d])) for d in dims)
            for dims, each in self.work.variables.items()
        )

    def guess(self, mesh: MeshShape, layout: Rules) -> float:
        """Seconds of products at their rates, sums sent where dims are split, tensors touched."""
        seconds = sum(n * self._sum(mesh, layout, s) for s, n in self.work.sums.items())
        seconds += sum(n * self._renaming(mesh, layout, r) for r, n in self.work.renamings.items())
        touched = sum(
            each * math.prod(self.work.sizes[d] for d in dims) / self._parts(mesh, layout, dims)
            for dims, each in (*self.work.tensors.items(), *self.work.variables.items())
        )
        return seconds + touched / self.machine.memory(touched / 100 + 1)

    def _parts(self, mesh: MeshShape, layout: Rules, dims: Names) -> int:
        return math.prod(mesh.count(layout[d]) for d in dims if d in layout)

    def _local(self, mesh: MeshShape, layout: Rules, dims: Names) -> int:
        sizes = self.work.sizes
        return math.prod(-(-sizes[d] // mesh.count(layout[d])) if d in layout else sizes[d] for d in dims)

    def _sum(self, mesh: MeshShape, layout: Rules, s: Sum) -> float:
        out = s.output
        summed = [d for d in s.dims if d not in out]
        axes = mesh.in_mesh_order(dict.fromkeys(a for d in summed for a in layout.get(d, ())))
        seconds = 0.0
        if s.flops_each and len(s.inputs) == 2:
            a, b = s.inputs
            m = self._local(mesh, layout, tuple(d for d in out if d in a and d not in b))
            n = self._local(mesh, layout, tuple(d for d in out if d in b and d not in a))
            k = self._local(mesh, layout, tuple(summed))
            flops = s.flops_each * self._local(mesh, layout, s.dims)
            seconds += flops / self.machine.product_rate("float32", m, n, k)
        if axes:
            handed = s.bytes_each * self._local(mesh, layout, out)
            seconds += self.machine.collective(mesh, axes, "all_reduce", handed)
        return seconds

    def _renaming(self, mesh: MeshShape, layout: Rules, r: Renaming) -> float:
        old, new = ({a for d in dims for a in layout.get(d, ())} for dims in (r.old, r.new))
        lost = tuple(a for a in mesh.names if a in old and a not in new)
        if not lost:
            return 0.0
        return self.machine.collective(mesh, lost, "all_gather", r.bytes_each * self._local(mesh, layout, r.old))
