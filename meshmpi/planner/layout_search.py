"""`search_layouts()`: the digest of a graph for the search, and the price of a layout."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from meshmpi.amounts import amount, bytes_of
from meshmpi.api import lowered
from meshmpi.dims import MeshShape, Shape
from meshmpi.errors import MeshmpiError
from meshmpi.graph import Graph, Operation, Tensor, Update
from meshmpi.graph.arguments import checked
from meshmpi.graph.fetches import named_fetches, needed_operations
from meshmpi.graph.ops.contraction import Einsum
from meshmpi.graph.ops.indexing import Gather, ScatterAdd
from meshmpi.graph.ops.structure import Reshape
from meshmpi.ir.scalar import ITEM_BYTES
from meshmpi.planner.bounded_search import Looked, Price, Priced, Rejected, SearchResult, search
from meshmpi.planner.candidates import Candidate, Names, Renaming, Sum, Work
from meshmpi.planner.machine import Machine
from meshmpi.planner.machine_file import load_machine
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.compiled import predict_cost


def digest(graph: Graph, fetches: Sequence[Tensor], updates: Sequence[Update]) -> Work:
    """What a step does, by dims; see `planner.candidates.Work`."""
    shapes, tensors, variables = list[Shape](), Counter[Names](), Counter[Names]()
    sums, renamings = Counter[Sum](), Counter[Renaming]()
    operations = needed_operations(graph, [*fetches, *(u.value for u in updates)])
    for operation in operations:
        for t in operation.outputs:
            shapes.append(t.shape)
            tensors[t.shape.names] += ITEM_BYTES[t.dtype]
        if (s := _sum(operation)) is not None:
            sums[s] += 1
        if isinstance(operation, Reshape):
            x, y = operation.inputs[0], operation.outputs[0]
            renamings[Renaming(x.shape.names, y.shape.names, ITEM_BYTES[x.dtype])] += 1
    for v in graph.variables.values():  # those that nothing uses, too
        shapes.append(v.shape)
        variables[v.shape.names] += ITEM_BYTES[v.dtype]
    sizes: dict[str, int] = {}
    for d in itertools.chain.from_iterable(shapes):
        sizes[d.name] = max(sizes.get(d.name, 0), d.size)
    return Work(sizes, tensors, variables, sums, renamings, len(operations))


def _sum(operation: Operation) -> Sum | None:
    """The sum that an operation is, over dims that its result lacks."""
    if not isinstance(operation, (Einsum, Gather, ScatterAdd)):
        return None
    out, inputs = operation.outputs[0], tuple(x.shape.names for x in operation.inputs)
    return Sum(inputs, out.shape.names, 2 if isinstance(operation, Einsum) else 0, ITEM_BYTES[out.dtype])


Step = tuple[Graph, Sequence[Tensor], Sequence[Update]]
"""What is computed, fetched and updated."""


def pricing(step: Step | Callable[[str], Step], machine: Machine, memory_limit: int = 0) -> Price:
    """The function that prices layouts of a step, as `search` takes it.

    Args:
        step: The step; or a function that makes it with another storage of the optimizer's slots,
            for a search of that too.
        machine, memory_limit: What runs it; bytes per rank, 0: none.
    """
    made: Callable[[str], Step] = functools.cache(step) if callable(step) else lambda _, step=step: step

    def price(c: Candidate) -> Priced | Rejected:
        _, layout, storage, slots = c.texts
        try:
            graph, fetches, updates = made(slots)
            program = lowered(graph, c.mesh, layout, named_fetches(graph, fetches), updates, storage, cures=False)
            cost = predict_cost(program)
        except MeshmpiError as error:
            return Rejected(*c.texts, str(error).split("\n", 1)[0])
        memory = cost.peak_memory
        if memory_limit and memory > memory_limit:
            why = f"{amount(memory, 'B')} per rank, the limit is {amount(memory_limit, 'B')}"
            return Rejected(*c.texts, why, memory)
        return Priced(*c.texts, predict_time(program, machine).seconds, memory, cost.bytes_sent)

    return price


@checked
def search_layouts(
    graph: Graph,
    ranks: int,
    machine: Machine | str = "tpuv2",
    *,
    fetches: Sequence[Tensor] = (),
    updates: Sequence[Update] = (),
    memory_limit: int | str | None = None,
    seconds: float = 30.0,
    most_axes: int = 2,
    mesh: str | MeshShape | None = None,
) -> SearchResult:
    """The fastest layout of a graph, by predicted time, over meshes, layouts and storage.

    Args:
        graph: What is computed.
        ranks: Number of ranks; not needed with ``mesh``.
        machine: A `Machine`, the file of one that `meshmpi calibrate` wrote, or "tpuv2".
        fetches: As `mm.compile`.
        updates: As `mm.compile`.
        memory_limit: Bytes per rank, or as ``"1.5 GB"``; default: what the machine says, if it
            says.
        seconds: How much is tried, as the processor time that it takes about; the answer is the same on a faster,
            slower or busy machine.  Plain data parallelism is priced whatever it takes.
        most_axes: Maximum number of axes of the meshes that are tried.
        mesh: To try this mesh only.

    Returns:
        A `SearchResult`: ``result.best.layout``, ``print(result.report())``.

    Raises:
        ConfigError: The machine is not known; no time, or no axis.

    Example:
        >>> with mm.Graph() as graph:
        ...     x = mm.placeholder("x", "batch:4096;io:8")
        ...     w = mm.get_variable("w", "io:8;hidden:8")
        ...     loss = mm.reduce_mean(mm.einsum([x, w], "batch:4096;hidden:8"))
        >>> mm.search_layouts(graph, 4, fetches=[loss]).best.layout
        'batch:rows'
    """
    known = load_machine(machine) if isinstance(machine, str) else machine
    meshes = [] if mesh is None else [MeshShape(mesh)]
    step = graph, fetches, updates or graph.updates
    return search_step(step, ranks, known, memory_limit, seconds, most_axes, meshes)


def search_step(
    step: Step,
    ranks: int,
    machine: Machine,
    memory_limit: int | str | None = None,
    seconds: float = 30.0,
    most_axes: int = 2,
    meshes: Sequence[MeshShape] = (),
    looked: Looked | None = None,
) -> SearchResult:
    """As `search_layouts`; ``looked`` hears how far it is."""
    limit = machine.memory_bytes if memory_limit is None else bytes_of(memory_limit)
    price, work = pricing(step, machine, limit), digest(*step)
    limits: dict[str, Any] = {"seconds": seconds, "most_axes": most_axes, "memory_limit": limit}
    return search(work, ranks, machine, price, **limits, meshes=meshes, looked=looked)
