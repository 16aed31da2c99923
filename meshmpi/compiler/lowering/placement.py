"""How each tensor is split: computation layout, storage layouts, constraints.  Names and integers only.

The computation layout splits a tensor; constrained and stored tensors have their own rules. Results of elementwise
operations and reductions follow them, unless a mesh axis would be used twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from meshmpi.dims import Axes, Layout, MeshShape, Shape
from meshmpi.errors import LayoutError
from meshmpi.graph import Graph, Operation, Tensor, Variable
from meshmpi.graph.ops.placement import AsStored, Constrain
from meshmpi.graph.ops.sources import ReadStored
from meshmpi.ir.kinds import nests
from meshmpi.ir.scalar import ITEM_BYTES

Splits = tuple[Axes, ...]
FIRST = "*"
"""Stands in a storage layout for the first dimension of each variable that has no rules of its own."""
SMALLEST_BYTES = 16 * 2**10
"""A variable of fewer bytes is not split by a rule for first dimensions.  Status: assumption; it would save less than
the second message costs that its gradient then needs."""


class Placement:
    """Splits of every tensor and variable; ``storage`` is for variables without rules of their own.

    Raises:
        LayoutError: An unknown axis or dimension, or a tensor split twice over one axis.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, layout: Layout, storage: Layout, operations: Sequence[Operation]):
        names = graph.dim_names
        layout.check(mesh, names)
        storage.check(mesh, [*names, FIRST])
        if FIRST in layout:
            raise LayoutError(
                f"layout '{layout}' has a rule for '{FIRST}', the first dimension of each variable.",
                f"Give it as a storage layout: storage='{FIRST}:{'+'.join(layout.axes(FIRST))}'.",
            )
        self.mesh, self.layout, self.storage = mesh, _with_aligned_dims(layout, graph), storage
        self.splits: dict[Tensor, Splits] = {}
        self._own: dict[Tensor, dict[str, Axes]] = {}  # only of tensors that differ from the layout
        self._plain: dict[Shape, Splits] = {}  # by the layout alone, and legal
        self._stored: dict[Variable, Splits] = {}
        for operation in operations:
            self._place(operation)

    def base(self, shape: Shape) -> Splits:
        """Splits by the computation layout alone."""
        return tuple(self.layout.axes(d.name) for d in shape)

    def stored(self, variable: Variable) -> Splits:
        """How a variable is kept between steps."""
        if variable not in self._stored:
            rules = self._storage_rules(variable)
            first, _ = rules.pop(FIRST, ((), False))
            splits = self._along_first(variable, self._with_rules(variable.shape, rules), first)
            self._check(variable.shape, splits, str(variable.source))
            self._stored[variable] = splits
        return self._stored[variable]

    def _along_first(self, variable: Variable, splits: Splits, axes: Axes) -> Splits:
        """``splits``, with the first dimension split over those of ``axes`` that no dimension uses, where that pays."""
        used = [a for s in splits for a in s]
        free = tuple(a for a in axes if a not in used and self.mesh.axis_size(a) > 1)
        if not free or not splits:
            return splits
        elements = math.prod(-(-d.size // self.mesh.count(s)) for d, s in zip(variable.shape, splits, strict=True))
        if elements * ITEM_BYTES[variable.dtype] < SMALLEST_BYTES:
            return splits
        first = (*splits[0], *free)
        size = variable.shape[0].size
        fits = self.mesh.count(first) <= size and nests(self.mesh, size, splits[0], free)
        return (first, *splits[1:]) if fits else splits

    def _storage_rules(self, variable: Variable) -> dict[str, tuple[Axes, bool]]:
        """Dimension -> (axes, whether the rule may be skipped), for a variable."""
        if variable.like is not None:
            like = variable.like
            same = zip(like.shape.names, self.stored(like), strict=True)
            rules = {n: (s, False) for n, s in same}
            own = variable.storage or Layout()
        else:
            rules, own = {}, self.storage if variable.storage is None else variable.storage
            own.check(self.mesh)
        return rules | {r.dim: (r.axes, r.optional) for r in own}

    def _with_rules(self, shape: Shape, rules: Mapping[str, tuple[Axes, bool]]) -> Splits:
        """Splits by the computation layout and these rules: dim -> (axes, whether it gives way to others)."""
        splits = dict(zip(shape.names, self.base(shape), strict=True))
        for dim, (axes, optional) in rules.items():
            if dim in splits and not (optional and _repeated({**splits, dim: axes}.values()) is not None):
                splits[dim] = axes
        return tuple(splits.values())

    def _place(self, operation: Operation) -> None:
        for t in operation.outputs:
            wanted = self._wanted(operation, t.index)
            if not wanted and t.shape in self._plain:
                self.splits[t] = self._plain[t.shape]
                continue
            optional = not isinstance(operation, (Constrain, AsStored, ReadStored))
            splits = self._with_rules(t.shape, {dim: (axes, optional) for dim, axes in wanted.items()})
            name = t.source.name if t.variable is None else f"variable '{t.variable.name}'"
            self._check(t.shape, splits, str(t.source._replace(name=name)))
            self.splits[t] = splits
            if not wanted:
                self._plain[t.shape] = splits
            pairs = zip(t.shape.names, splits, strict=True)
            if own := {d: a for d, a in pairs if a != self.layout.axes(d)}:
                self._own[t] = own

    def _wanted(self, operation: Operation, index: int) -> dict[str, Axes]:
        """Dims of an output whose splits differ from the computation layout's, and how."""
        if not operation.follows:
            return {}
        wanted: dict[str, Axes] = {}
        for x in operation.followed(index):
            if x in self._own:
                wanted = {**self._own[x], **wanted}
        if isinstance(operation, (ReadStored, AsStored)):
            reads = isinstance(operation, ReadStored)
            v = operation.variable if reads else operation.follows_variable
            wanted = dict(zip(v.shape.names, self.stored(v), strict=True))
        if isinstance(operation, Constrain):
            operation.layout.check(self.mesh)
            wanted.update({r.dim: r.axes for r in operation.layout})
        return wanted

    def _check(self, shape: Shape, splits: Splits, where: str) -> None:
        axis = _repeated(splits)
        if axis is None:
            return
        dims = [d.name for d, s in zip(shape, splits, strict=True) for a in s if a == axis]
        error = LayoutError(
            f"tensor {shape} would be split twice over mesh axis '{axis}' (size"
            f" {self.mesh.axis_size(axis)}): by dimensions '{dims[0]}' and '{dims[1]}'.",
            "Send one of them to another axis or to none, or rename it with mm.rename() so that it"
            " is whole in this tensor.",
            where,
        )
        error.conflict = (tuple(dims), axis)
        raise error


def _with_aligned_dims(layout: Layout, graph: Graph) -> Layout:
    """``layout`` with rules for aligned dims (see `Graph.align`) that it does not mention."""
    known = {r.dim: r.axes for r in layout}
    for dim, other in graph.aligned.items():
        if dim not in known:
            others = dict.fromkeys(
                n
                for o in graph.operations
                for t in o.outputs
                if t.shape.find(dim) >= 0
                for n in t.shape.names
                if n != dim
            )
            used = [a for n in others for a in known.get(n, ())]
            # Its blocks nest in those of the other with as many of the first axes as no tensor uses for another dim.
            whole = known.get(other, ())
            free = next((n for n, a in enumerate(whole) if a in used), len(whole))
            known[dim] = whole[:free]
    if len(known) == len(layout.rules):
        return layout
    marked = {r.dim: r.dim + "?" * r.optional for r in layout}
    return Layout([(marked.get(dim, f"{dim}?"), axes) for dim, axes in known.items()])


def _repeated(splits: Iterable[Axes]) -> str | None:
    """The first mesh axis that occurs twice."""
    seen: list[str] = []
    for axes in splits:
        for a in axes:
            if a in seen:
                return a
            seen.append(a)
    return None
