"""Every legal layout of a graph for a mesh shape.

A layout gives each dimension no axis, one axis, or two axes in either order; it is legal when no
tensor has two dimensions on one axis.  With a ``limit``, a fixed sample is taken in a fixed order:
greedily the layouts that cover most (dimension, axes) pairs-of-choices not seen yet, so that any two
choices that can meet do meet early.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from meshmpi.dims import Axes, MeshShape
from meshmpi.graph import Graph

Choice = dict[str, Axes]
"""Dimension name -> its axes, for every dimension of the graph."""

POOL = 3000
"""Most layouts a sample is taken from; more are thinned to this many by a seeded shuffle."""
POOL_PER_LAYOUT = 50
"""Random layouts of a large graph that are drawn for each layout wanted; more would take long."""
MOST_ENUMERATED = 200_000
"""Beyond this many candidates a sample is drawn at random instead of from the full list."""


def tensor_dims(graph: Graph) -> list[tuple[str, ...]]:
    """The names of the dims of every tensor and variable, each combination once."""
    found: dict[tuple[str, ...], None] = {}
    for operation in graph.operations:
        for t in operation.outputs:
            found[tuple(sorted(t.shape.names))] = None
    for v in graph.variables.values():
        found[tuple(sorted(v.shape.names))] = None
    return list(found)


def options(mesh: MeshShape) -> list[Axes]:
    """(), each axis, each ordered pair of axes."""
    return [(), *((a,) for a in mesh.names), *itertools.permutations(mesh.names, 2)]


def legal(choice: Choice, tensors: Sequence[tuple[str, ...]]) -> bool:
    """Whether no tensor has two dims on one axis; dims without a choice are whole."""
    for names in tensors:
        axes = [a for n in names for a in choice.get(n, ())]
        if len(axes) != len(dict.fromkeys(axes)):
            return False
    return True


def legal_layouts(graph: Graph, mesh: MeshShape, limit: int | None = None) -> list[str]:
    """Layouts as text, the empty one first.  Dims whose name begins with ``_`` stay whole.

    Args:
        graph: With all its operations, gradients included.
        mesh: The mesh shape.
        limit: Most layouts wanted; None for all.
    """
    names = [n for n in graph.dim_names if not n.startswith("_")]
    tensors = tensor_dims(graph)
    if limit is not None and len(options(mesh)) ** len(names) > MOST_ENUMERATED:
        all_of_them = _random_assignments(names, options(mesh), tensors, POOL_PER_LAYOUT * limit)
    else:
        all_of_them = list(_assignments(names, options(mesh), tensors, {}))
    if limit is not None:
        all_of_them = _sample(all_of_them, min(limit, len(all_of_them)))
    return [as_text(c) for c in all_of_them]


def random_layouts(graph: Graph, mesh: MeshShape, number: int) -> list[str]:
    """Up to ``number`` legal layouts drawn by a fixed seed, never the empty one: quicker than listing all."""
    names = [n for n in graph.dim_names if not n.startswith("_")]
    drawn = _random_assignments(names, options(mesh), tensor_dims(graph), 4 * number)
    return [as_text(c) for c in drawn if any(c.values())][:number]


def as_text(choice: Choice) -> str:
    return ";".join(f"{n}:{'+'.join(axes)}" for n, axes in choice.items() if axes)


def _assignments(
    names: Sequence[str], choices: Sequence[Axes], tensors: Sequence[tuple[str, ...]], done: Choice
) -> Iterator[Choice]:
    """All legal completions of ``done``, depth first."""
    if len(done) == len(names):
        yield dict(done)
        return
    name = names[len(done)]
    for axes in choices:
        done[name] = axes
        if legal(done, tensors):
            yield from _assignments(names, choices, tensors, done)
        del done[name]


def _random_assignments(
    names: Sequence[str], choices: Sequence[Axes], tensors: Sequence[tuple[str, ...]], most: int
) -> list[Choice]:
    """The empty choice and a seeded random pool: dims in random order take any legal choice."""
    rng = random.Random(1)
    pool: dict[str, Choice] = {"": dict.fromkeys(names, ())}
    for _ in range(min(POOL, most)):
        choice: Choice = dict.fromkeys(names, ())
        for name in rng.sample(names, len(names)):
            fitting = [axes for axes in choices if legal({**choice, name: axes}, tensors)]
            choice[name] = rng.choice(fitting)
        pool[as_text(choice)] = choice
    return list(pool.values())


def _sample(pool: list[Choice], limit: int) -> list[Choice]:
    first, rest = pool[0], pool[1:]
    random.Random(0).shuffle(rest)
    rest = rest[:POOL]
    pairs = [_pairs(c) for c in rest]
    taken, seen = [first], _pairs(first)
    while len(taken) < limit:
        best = max(range(len(rest)), key=lambda i: len(pairs[i] - seen))
        seen |= pairs.pop(best)
        taken.append(rest.pop(best))
    return taken


def _pairs(choice: Choice) -> set[tuple]:
    return set(itertools.combinations(choice.items(), 2)) | {(item,) for item in choice.items()}
