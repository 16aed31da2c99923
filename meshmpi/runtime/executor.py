"""Runs a program: one arena per rank, every instruction bound once, then a list of calls.

Under MPI this process runs one rank; on a simulated mesh it runs all of them, instruction by instruction.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from meshmpi.compiler.passes.memory import MemoryPlan, plan_memory, round_up
from meshmpi.dims import Axes, block_sizes
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import AllGather, AllReduce, AllToAll, ReduceScatter, Shift, Tiled, Wait, Write
from meshmpi.ir.kinds.regions import region_types
from meshmpi.ir.program import Alias, Instruction, LocalType, Program
from meshmpi.kernels import Runtime, bind, blas, product_choice, threads, workspace_bytes
from meshmpi.kernels.native import CompilerError, NativeKernels
from meshmpi.kernels.steps import run_all
from meshmpi.runtime import operands
from meshmpi.runtime.agreement import Flag, gathered
from meshmpi.runtime.arrays import numpy_dtype, view_of
from meshmpi.runtime.calls import described
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore, within

if TYPE_CHECKING:
    from meshmpi.runtime.trace import Tracer

Thunk = Callable[[], None]
KERNELS = ("auto", "native", "numpy")
"""Which kernels a step can be asked to run."""
NATIVE_POINTS = 2_000_000
"""`kernels='auto'` compiles C once a step evaluates at least this many elements.  Status: assumption; a build takes
about a second, NumPy some nanoseconds an element, and a program that is built runs many steps."""


def instruction_workspace(i: Instruction, program: Program, coordinates: Mapping[str, int]) -> int:
    """Scratch bytes of a local kernel or collective on the rank at ``coordinates``."""
    found = i.attrs.workspace(program, i, coordinates)
    return workspace_bytes(i, program, coordinates) if found is None else found


class RankState:
    """Memory and coordinates of one rank."""

    def __init__(self, program: Program, rank: int, store: VariableStore, plan: MemoryPlan):
        self._allocate = store.mesh.allocate
        self.rank, self.program, self.plan = rank, program, plan
        self.coordinates = program.mesh.coordinates(rank)
        self.arena = self._allocate(plan.arena_bytes)
        self.workspace = self._allocate(self._workspace_bytes())
        self.variables = {name: store.blocks[name][rank] for name in program.variables}
        self.wholes = {name: store.wholes[name][rank] for name, v in program.variables.items() if v.joined}
        self.feeds = {name: self._buffer(t) for name, t in program.feeds.items()}
        self.arrays: dict[int, np.ndarray] = {}
        joining = {i.outputs[0]: i for i in program.instructions if _joins(i)}
        for v in program.types:
            self.arrays[v] = self.joined(joining[v]) if v in joining and v in plan.shares else self._array(v)

    def _workspace_bytes(self) -> int:
        program, here = self.program, self.coordinates
        needed = (instruction_workspace(i, program, here) for i in program.instructions)
        return round_up(max(needed, default=0))

    def _buffer(self, t: LocalType) -> np.ndarray:
        sizes = t.local_sizes(self.program.mesh, self.coordinates)
        nbytes = int(np.prod(sizes, dtype=np.int64)) * numpy_dtype(t.dtype).itemsize
        return view_of(self._allocate(nbytes), 0, sizes, t.dtype)

    def _array(self, v: int) -> np.ndarray:
        t = self.program.types[v]
        sizes = t.local_sizes(self.program.mesh, self.coordinates)
        shared = self.plan.shares.get(v)
        if shared is None:
            return view_of(self.arena, self.plan.offsets[v], sizes, t.dtype)
        if isinstance(shared, int):
            base = self.arrays[shared]
        else:
            base = (self.variables if shared.of == "variable" else self.feeds)[shared.name]
        flat = base.view(numpy_dtype(t.dtype)).reshape(-1)
        return flat[: math.prod(sizes)].reshape(sizes)  # all, or of a slice the first

    def joined(self, i: Instruction) -> np.ndarray:
        """The result of an all_gather of joined blocks, where they lie."""
        variable = self.program.variables[cast(Alias, self.plan.root(i.inputs[0])).name]
        whole, t = self.wholes[variable.name], self.program.types[i.outputs[0]]
        return within(whole, t, variable.whole, self.program.mesh, self.coordinates)

    @property
    def held_memory(self) -> dict[str, int]:
        """Kind of memory -> bytes of its arrays, rounded up to cache lines as the plan does."""
        return {
            "variables": sum(round_up(b.nbytes) for b in self.variables.values()),
            "feeds": sum(round_up(b.nbytes) for b in self.feeds.values()),
            "arena": self.arena.nbytes,
            "workspace": self.workspace.nbytes,
        }

    def flops_by_kind(self) -> dict[str, int]:
        """Kind of instruction -> FLOP of one run, by the shapes of the arrays of its kernels."""
        inner = {v: t for i in self.program.instructions for v, t in i.inner_types().items()}

        def extents(v: int) -> dict[str, int]:
            if v in inner:  # lives in registers or scratch only
                sizes = inner[v].local_sizes(self.program.mesh, self.coordinates)
                return dict(zip(inner[v].shape.names, sizes, strict=True))
            return dict(zip(self.program.types[v].shape.names, self.arrays[v].shape, strict=True))

        table: dict[str, int] = {}
        for i in self.program.instructions:
            found = i.attrs.flops_at(self.program, i, self.coordinates)
            if found is not None:  # needs to know where blocks lie, not only their extents
                for kind, flops in found.items():
                    table[kind] = table.get(kind, 0) + flops
                continue
            for one in i.leaves():
                ins, outs = ([extents(v) for v in values] for values in (one.inputs, one.outputs))
                if flops := one.attrs.flops(ins, outs):
                    table[one.kind] = table.get(one.kind, 0) + flops
        return table


class Executor:
    """Runs a program on a mesh.

    Attributes:
        progress: How far the step got that is under way or has failed: "before" variables changed;
            "ready" to change them, as are all ranks if one did; "writing".
        native: The generated kernels, or None where NumPy does everything.
        plan: Of the memory of every rank.
        tracer: Runs the calls in place of `run` while it records, see `trace.Tracer`.
    """

    def __init__(
        self,
        program: Program,
        mesh: AnyMesh,
        store: VariableStore,
        kernels: str | NativeKernels = "auto",
        atomic: bool = False,
    ):
        self.program, self.mesh = program, mesh
        self.simulated = len(store.ranks) == mesh.shape.size and mesh.simulated
        self.runtime = Runtime(blas=self._agreed_blas(), threads=threads.available())
        # The rank at the origin holds the largest block of every value, so its plan fits all ranks.
        origin = dict.fromkeys(program.mesh.names, 0)
        self.plan = plan_memory(program, origin, instruction_workspace)
        self.states = [RankState(program, rank, store, self.plan) for rank in store.ranks]
        self._meet = partial(mesh.bind, planned=True)
        self.comm_seconds = 0.0
        self.runs = 0
        self.native = self.runtime.native = self._native_kernels(kernels)
        self._calls: list[Thunk] = []
        self._is_collective: list[bool] = []
        self._made_by: list[Instruction | None] = []
        self.tracer: Tracer | None = None
        self._running: dict[int, list] = {}
        self._digest = program.digest()[:8]
        self.progress, self._committed = "before", 0
        turns = _Turns(program, self.plan)
        for i in program.instructions:
            meets = i.traits.meets_ranks
            if turns.must_meet(i):
                self._add(self._all_arrive(i), True, i)
            if atomic and not self._committed and self._writes(i):
                self._add(self._commit(), True, None)
                self._committed = len(self._calls)
            with self._described(i):
                for thunk in self._bind(i):
                    self._add(thunk, meets, i)
            if self._running and not meets:
                self._add(self._advance(), True, None)
        if turns.read:
            self._add(self._all_arrive(program.instructions[-1]), True, None)

    def _all_arrive(self, i: Instruction) -> Thunk:
        """Waits until the ranks that share memory have come to instruction ``i``."""
        joined = {a for v in self.program.variables.values() for a in v.joined}
        axes, nothing = self.mesh.shape.in_mesh_order(joined), [0] * self.mesh.shape.count(joined)
        empty = [s.workspace[:0] for s in self.states]
        with self._described(i):
            return self._meet(*(operands.AllGather(x, x, 0, nothing, axes) for x in empty))

    def _add(self, call: Thunk, communicates: bool, i: Instruction | None) -> None:
        self._calls.append(call)
        self._is_collective.append(communicates)
        self._made_by.append(i)

    @property
    def calls(self) -> list[tuple[Thunk, Instruction | None]]:
        """What a step calls, in order, and the instruction that each call carries out.

        None where MPI is only polled, so that reductions in the background get on.
        """
        return list(zip(self._calls, self._made_by, strict=True))

    def _advance(self) -> Thunk:
        """Lets MPI work on the reductions that run in the background at this place."""
        mesh, running = self.mesh, list(self._running.values())

        def advance() -> None:
            for requests in running:
                mesh.advance(requests)

        return advance

    def _writes(self, i: Instruction) -> bool:
        if i.traits.free:
            return False
        roots = [self.plan.root(v) for v in i.outputs]
        return isinstance(i.attrs, Write) or any(isinstance(r, Alias) and r.of == "variable" for r in roots)

    def _commit(self) -> Thunk:
        """Waits for all ranks: whoever gets through knows that all others have come so far."""
        here = Flag(self.mesh)  # a Barrier of Open MPI 5 does not say that a rank was lost

        def commit() -> None:
            self.progress = "ready"
            here.agree(True)
            self.progress = "writing"

        return commit

    def finish(self) -> None:
        """Ends a step that failed when it was "ready".

        No other rank takes part: `meshmpi.compiler.passes.modes` lets no collective follow.
        """
        assert self.progress == "ready" and not any(self._is_collective[self._committed :])
        for call in self._calls[self._committed :]:
            call()
        self._done()

    def _done(self) -> None:
        self.progress = "before"
        self.runs += 1

    def run(self) -> None:
        """One step on the feeds that are in place; adds the time in collectives to comm_seconds."""
        if self.tracer is not None:
            self.comm_seconds += self.tracer.run()
            self._done()
            return
        clock, communicating = time.perf_counter, 0.0
        for call, collective in zip(self._calls, self._is_collective, strict=True):
            if collective:
                start = clock()
                call()
                communicating += clock() - start
            else:
                call()
        self.comm_seconds += communicating
        self._done()

    def _described(self, i: Instruction) -> AbstractContextManager[None]:
        """While it is open, others see collectives as this instruction of this program."""
        line = f"{i.source.file}:{i.source.line}" if i.source.file else ""
        return described(line, f"{self._digest}%{(*i.outputs, *i.inputs)[0]}") if i.inputs else nullcontext()

    def _bind(self, i: Instruction) -> list[Thunk]:
        if i.traits.free:
            return []
        if i.communicates:
            return [self._bind_collective(i)]
        if isinstance(i.attrs, Wait):
            return self._bind_wait(i, i.attrs.axes)
        if isinstance(i.attrs, Write):
            return [t for s in self.states for t in _bind_write(s, i, i.attrs.variable)]
        return [self._bind_local(i, s) for s in self.states]

    def _bind_local(self, i: Instruction, s: RankState) -> Thunk:
        if self.native is not None:
            bound = self.native.bind(i, self.program, s.coordinates, s.arrays, s.workspace, self.runtime)
            if bound is not None:
                return bound
        return bind(i, self.program, s.coordinates, s.arrays, s.workspace, self.runtime)

    def _agreed_blas(self) -> str:
        """The library of matrix products: one for all ranks, as no two round alike."""
        products = [i for i in self.program.instructions if i.traits.product]
        values = [v for i in products for v in (*i.inputs, *i.outputs)]
        bfloat16 = any(self.program.types[v].dtype == "bfloat16" for v in values)
        seconds = product_choice.measured(bfloat16) if products else {"numpy": 0.0}
        return blas.agree(gathered(self.mesh, seconds, "compile"))

    def _native_kernels(self, kernels: str | NativeKernels) -> NativeKernels | None:
        """Generated kernels, if they are wanted and every rank can build them; those given were built before."""
        if isinstance(kernels, NativeKernels):
            return kernels
        if kernels == "numpy" or (kernels == "auto" and _points(self.program) < NATIVE_POINTS):
            return None
        try:
            native = built_on_all(self.mesh, [self.program], [s.coordinates for s in self.states])
        except CompilerError as e:
            if kernels == "native":
                raise ConfigError(
                    f"kernels='native' needs a C compiler that works on every rank; {e}",
                    "Or use kernels='auto', which takes NumPy where there is none.",
                ) from None
            if self.mesh.rank == 0:
                words = f"all of this program runs on NumPy, more slowly: {e}"
                warnings.warn(words, stacklevel=2)
            return None
        self._say_refused(native.refused)
        return native

    def _say_refused(self, refused: Mapping[tuple[int, ...], str]) -> None:
        """Warns once of what NumPy does since the compiler did not take its C."""
        if not refused or self.mesh.rank != 0:
            return
        inside = [j for i in self.program.instructions for j in (i, *i.within())]
        names = [f"{i.kind} {i.source}" for i in inside if i.outputs in refused]
        warnings.warn(
            f"NumPy runs {len(names)} of {len(inside)} instructions, more slowly, since their C was"
            f" refused: {'; '.join(names)}. Report this: {next(iter(refused.values()))}",
            stacklevel=2,
        )

    def _bind_collective(self, i: Instruction) -> Thunk:
        a, program = i.attrs, self.program
        if isinstance(a, AllReduce):
            return self._bind_all_reduce(i, a)
        (v, *_), (w, *_) = i.inputs, i.outputs
        arrays = [(s.arrays[v], s.arrays[w], s.workspace) for s in self.states]
        whole_in, whole_out = self.states[0].arrays[v].shape, self.states[0].arrays[w].shape
        # A block of a joined variable lies where its owner has it, not at one place on all ranks.
        held = {r.name for u in i.inputs if isinstance(r := self.plan.root(u), Alias) and r.of == "variable"}
        meet = partial(self.mesh.bind, planned=not any(program.variables[name].joined for name in held))
        if isinstance(a, AllToAll):
            exchange = a.exchange(program, i, self.states[0].coordinates)
            return meet(*(operands.AllToAll(x, y, *exchange, a.axes, space) for x, y, space in arrays))
        assert isinstance(a, (AllGather, ReduceScatter, Shift)), i.kind
        axis, n = program.types[w].shape.position(a.dim), program.mesh.count(a.axes)
        if isinstance(a, AllGather) and a.joined:
            copies = [partial(np.copyto, s.arrays[w], s.joined(i)) for s in self.states if w not in s.plan.shares]
            return run_all(copies)
        if isinstance(a, AllGather):
            sizes = block_sizes(whole_out[axis], n)
            return meet(*(operands.AllGather(x, y, axis, sizes, a.axes, space) for x, y, space in arrays))
        if isinstance(a, ReduceScatter):
            sizes = block_sizes(whole_in[axis], n)
            calls = (operands.ReduceScatter(x, y, axis, sizes, a.axes, a.op, space) for x, y, space in arrays)
            return meet(*calls)
        rule, inputs = a.exchange(program, i), [[s.arrays[v] for v in i.inputs] for s in self.states]
        both = zip(inputs, arrays, strict=True)
        return meet(*(operands.Shift(xs, y, axis, rule, a.axes, a.value, space) for xs, (_, y, space) in both))

    def _bind_all_reduce(self, i: Instruction, a: AllReduce) -> Thunk:
        if a.start and self.mesh.in_background(a.axes):
            return self._bind_start(i, a)
        if len(i.outputs) != 1:
            return self._bind_packed(i, a)
        (v, *_), (w,) = i.inputs, i.outputs
        pairs = [(s.arrays[v], s.arrays[w]) for s in self.states if s.plan.shares.get(w) != v]
        reduce = self._meet(*(operands.AllReduce(s.arrays[w], a.axes, a.op, s.workspace) for s in self.states))
        return run_all([*(partial(np.copyto, y, x) for x, y in pairs), reduce])

    def _bind_start(self, i: Instruction, a: AllReduce) -> Thunk:
        mesh, axes, op, (state,) = self.mesh, a.axes, a.op, self.states
        (v,), (w,) = i.inputs, i.outputs
        x, y, copies = state.arrays[v], state.arrays[w], state.plan.shares.get(w) != v
        requests = self._running.setdefault(w, [])

        def start() -> None:
            if copies:
                np.copyto(y, x)
            requests[:] = mesh.start_all_reduce(y, axes, op)

        return start

    def _bind_wait(self, i: Instruction, axes: Axes) -> list[Thunk]:
        """Nothing, where the reduction was done when it was started."""
        if i.inputs[0] not in self._running:
            return []
        mesh, requests = self.mesh, self._running.pop(i.inputs[0])

        def wait() -> None:
            mesh.wait(requests, axes)
            requests.clear()

        return [wait]

    def _bind_packed(self, i: Instruction, a: AllReduce) -> Thunk:
        """Several values in one message, packed one behind the other in the workspace."""
        packed = [_pack(s, i, self.program) for s in self.states]
        rows = [row for _, rows in packed for row in rows]
        copy = partial(np.copyto, casting="unsafe")
        before = [partial(copy, part, x) for x, part, _ in rows]
        after = [partial(copy, y, part) for _, part, y in rows]
        reduce = self._meet(*(operands.AllReduce(message, a.axes, a.op) for message, _ in packed))
        return run_all([*before, reduce, *after])


def _joins(i: Instruction) -> bool:
    return isinstance(i.attrs, AllGather) and i.attrs.joined


class _Turns:
    """When ranks must wait, as some read an array of which others change their blocks.

    Attributes:
        read: Variables that ranks have read since they met, blocks of others among them.
    """

    def __init__(self, program: Program, plan: MemoryPlan):
        self._program, self._plan = program, plan
        self._joined = {name for name, v in program.variables.items() if v.joined}
        self._changed, self.read = set(self._joined), set[str]()

    def must_meet(self, i: Instruction) -> bool:
        """Whether ranks must meet before instruction ``i``, the next one."""
        if not self._joined:
            return False
        reads = {name for v in i.inputs if (name := self._variable(v, "whole"))}
        writes = {i.attrs.variable} if isinstance(i.attrs, Write) else set[str]()
        if not i.traits.free and not _joins(i):
            writes |= {name for v in i.outputs if (name := self._variable(v, "block"))}
        if _joins(i):
            reads |= {cast(Alias, self._plan.root(i.inputs[0])).name}
        meet = not self.read.isdisjoint(writes) or (_joins(i) and not self._changed.isdisjoint(reads))
        if meet:
            self._changed, self.read = set(), set()
        self._changed |= writes & self._joined
        self.read |= reads
        return meet

    def _variable(self, v: int, part: str) -> str:
        """The joined variable whose block, or more than that, value ``v`` is; empty if it is none."""
        root = self._plan.root(v)
        if not isinstance(root, Alias) or root.of != "variable" or root.name not in self._joined:
            return ""
        block = self._program.types[v] == self._program.variables[root.name].type
        return root.name if block == (part == "block") else ""


def built_on_all(mesh: AnyMesh, programs: Sequence[Program], coordinates: Sequence[Mapping[str, int]]) -> NativeKernels:
    """Generated kernels of programs, the same on every rank of the mesh.

    All ranks use the same kind, since replicated values must stay equal to the last bit; an
    instruction whose C one rank cannot build is left to NumPy on all.
    """
    native, problem = None, ""
    try:
        native = NativeKernels(programs, coordinates)
    except CompilerError as e:
        problem = str(e)
    found = gathered(mesh, (problem, native.refused if native else {}), "compile")
    failed = [f"on rank {rank}: {p}" for rank, (p, _) in enumerate(found) if p]
    if native is None or failed:
        raise CompilerError(failed[0], "Take kernels='numpy'; `meshmpi doctor` looks at the compiler.")
    native.refused = {k: words for _, table in reversed(found) for k, words in table.items()}
    native.leave_to_numpy(native.refused)
    return native


def _points(program: Program) -> int:
    """Elements that maps, reductions and fused kernels of one step touch, on the largest blocks."""
    points = 0
    for i in program.instructions:
        types = region_types(i, program) if isinstance(i.attrs, Tiled) else program.types
        for one in i.body if isinstance(i.attrs, Tiled) else (i,):
            if one.traits.native:
                values = (*one.inputs, *one.outputs)
                points += sum(types[v].max_elements(program.mesh) for v in values)
    return points


def _pack(state: RankState, i: Instruction, program: Program) -> tuple[np.ndarray, list[tuple]]:
    """The message of a combined all_reduce, and (input, part of the message, output) of each."""
    ins, outs = [state.arrays[v] for v in i.inputs], [state.arrays[v] for v in i.outputs]
    dtype = "float32" if ins[0].dtype.name == "bfloat16" else program.types[i.inputs[0]].dtype
    message = view_of(state.workspace, 0, (sum(x.size for x in ins),), dtype)
    rows, start = [], 0
    for x, y in zip(ins, outs, strict=True):
        rows.append((x, message[start : start + x.size].reshape(x.shape), y))
        start += x.size
    return message, rows


def _bind_write(state: RankState, i: Instruction, variable: str) -> list[Thunk]:
    x, block = state.arrays[i.inputs[0]], state.variables[variable]
    if x.size == 0 or x.__array_interface__["data"] == block.__array_interface__["data"]:
        return []
    return [lambda: np.copyto(block, x)]
