"""compile() and plan(): from a graph to something that runs, or to what it would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshmpi.amounts import bytes_of
from meshmpi.compiler.lowering import cured, lower
from meshmpi.dims import Layout, LayoutLike, MeshShape, MeshShapeLike
from meshmpi.errors import ConfigError, LayoutError, MeshError, ShapeError, UnusedUpdatesWarning, suggest, warn_user
from meshmpi.graph import MOST_NAMED, Graph, Tensor, Update
from meshmpi.graph.arguments import checked
from meshmpi.graph.fetches import named_fetches
from meshmpi.ir.program import Program
from meshmpi.runtime.mesh_protocol import AnyMesh

if TYPE_CHECKING:
    from meshmpi.compiler.cost import Cost
    from meshmpi.runtime.compiled import CompiledStep
    from meshmpi.runtime.variables import VariableStore


def _checked_updates(graph: Graph, updates: Sequence[Update]) -> list[Update]:
    for u in updates:
        if u.value.graph is not graph:
            raise ShapeError(
                f"the update of variable '{u.variable.name}' belongs to another graph.",
                "Build model and optimizer in one graph.",
                str(u.value.source),
            )
    return list(updates)


def _lowered(
    graph: Graph,
    mesh: MeshShape,
    layout: LayoutLike,
    fetches: Mapping[str, Tensor],
    updates: Sequence[Update],
    storage: LayoutLike,
    optimize: bool,
    seed: int,
    overlap: bool = False,
    memory_limit: int | str | None = None,
    cures: bool = True,
    atomic: bool = False,
) -> Program:
    """The program of a step; of an illegal layout the error, with ``cures`` a legal one in it."""
    limit = None if memory_limit is None else bytes_of(memory_limit)
    rules, kept = Layout(layout), Layout(storage)
    try:
        program = lower(graph, mesh, rules, fetches, updates, kept, seed)
    except LayoutError as error:
        if not cures:
            raise
        raise cured(error, graph, mesh, rules, fetches, updates, kept) from None
    if not optimize and limit is not None:
        raise ConfigError("a memory_limit needs passes.", "Leave optimize at True.")
    from meshmpi.compiler.passes.modes import write_last
    from meshmpi.compiler.passes.pipeline import PASSES, overlapping
    from meshmpi.compiler.passes.pipeline import optimize as run_passes

    passes = () if not optimize else overlapping() if overlap else PASSES
    program = run_passes(program, (*passes, write_last) if atomic else passes)
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
    """The SPMD program of one step, bound to a mesh and ready to be called.

    Args:
        graph: What to compute.
        mesh: `mm.Mesh` (this process is one rank of it) or `mm.SimulatedMesh` (it plays all).
        layout: Dimension -> mesh axes, as ``"batch:rows;heads:cols"``.
        fetches: Tensors whose values each call returns; with a mapping, under these names too.
        updates: Variable updates that each call makes, from `mm.assign` or an optimizer.  Without
            it no variable changes, and an `UnusedUpdatesWarning` names the updates of the graph, if
            there are any; ``updates=[]`` says that none are wanted, as for an evaluation.
        storage: Storage rules for variables without rules of their own; ``"d_model:rows"`` is
            ZeRO-3.
        optimize: False runs the program as lowered, the oracle of the passes.
        kernels: "numpy", "native" or "auto" (native where it can be had).
        seed: Of initial values and of all random numbers.
        variables: ``other_step.variables``, to share them with another program of the same mesh.
        debug: Check every index of `mm.gather` and `mm.scatter_add` at every step: one outside its
            dimension raises `RangeError` on the rank that holds it, with tensor, value and
            position, and the job ends.  Without it such an index reads zeros, or its update is
            dropped.  Ranks also compare every collective before they do it (`mm.Mesh`).  One rank
            that asks for it is enough.
        overlap: Whether reductions travel while later instructions compute.  Default: where the
            mesh spans several hosts; inside one, copying takes the cores that compute.
        memory_limit: Bytes per rank, or as ``"1.5 GB"``, for variables, feeds, arena and workspace.
            Values that wait in memory are computed again where they are used until the step fits;
            no collective runs twice, and results are the same to the last bit.
        atomic: Change variables after the step's last collective and a barrier, so that ranks which
            outlive another one all hold the variables of the same step.  Gradients wait in memory
            for it.

    Returns:
        A `CompiledStep`; ``step(x=array)[loss]``.

    Raises:
        LayoutError, ShapeError: Before any communication, the same on every rank.
        ProgramError: The ranks built different graphs.
        ConfigError: The step does not fit ``memory_limit``, whatever is recomputed.
    """
    from meshmpi.runtime.agreement import any_of
    from meshmpi.runtime.compiled import CompiledStep
    from meshmpi.runtime.executor import KERNELS

    if kernels not in KERNELS:
        raise ConfigError(f"there are no kernels '{kernels}'.", suggest(kernels, KERNELS))
    if not isinstance(getattr(mesh, "shape", None), MeshShape):
        raise MeshError(
            f"{mesh!r} is not a mesh.",
            "Give mm.Mesh(...) or mm.SimulatedMesh(...); mm.plan takes names and sizes alone.",
        )
    named, chosen = named_fetches(graph, fetches), _checked_updates(graph, updates or ())
    if updates is None and graph.updates and mesh.rank == 0:
        _warn_of_unused(graph.updates)
    background = mesh.hosts > 1 if overlap is None else overlap
    program = _lowered(
        graph, mesh.shape, layout, named, chosen, storage, optimize, seed, background, memory_limit, atomic=atomic
    )
    debug = any_of(mesh, debug, "debug")
    if debug:
        from meshmpi.compiler.passes.modes import check_indices

        program = check_indices(program)
    with mesh.checking(debug):
        return CompiledStep(program, mesh, named, variables, kernels, atomic)


def _warn_of_unused(updates: Sequence[Update]) -> None:
    """Warns that a program leaves out all updates of its graph."""
    names = ", ".join(f"'{u.variable.name}'" for u in updates[:MOST_NAMED])
    more = f" and {len(updates) - MOST_NAMED} more" if len(updates) > MOST_NAMED else ""
    made = updates[0].value.source
    warn_user(
        f"mm.compile() was given no updates=, but the graph has updates of {names}{more} (the first"
        f" made at {made.file}:{made.line}): this step changes no variable. Give updates= what"
        " minimize(), apply_gradients() or mm.assign() returned, or updates=[] for a step that only"
        " evaluates.",
        UnusedUpdatesWarning,
    )


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
) -> Plan:
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
    return planned(
        graph,
        MeshShape(mesh_shape),
        layout,
        fetches,
        graph.updates if updates is None else updates,
        storage,
        optimize,
        seed,
        overlap,
        memory_limit,
    )


def planned(
    graph: Graph,
    mesh: MeshShape,
    layout: LayoutLike,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None,
    updates: Sequence[Update],
    storage: LayoutLike = None,
    optimize: bool = True,
    seed: int = 0,
    overlap: bool = False,
    memory_limit: int | str | None = None,
    cures: bool = True,
) -> Plan:
    """`plan` of what is fetched and updated; without ``cures`` an error proposes no layout."""
    from meshmpi.runtime.compiled import predict_cost

    chosen, named = _checked_updates(graph, updates), named_fetches(graph, fetches)
    program = _lowered(graph, mesh, layout, named, chosen, storage, optimize, seed, overlap, memory_limit, cures)
    return Plan(program, predict_cost(program))
