"""compile() and plan(): from a graph to a step that runs, or to its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshmpi.amounts import bytes_of
from meshmpi.compiler.lowering import lower
from meshmpi.dims import Axes, Layout, LayoutLike, MeshShape, MeshShapeLike
from meshmpi.errors import ConfigError, LayoutError, MeshError, ShapeError, UnusedUpdatesWarning, suggest, warn_user
from meshmpi.graph import MOST_NAMED, Graph, Tensor, Update
from meshmpi.graph.arguments import checked
from meshmpi.graph.fetches import named_fetches
from meshmpi.ir.program import Program
from meshmpi.ir.verify import Proven
from meshmpi.runtime.mesh_protocol import AnyMesh

if TYPE_CHECKING:
    from meshmpi.compiler.cost import Cost
    from meshmpi.runtime.compiled import CompiledStep
    from meshmpi.runtime.variables import VariableStore


def lowered(
    graph: Graph,
    mesh: MeshShape,
    layout: LayoutLike,
    fetches: Mapping[str, Tensor],
    updates: Sequence[Update],
    storage: LayoutLike,
    seed: int = 0,
    optimize: bool = True,
    overlap: bool = False,
    memory_limit: int | str | None = None,
    atomic: bool = False,
    cures: bool = True,
    shared: Axes = (),
) -> Program:
    """The program of a step; with ``cures``, the error about an illegal layout proposes a legal one."""
    for u in updates:
        if u.value.graph is not graph:
            raise ShapeError(
                f"the update of variable '{u.variable.name}' belongs to another graph.",
                "Build model and optimizer in one graph.",
                str(u.value.source),
            )
    limit = None if memory_limit is None else bytes_of(memory_limit)
    rules, kept, proven = Layout(layout), None if storage is None else Layout(storage), Proven()
    try:
        program = lower(graph, mesh, rules, fetches, updates, kept, seed, proven, shared)
    except LayoutError as error:
        if not cures:
            raise
        from meshmpi.compiler.lowering.cures import Rules, cured

        raise cured(error, graph, mesh, Rules(rules, kept or Layout()), fetches, updates) from None
    if not optimize and limit is not None:
        raise ConfigError("a memory_limit needs passes.", "Leave optimize at True.")
    from meshmpi.compiler.passes import pipeline

    passes = () if not optimize else pipeline.overlapping() if overlap else pipeline.PASSES
    if atomic:
        from meshmpi.compiler.passes.modes import write_last

        passes = (*passes, write_last)
    program = pipeline.optimize(program, passes, proven)
    if limit is None:
        return program
    from meshmpi.compiler.passes.rematerialise import fit_memory
    from meshmpi.runtime.compiled import predict_cost

    return fit_memory(program, limit, lambda p: predict_cost(p).peak_memory)


@checked
def compile(
    graph: Graph,
    mesh: AnyMesh,
    layout: LayoutLike = "",
    *,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] = (),
    updates: Sequence[Update] | None = None,
    storage: LayoutLike = None,
    optimize: bool = True,
    kernels: str = "auto",
    seed: int = 0,
    variables: VariableStore | None = None,
    debug: bool = False,
    overlap: bool | None = None,
    memory_limit: int | str | None = None,
    atomic: bool = False,
) -> CompiledStep:
    """Makes the SPMD program of one step, bound to a mesh and ready to be called.

    Args:
        graph: What to compute.
        mesh: `mm.Mesh` (this process is one of its ranks) or `mm.SimulatedMesh` (it plays them all).
        layout: Dimension -> mesh axes, as ``"batch:rows;heads:cols"``.
        fetches: Tensors that each call returns; with a mapping, under these names too.
        updates: Variable updates of a step, from `mm.assign` or an optimizer.  Default: none, with an
            `UnusedUpdatesWarning` if the graph has some; ``[]`` says that none are wanted.
        storage: Storage rules for variables without their own; ``"d_model:rows"`` is ZeRO-3.  Default: ranks
            that share memory hold a variable once, each its part of the first dimension; ``"*:"`` says that each
            holds it whole.
        optimize: False runs the program as lowered, the oracle of the passes.
        kernels: "numpy", "native" or "auto" (native where it can be had).
        seed: Seed of initial values and random numbers.
        variables: ``other_step.variables``, to share them with another program of this mesh.
        debug: Raises `RangeError` where an index of `mm.gather` or `mm.scatter_add` is outside its
            dimension (else it reads 0, or its update is dropped), and compares every collective before
            it is made (`mm.Mesh`).  One rank that asks for it is enough.
        overlap: Reductions travel while later instructions compute; default: if the mesh spans hosts.
        memory_limit: Bytes per rank, or ``"1.5 GB"``, for variables, feeds, arena and workspace.  Values
            are computed again until the step fits; no collective runs twice, no bit of a result changes.
        atomic: Variables change after the step's last collective and a barrier, so that all ranks that
            outlive another have those of the same step.  Gradients wait in memory for it.

    Returns:
        A `CompiledStep`; ``step(x=array)[loss]``.

    Raises:
        LayoutError, ShapeError: Before any communication, the same on every rank.
        ProgramError: The ranks built different graphs.
        ConfigError: The step does not fit ``memory_limit``, whatever is recomputed.
    """
    _check_target(graph, mesh, kernels, updates)
    named, news = named_fetches(graph, fetches), updates or ()
    overlap = mesh.hosts > 1 if overlap is None else overlap
    how = (storage, seed, optimize, overlap, memory_limit, atomic)
    program = lowered(graph, mesh.shape, layout, named, news, *how, shared=mesh.shared_axes())
    step = _bound(program, mesh, named, variables, kernels, debug, atomic)
    step.layouts = Layout(layout), None if storage is None else Layout(storage)
    return step


def _check_target(graph: Graph, mesh: AnyMesh, kernels: str, updates: Sequence[Update] | None) -> None:
    from meshmpi.runtime.executor import KERNELS

    if kernels not in KERNELS:
        raise ConfigError(f"there are no kernels '{kernels}'.", suggest(kernels, KERNELS))
    if not isinstance(getattr(mesh, "shape", None), MeshShape):
        raise MeshError(
            f"{mesh!r} is not a mesh.",
            "Give mm.Mesh(...) or mm.SimulatedMesh(...); mm.plan takes names and sizes alone.",
        )
    unused = graph.updates if updates is None and mesh.rank == 0 else ()
    if not unused:
        return
    names = ", ".join(f"'{u.variable.name}'" for u in unused[:MOST_NAMED])
    more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
    made = unused[0].value.source
    warn_user(
        f"mm.compile() was given no updates=, but the graph has updates of {names}{more} (the first"
        f" made at {made.file}:{made.line}): this step changes no variable. Give updates= what"
        " minimize(), apply_gradients() or mm.assign() returned, or updates=[] for a step that only"
        " evaluates.",
        UnusedUpdatesWarning,
    )


def _bound(
    program: Program,
    mesh: AnyMesh,
    fetches: Mapping[str, Tensor],
    variables: VariableStore | None,
    kernels: str,
    debug: bool,
    atomic: bool,
) -> CompiledStep:
    from meshmpi.runtime.agreement import any_of
    from meshmpi.runtime.compiled import CompiledStep

    debug = any_of(mesh, debug, "debug")
    if debug:
        from meshmpi.compiler.passes.modes import check_calls

        program = check_calls(program)
    with mesh.checking(debug):
        return CompiledStep(program, mesh, fetches, variables, kernels, atomic)


@dataclass(frozen=True)
class Plan:
    """A program and its predicted cost per rank, for a mesh that need not exist."""

    program: Program
    cost: Cost

    def cost_of(self, rank: int) -> Cost:
        """The predicted cost of one rank; ``cost`` has of each figure the most that any has."""
        from meshmpi.runtime.compiled import predict_cost

        return predict_cost(self.program, rank)

    def __str__(self) -> str:
        return f"{self.program}\n{self.cost}"

    def __repr__(self) -> str:
        return (
            f"<Plan of {len(self.program.instructions)} instructions on mesh {self.program.mesh};"
            f" per rank {self.cost.flops} FLOP, {self.cost.bytes_sent} bytes sent,"
            f" {self.cost.peak_memory} bytes held>"
        )


@checked
def plan(
    graph: Graph,
    mesh_shape: MeshShapeLike,
    layout: LayoutLike = "",
    *,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    updates: Sequence[Update] | None = None,
    storage: LayoutLike = None,
    optimize: bool = True,
    seed: int = 0,
    overlap: bool = False,
    memory_limit: int | str | None = None,
    shared: str | Sequence[str] = (),
) -> Plan:
    """Program and cost of a step on a mesh of any size, without allocating a tensor.

    Args:
        graph: What to compute.
        mesh_shape: ``"rows:16;cols:32"``.
        layout, storage, optimize, seed, overlap, memory_limit: As for `mm.compile`.
        fetches: Default: every tensor that no operation uses; in a training step without the gradients
            that nothing uses, mostly those of placeholders.  Name them to have them.
        updates: Default: every update registered with the graph.
        shared: Mesh axes along which ranks share a host, and hold variables once.

    Returns:
        A `Plan`; ``print(plan.program)``, ``plan.cost.bytes_sent``.

    Raises:
        LayoutError, ShapeError, MeshError: As `mm.compile`.
    """
    from meshmpi.runtime.compiled import predict_cost

    named, news = named_fetches(graph, fetches), graph.updates if updates is None else updates
    how = (storage, seed, optimize, overlap, memory_limit)
    mesh = MeshShape(mesh_shape)
    axes = mesh.in_mesh_order((shared,) if isinstance(shared, str) else shared)
    program = lowered(graph, mesh, layout, named, news, *how, shared=axes)
    return Plan(program, predict_cost(program))
