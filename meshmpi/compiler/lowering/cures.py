"""Proposes a legal layout in place of an illegal one; each proposal is first tried on the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshmpi.compiler.lowering.placement import Placement
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import LayoutError
from meshmpi.graph import Graph, Operation, Tensor, Update
from meshmpi.graph.fetches import needed_operations
from meshmpi.graph.ops.placement import AsStored
from meshmpi.graph.ops.sources import ReadStored, ReadVariable

MOST_TRIES = 32
"""Proposals that are tried.  One costs as much as placing the graph, some ms per 1,000 nodes."""


class Rules(NamedTuple):
    """The layouts that `mm.compile` takes."""

    layout: Layout
    storage: Layout


class Placing(NamedTuple):
    """What is to be placed: the operations that a step needs, in graph order, and updates of variables."""

    graph: Graph
    mesh: MeshShape
    operations: Sequence[Operation]
    updates: Sequence[Update]

    def placed(self, rules: Rules) -> Placement:
        """Where every tensor and variable lives; LayoutError where that is illegal."""
        found = Placement(self.graph, self.mesh, rules.layout, rules.storage, self.operations)
        for o in self.operations:
            if isinstance(o, (ReadVariable, ReadStored)):
                found.stored(o.variable)
            elif isinstance(o, AsStored):
                found.stored(o.follows_variable)
        for u in self.updates:
            found.stored(u.variable)
        return found

    def refuses(self, rules: Rules) -> LayoutError | None:
        """The error that these rules would give."""
        try:
            self.placed(rules)
        except LayoutError as error:
            return error
        return None


def cured(
    error: LayoutError,
    graph: Graph,
    mesh: MeshShape,
    rules: Rules,
    fetches: Mapping[str, Tensor],
    updates: Sequence[Update],
) -> LayoutError:
    """The error that `lower` raised, with the nearest legal rules; unchanged where a few changes do not help."""
    operations = needed_operations(graph, [*fetches.values(), *(u.value for u in updates)])
    found = _legal(error, Placing(graph, mesh, operations, updates), rules)
    if found is None:
        return error
    text = f"layout '{found.layout}'"
    if found.storage != rules.storage:
        text += f" with storage '{found.storage}'"
    keeps = "Did you mean" not in error.remedy or not error.conflict or _means(error, found)
    remedy = f"{error.remedy} Legal here: {text}." if keeps else f"Legal here: {text}."
    new = LayoutError(error.problem, remedy, error.where)
    new.conflict = error.conflict
    return new


def _means(error: LayoutError, found: Rules) -> bool:
    """Whether the name that the error suggests is the one taken."""
    dims, _ = error.conflict or ((), "")
    return any(f"'{a}'?" in error.remedy for d in dims for r in found for a in r.axes(d))


def _legal(error: LayoutError, placing: Placing, rules: Rules) -> Rules | None:
    """Breadth first: one change, then two, ..."""
    waiting, tries, known = [(error, rules)], 0, [str(rules)]
    while waiting:
        last, at = waiting.pop(0)
        for new in _changed(last, placing.mesh, at):
            if str(new) in known:
                continue
            known.append(str(new))
            tries += 1
            refused = placing.refuses(new)
            if refused is None:
                return new
            if tries >= MOST_TRIES:
                return None
            waiting.append((refused, new))
    return None


def _changed(error: LayoutError, mesh: MeshShape, rules: Rules) -> Iterator[Rules]:
    """The rules with one rule of the conflict sent to another axis, or to none."""
    if error.conflict is None:
        return
    dims, axis = error.conflict
    others = [a for a in mesh.names if a != axis]
    import difflib  # late, for errors only

    near = difflib.get_close_matches(axis, others, n=max(len(others), 1), cutoff=0.0)
    for instead in (*near, None):
        for dim in reversed(dims):
            for kind in ("layout", "storage"):
                layout: Layout = getattr(rules, kind)
                old = layout.axes(dim)
                if axis not in old or instead in old:
                    continue
                new = tuple(instead if a == axis else a for a in old)
                yield rules._replace(**{kind: _with_rule(layout, dim, new)})


def _with_rule(layout: Layout, dim: str, axes: Sequence[str | None]) -> Layout:
    """The layout with another rule for a dim; none where it would be whole."""
    kept = [a for a in axes if a is not None]
    pairs = [(r.dim + "?" * r.optional, kept if r.dim == dim else list(r.axes)) for r in layout]
    return Layout([(d, a) for d, a in pairs if a or d.removesuffix("?") != dim])
