"""compile() and plan(): from a graph to something that runs, or to what it would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshmpi.dims import Layout, LayoutLike, MeshShape
from meshmpi.errors import ConfigError, MeshError, ShapeError, suggest
from meshmpi.graph import Graph, Operation, Tensor, Update
from meshmpi.lowering import lower
from meshmpi.program import Program

if TYPE_CHECKING:
    from meshmpi.planner.cost import Cost
    from meshmpi.runtime.compiled import CompiledStep
    from meshmpi.runtime.variables import VariableStore


KERNELS = ("auto", "native", "numpy")


def _named_fetches(
    graph: Graph, fetches: Sequence[Tensor] | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if isinstance(fetches, Tensor):
        raise ShapeError(f"fetches is one tensor, {fetches!r}.", "Write fetches=[tensor].")
    pairs = (
        list(fetches.items()) if isinstance(fetches, Mapping)
        else [(getattr(t, "name", ""), t) for t in fetches]
    )  # fmt: skip
    for name, t in pairs:
        if not isinstance(t, Tensor):
            raise ShapeError(f"fetch {t!r} is not a tensor.", "Give tensors of the graph.")
        if t.graph is not graph:
            raise ShapeError(
                f"fetch '{name}' {t.dtype}{t.shape} belongs to another graph than the one that is"
                " compiled.", "Compile its own: mm.compile(tensor.graph, ...).",
                str(t.source),
            )  # fmt: skip
    return dict(pairs)


def _checked_updates(graph: Graph, updates: Sequence[Update]) -> list[Update]:
    for u in updates:
        if not isinstance(u, Update):
            raise ShapeError(f"update {u!r} is none.", "Make it with mm.assign() or an optimizer.")
        if u.value.graph is not graph:
            raise ShapeError(
                f"the update of variable '{u.variable.name}' belongs to another graph.",
                "Build model and optimizer in one graph.", str(u.value.source),
            )  # fmt: skip
    return list(updates)


def _lowered(
    graph: Graph, mesh: MeshShape, layout: LayoutLike, fetches: Mapping[str, Tensor],
    updates: Sequence[Update], storage: LayoutLike, optimize: bool, seed: int,
    overlap: bool = False, memory_limit: int | str | None = None,
) -> Program:  # fmt: skip
    limit = None if memory_limit is None else bytes_of(memory_limit)
    program = lower(graph, mesh, Layout(layout), fetches, updates, Layout(storage), seed)
    if not optimize:
        if limit is not None:
            raise ConfigError("a memory_limit needs passes.", "Leave optimize at True.")
        return program
    from meshmpi.passes.pipeline import optimize as run_passes
    from meshmpi.passes.pipeline import overlapping

    program = run_passes(program, overlapping()) if overlap else run_passes(program)
    if limit is None:
        return program
    from meshmpi.passes.recompute import fit_memory
    from meshmpi.runtime.compiled import predict_cost

    return fit_memory(program, limit, lambda p: predict_cost(p).peak_memory)


def compile(
    graph: Graph, mesh: Any, layout: LayoutLike = "", *,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] = (),
    updates: Sequence[Update] = (), storage: LayoutLike = None, optimize: bool = True,
    kernels: str = "auto", seed: int = 0, variables: VariableStore | None = None,
    debug: bool = False,
    overlap: bool | None = None,
    memory_limit: int | str | None = None,
) -> CompiledStep:  # fmt: skip
    """The SPMD program of one step, bound to a mesh and ready to be called.

    Args:
        graph: What to compute.
        mesh: `mm.Mesh` (this process is one rank of it) or `mm.SimulatedMesh` (it plays all).
        layout: Dimension -> mesh axes, as ``"batch:rows;heads:cols"``.
        fetches: Tensors whose values each call returns; with a mapping, under these names too.
        updates: Variable updates that each call makes, from `mm.assign` or an optimizer.
        storage: Storage rules for variables without rules of their own; ``"d_model:rows"`` is
            ZeRO-3.
        optimize: False runs the program as lowered, the oracle of the passes.
        kernels: "numpy", "native" or "auto" (native where it can be had).
        seed: Of initial values and of all random numbers.
        variables: ``other_step.variables``, to share them with another program of the same mesh.
        debug: Check every index of `mm.gather` and `mm.scatter_add` at every step: one outside its
            dimension raises `RangeError` on the rank that holds it, with tensor, value and
            position, and the job ends.  Without it such an index reads zeros, or its update is
            dropped.  Ranks also compare every collective before they do it (`mm.Mesh`).
        overlap: Whether reductions travel while later instructions compute.  Default: where the
            mesh spans several hosts; inside one, copying takes the cores that compute.
        memory_limit: Bytes per rank, or as ``"1.5 GB"``, for variables, feeds, arena and workspace.
            Values that wait in memory are computed again where they are used until the step fits;
            no collective runs twice, and results are the same to the last bit.

    Returns:
        A `CompiledStep`; ``step(x=array)[loss]``.

    Raises:
        LayoutError, ShapeError: Before any communication, the same on every rank.
        ProgramError: The ranks built different graphs.
        ConfigError: The step does not fit ``memory_limit``, whatever is recomputed.
    """
    from meshmpi.runtime.compiled import CompiledStep
    from meshmpi.runtime.crosscheck import during

    if kernels not in KERNELS:
        raise ConfigError(f"there are no kernels '{kernels}'.", suggest(kernels, KERNELS))
    if not isinstance(getattr(mesh, "shape", None), MeshShape):
        raise MeshError(
            f"{mesh!r} is no mesh to run on.",
            "Give mm.Mesh(...) or mm.SimulatedMesh(...); mm.plan takes names and sizes alone.",
        )
    named, chosen = _named_fetches(graph, fetches), _checked_updates(graph, updates)
    background = bool(getattr(mesh, "hosts", 1) > 1) if overlap is None else overlap
    program = _lowered(
        graph, mesh.shape, layout, named, chosen, storage, optimize, seed, background, memory_limit
    )
    if debug:
        from meshmpi.passes.debug import check_indices

        program = check_indices(program)
    with during(mesh, debug):
        return CompiledStep(program, mesh, named, variables, kernels)


@dataclass(frozen=True)
class Plan:
    """A program and its predicted cost per rank, for a mesh that need not exist."""

    program: Program
    cost: Cost

    def __str__(self) -> str:
        return f"{self.program}\n{self.cost}"

    def __repr__(self) -> str:
        return (
            f"<Plan of {len(self.program.instructions)} instructions on mesh {self.program.mesh};"
            f" per rank {self.cost.flops} FLOP, {self.cost.bytes_sent} bytes sent,"
            f" {self.cost.peak_memory} bytes held>"
        )


def plan(
    graph: Graph, mesh_shape: str | MeshShape, layout: LayoutLike = "", *,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    updates: Sequence[Update] | None = None,
    storage: LayoutLike = None, optimize: bool = True, seed: int = 0, overlap: bool = False,
    memory_limit: int | str | None = None,
) -> Plan:  # fmt: skip
    """Program and cost of a step on a mesh of any size, without allocating a tensor.

    Args:
        graph: What to compute.
        mesh_shape: ``"rows:16;cols:32"``.
        layout, storage, optimize, seed, overlap, memory_limit: As for `mm.compile`.
        fetches: Default: every tensor that no operation uses.  Where an update of the graph is made
            of gradients, gradients that nothing uses are left out: those of placeholders, mostly,
            which differentiation makes on its way to the variables and no training step needs.
            Name them to have them.
        updates: Default: every update registered with the graph.

    Returns:
        A `Plan`; ``print(plan.program)``, ``plan.cost.bytes_sent``.

    Raises:
        LayoutError, ShapeError, MeshError: As `mm.compile`.
    """
    from meshmpi.runtime.compiled import predict_cost

    if fetches is None:
        fetches = _leaves(graph)
    chosen = _checked_updates(graph, graph.updates if updates is None else updates)
    named = _named_fetches(graph, fetches)
    program = _lowered(
        graph, MeshShape(mesh_shape), layout, named, chosen, storage, optimize, seed, overlap,
        memory_limit,
    )  # fmt: skip
    return Plan(program, predict_cost(program))


_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


def bytes_of(size: int | str) -> int:
    """Bytes as a number: ``"1.5 GB"`` (of 2**30) or the number itself."""
    given = size
    if isinstance(size, str):
        text = size.strip().upper()
        unit = next((u for u in sorted(_UNITS, key=len, reverse=True) if text.endswith(u)), "")
        try:
            size = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
        except (ValueError, OverflowError):
            size = 0
    if size <= 0:
        raise ConfigError(
            f"memory_limit {given!r} is no number of bytes.", "Write 2e9, '800 MB' or '1.5 GB'."
        )
    return int(size)


def _leaves(graph: Graph) -> list[Tensor]:
    """What a step gives without being asked: see ``fetches`` of `plan`."""
    used = {x for operation in graph.operations for x in operation.inputs}
    used.update(u.value for u in graph.updates)
    trains = _made_of_gradients(graph)
    return [
        t for operation in graph.operations for t in operation.outputs
        if t not in used and not (trains and _is_gradient(operation))
    ]  # fmt: skip


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
