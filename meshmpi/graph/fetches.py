"""Finds the operations that a step needs for its fetches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshmpi.errors import ShapeError
from meshmpi.graph.graph import Graph, Operation, Tensor


def needed_operations(graph: Graph, wanted: Iterable[Tensor]) -> list[Operation]:
    """The operations that ``wanted`` depend on, in graph order."""
    need = {t.operation for t in wanted}
    out: list[Operation] = []
    for operation in reversed(graph.operations):
        if operation in need:
            out.append(operation)
            need.update(x.operation for x in operation.inputs)
    return out[::-1]


def named_fetches(graph: Graph, fetches: Sequence[Tensor] | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Name -> tensor, by default as `mm.plan` says.

    Raises:
        ShapeError: A tensor belongs to another graph.
    """
    if fetches is None:
        fetches = _leaves(graph)
    pairs = fetches.items() if isinstance(fetches, Mapping) else [(t.name, t) for t in fetches]
    for name, t in pairs:
        if t.graph is not graph:
            raise ShapeError(
                f"fetch '{name}' {t.dtype}{t.shape} belongs to another graph than the one that is compiled.",
                "Compile its own: mm.compile(tensor.graph, ...).",
                str(t.source),
            )
    return dict(pairs)


def _leaves(graph: Graph) -> list[Tensor]:
    """The default fetches: see ``fetches`` of `mm.plan`."""
    used = {x for operation in graph.operations for x in operation.inputs}
    used.update(u.value for u in graph.updates)
    trains = _made_of_gradients(graph)
    return [
        t
        for operation in graph.operations
        for t in operation.outputs
        if t not in used and not (trains and _is_gradient(operation))
    ]


def _is_gradient(operation: Operation) -> bool:
    return " (gradient of " in operation.source.name  # as `Graph.gradient_of` has it written


def _made_of_gradients(graph: Graph) -> bool:
    """Whether an update takes its value from a gradient, directly or through other operations."""
    wanted = {u.value for u in graph.updates}
    for operation in reversed(graph.operations):
        if wanted.isdisjoint(operation.outputs):
            continue
        if _is_gradient(operation):
            return True
        wanted.update(operation.inputs)
    return False
