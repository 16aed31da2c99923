"""A compiled step: takes feeds, returns fetches, keeps variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshmpi.compiler.cost import Cost, program_cost
from meshmpi.compiler.passes.memory import MemoryPlan, plan_memory
from meshmpi.dims import Layout
from meshmpi.errors import FeedError, MeshError, MissingNameError, ProgramError, suggest
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import shown
from meshmpi.ir.kinds import Write
from meshmpi.ir.program import LocalType, Program, VariableType
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.arrays import LocalBlock, ShardedArray, block_of
from meshmpi.runtime.executor import Executor, instruction_workspace
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.replicas import Replicas
from meshmpi.runtime.variables import VariableStore
from meshmpi.values import conversion, unfit


def memory_plan(program: Program) -> MemoryPlan:
    """Where every value of the rank with the largest blocks lives; allocates nothing."""
    return plan_memory(program, dict.fromkeys(program.mesh.names, 0), instruction_workspace)


def predict_cost(program: Program, rank: int | None = None) -> Cost:
    """Cost of a rank, or the most that any has; allocates nothing."""
    at = None if rank is None else program.mesh.coordinates(rank)
    return program_cost(program, memory_plan(program), at)


class Fetched(dict[Tensor, Any]):
    """Results of a step by fetched tensor; the name of a fetch works as a key too.

    Args:
        names: Name of a fetch -> its tensor.
        results: Tensor -> value.
    """

    def __init__(self, names: Mapping[str, Tensor], results: Mapping[Tensor, Any]):
        super().__init__(results)
        self._names = names

    def __missing__(self, key: object) -> Any:
        if isinstance(key, str) and key in self._names:
            return self[self._names[key]]
        near = suggest(key, self._names) if isinstance(key, str) else "Give a fetched tensor or its name."
        raise KeyError(f"{key!r} was not fetched; fetched: {', '.join(self._names)}. {near}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions
            raise AttributeError(f"'Fetched' object has no attribute '{name}'")
        near = f"Write result['{name}']." if name in self._names else suggest(name, self._names)
        raise MissingNameError(f"results have no attribute '{name}': they are a dict by tensor or name.", near)


class CompiledStep:
    """A program bound to a mesh.  Call it with feeds; see `mm.compile`.

    Attributes:
        program: The SPMD program.
        cost: Predicted FLOP, bytes sent and memory: of each the most that any rank has.
        variables: Name -> whole array (collective); shared with other steps when asked for.
        fetches: Name -> tensor that a call returns.
        mesh: The mesh.
        step_number: How many steps have run; random numbers depend on it.  Settable (resume).
        layouts: The computation layout and, where one was given, the storage layout.
    """

    layouts: tuple[Layout, Layout | None] = (Layout(), None)

    def __init__(
        self,
        program: Program,
        mesh: AnyMesh,
        fetches: Mapping[str, Tensor],
        variables: VariableStore | None,
        kernels: str = "auto",
        atomic: bool = False,
    ):
        self.program, self.mesh = program, mesh
        simulated = mesh.simulated
        if not simulated:
            compare_programs(mesh, program)
        ranks = list(range(mesh.shape.size)) if simulated else [mesh.rank]
        self.variables = variables if variables is not None else VariableStore(mesh, ranks)
        for variable in program.variables.values():
            self.variables.add(variable, program.seed, native=kernels != "numpy")
        self._executor = Executor(program, mesh, self.variables, kernels, atomic)
        self.fetches = dict(fetches)
        self._debug = mesh.checks
        self._compares = not simulated and mesh.shape.size > 1
        self.cost = program_cost(program, self._executor.plan)
        if any(isinstance(i.attrs, Write) for i in program.instructions):
            self.variables.changed_by(self)

    def __repr__(self) -> str:
        feeds = ", ".join(f"{n} {t}" for n, t in self.program.feeds.items())
        return (
            f"<CompiledStep of {len(self.program.instructions)} instructions on mesh"
            f" {self.mesh.shape}; feeds: {feeds or 'none'}; fetches:"
            f" {', '.join(self.fetches) or 'none'}; variables:"
            f" {', '.join(self.program.variables) or 'none'}>"
        )

    @property
    def step_number(self) -> int:
        return self._executor.runtime.step

    @step_number.setter
    def step_number(self, n: int) -> None:
        self._executor.runtime.step = n

    def cost_of(self, rank: int) -> Cost:
        """Predicted FLOP, bytes sent and memory of one rank."""
        at = self.mesh.shape.coordinates(rank)
        return program_cost(self.program, self._executor.plan, at)

    @property
    def comm_seconds(self) -> float:
        """Seconds spent in collectives so far."""
        return self._executor.comm_seconds

    @property
    def held_bytes(self) -> int:
        """Bytes allocated for the (largest) rank here; `cost.peak_memory` predicts them."""
        return sum(self.held_memory.values())

    @property
    def held_memory(self) -> dict[str, int]:
        """Kind of memory -> bytes allocated for the (largest) rank; `cost.memory` predicts it."""
        return max((s.held_memory for s in self._executor.states), key=lambda m: sum(m.values()))

    @property
    def counted_flops(self) -> dict[str, int]:
        """Kind of instruction -> FLOP accounted to the (first) rank of this process so far.

        They follow from the shapes of the arrays that the kernels work on, those of loops and
        convolutions from the program; their sum is ``step.cost_of(rank).flops`` times the number of
        runs.
        """
        return {kind: n * self._executor.runs for kind, n in self._executor.states[0].flops_by_kind().items()}

    def __call__(self, feeds: Any = None, *more: Any, **named: Any) -> Fetched:
        """Runs one step.

        Args:
            feeds: Placeholder name (or its tensor) -> array of the global shape, or
                `mm.local(block)`; where there is one placeholder, its array will do.
            **named: The same as keyword arguments.

        Returns:
            Fetched tensor -> Python float (scalars) or ShardedArray.

        Raises:
            FeedError: A feed is missing, unknown, misshapen or of the wrong data type; or ranks
                that hold the same block of it were given different values (compared in the first
                call, and in debug mode in every call).
        """
        if self.mesh.freed:
            raise MeshError(
                f"this step was compiled for mesh {self.mesh.shape}, which was freed.",
                "Make a new mm.Mesh() and compile for it.",
            )
        feeds = (feeds, *more) if more else feeds  # arrays in the order of the placeholders: refused
        by_name = self._by_name(feeds) if feeds is not None else {}
        if twice := by_name.keys() & named.keys():
            raise FeedError(f"feed '{min(twice)}' is given twice.", "Give it in the mapping or by name.")
        self._feed({**by_name, **named})
        if self._compares:
            self._compare_feeds()
            self._compares = self._debug
        self._executor.run()
        return self._fetched()

    def finish(self) -> Fetched:
        """Ends a step in which another rank was lost, see `Executor.finish`.  Not collective."""
        self._executor.finish()
        return self._fetched()

    def _fetched(self) -> Fetched:
        self._executor.runtime.step += 1
        results = {t: self._result(name) for name, t in self.fetches.items()}
        return Fetched(self.fetches, results)

    @property
    def executor(self) -> Executor:
        """What runs the program: for measurements."""
        return self._executor

    def feed_block(self, name: str) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each dimension of the block of a feed that this rank holds."""
        self._known_feed(name)
        coordinates = self._executor.states[0].coordinates
        return self.program.feeds[name].block(self.mesh.shape, coordinates)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Writes variables: name -> array of the global shape, or `mm.local(block)`."""
        self.variables.assign(values)

    def _by_name(self, feeds: Any) -> dict[str, Any]:
        """Feeds as they were given in one argument."""
        if isinstance(feeds, Mapping):
            return {n.name if isinstance(n, Tensor) else n: a for n, a in feeds.items()}
        names = list(self.program.feeds)
        if len(names) == 1:
            return {names[0]: feeds}
        raise FeedError(
            f"step: the feeds are {shown(feeds)}, and this program has the placeholders"
            f" {', '.join(names) or '(none)'}.",
            f"Feed by name: step({', '.join(f'{n}=...' for n in names)}).",
        )

    def _known_feed(self, name: str) -> None:
        if name not in self.program.feeds:
            raise FeedError(
                f"there is no placeholder {name!r} in this program, which has only the placeholders"
                " that its fetches and updates need.",
                suggest(str(name), self.program.feeds),
            )

    def _feed(self, feeds: Mapping[str, Any]) -> None:
        for name in feeds:
            self._known_feed(name)
        arrays: dict[str, tuple[np.ndarray, bool]] = {}
        for name, t in self.program.feeds.items():
            if name not in feeds:
                raise FeedError(
                    f"placeholder '{name}' {t.dtype}{t.shape} is not fed.",
                    f"Call step({', '.join(f'{n}=...' for n in self.program.feeds)}).",
                )
            arrays[name] = self._checked(name, t, feeds[name])
        for name, (array, whole) in arrays.items():
            t = self.program.feeds[name]
            for s in self._executor.states:
                part = block_of(array, t, self.mesh.shape, s.coordinates) if whole else array
                np.copyto(s.feeds[name], part, casting="unsafe")

    def _compare_feeds(self) -> None:
        """Raises FeedError, the same on all ranks, where two of them feed one block differently."""
        (state,) = self._executor.states
        fed = VariableStore(self.mesh, [state.rank])
        fed.types = {name: VariableType(name, t, None) for name, t in self.program.feeds.items()}
        fed.blocks = {name: {state.rank: block} for name, block in state.feeds.items()}
        found = Replicas(fed).differences()
        if found:
            raise FeedError(
                f"ranks feed different values: {found[0].where('feed')}. Their results would diverge.",
                "Feed the same array on every rank: seed random numbers alike, or read on one rank"
                " and broadcast; a layout that splits it lets each rank feed its own"
                " mm.local(block).",
            )

    def _checked(self, name: str, t: LocalType, value: Any) -> tuple[np.ndarray, bool]:
        """The array of a feed, and whether it is the global one."""
        whole, states = not isinstance(value, LocalBlock), self._executor.states
        remedy = (
            f"Give the whole array of shape {t.shape.sizes} on every rank, or under MPI the block"
            " of step.feed_block(name) as mm.local(block)."
        )
        if isinstance(value, Tensor):
            raise FeedError(
                f"feed '{name}' is a tensor of the graph, {value!r}, which has no value.",
                "Feed a NumPy array; what depends on other tensors is built into the graph.",
            )
        try:
            array = np.asarray(value if whole else value.block)
        except (ValueError, TypeError, RuntimeError) as e:  # rows of different lengths; tensors of others
            raise FeedError(f"feed '{name}' is not an array: {str(e).rstrip('.')}.", remedy) from None
        if not array.ndim and array.dtype.kind in "OUS":
            raise FeedError(f"feed '{name}' is {shown(value)}, which is not an array.", remedy)
        if not whole and len(states) > 1:
            raise FeedError(
                f"feed '{name}' is one rank's block, of shape {array.shape}, but this process plays"
                f" all {len(states)} ranks: {t}.",
                remedy,
            )
        expected = t.shape.sizes if whole else states[0].feeds[name].shape
        if array.shape != expected:
            raise FeedError(
                f"feed '{name}' has shape {array.shape}, but"
                f" {'the placeholder' if whole else 'this block'} has {expected}: {t}.",
                remedy,
            )
        if why := unfit(array, t.dtype):
            raise FeedError(f"feed '{name}' has {why}, the placeholder has {t.dtype}.", conversion(t.dtype))
        return array, whole

    def _result(self, name: str) -> Any:
        v = self.program.fetches[name]
        t = self.program.types[v]
        if not t.shape:
            return self._executor.states[0].arrays[v].item()
        blocks = {s.rank: s.arrays[v].copy() for s in self._executor.states}
        return ShardedArray(self.mesh, t, blocks)


def compare_programs(mesh: AnyMesh, program: Program) -> None:
    """Raises the same ProgramError on every rank when the ranks lowered different programs."""
    digests = gathered(mesh, program.digest(), "compile")
    if len(dict.fromkeys(digests)) == 1:
        return
    texts = gathered(mesh, program.text().splitlines(), "compile")
    other = next(r for r, d in enumerate(digests) if d != digests[0])
    line, a, b = _first_difference(texts[0], texts[other])
    groups: dict[str, list[int]] = {}
    for r, d in enumerate(digests):
        groups.setdefault(d, []).append(r)
    summary = ", ".join(f"{d[:8]} on ranks {_ranges(ranks)}" for d, ranks in groups.items())
    raise ProgramError(
        f"ranks lowered different programs: digest {summary}; first difference at line {line}:"
        f"\n  rank 0: {a}\n  rank {other}: {b}\n",
        "The graph must be built identically on every rank; look for code that depends on rank,"
        " time, set order or an unseeded random number.",
    )


def _first_difference(a: Sequence[str], b: Sequence[str]) -> tuple[int, str, str]:
    for n in range(max(len(a), len(b))):
        x, y = (a[n] if n < len(a) else "(end)"), (b[n] if n < len(b) else "(end)")
        if x != y:
            return n, x, y
    return 0, "", ""


def _ranges(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},...,{ranks[-1]}"
