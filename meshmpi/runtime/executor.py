"""Runs a program: one arena per rank, every instruction bound once, then a list of calls.

One class serves both meshes: under MPI this process plays one rank, on a simulated mesh it plays
all of them, instruction by instruction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshmpi import collective_bytes as cb
from meshmpi.errors import ConfigError
from meshmpi.flops import conv_flops, instruction_flops, loop_flops
from meshmpi.kernels import Runtime, bind, blas, workspace_bytes
from meshmpi.kernels.binding import run_all
from meshmpi.kernels.native import NATIVE_KINDS, CompilerError, NativeKernels
from meshmpi.passes.memory import MemoryPlan, plan_memory, round_up
from meshmpi.program import COLLECTIVES, Instruction, Program
from meshmpi.runtime import flight
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.arrays import aligned_empty, block_sizes, numpy_dtype, view_of
from meshmpi.runtime.variables import VariableStore

if TYPE_CHECKING:
    from meshmpi.runtime.trace import Tracer

Thunk = Callable[[], None]
_ADVANCE = Instruction("advance", (), ())  # stands in tables of calls where MPI is let work
NATIVE_POINTS = 2_000_000
"""From so many points a step on, "auto" builds native kernels.  Status: assumption; a build takes
about a second, NumPy some nanoseconds a point, and a program that is built runs many steps."""


def instruction_workspace(i: Instruction, program: Program, coordinates: Mapping[str, int]) -> int:
    """Scratch bytes of a local kernel or collective on the rank at ``coordinates``."""
    if i.kind not in COLLECTIVES:
        if i.kind in ("feed", "read", "write", "view", "wait"):
            return 0
        return workspace_bytes(i, program, coordinates)
    types = [program.types[v] for v in i.inputs]
    shapes = [t.local_sizes(program.mesh, coordinates) for t in types]
    if i.kind == "all_reduce":
        if len(types) > 1:
            wire = cb.wire_bytes("all_reduce", types[0].dtype)
            return sum(int(np.prod(s, dtype=np.int64)) * wire for s in shapes)
        return cb.all_reduce_workspace_bytes(shapes[0], types[0].dtype)
    shape, x = shapes[0], types[0]
    n = program.mesh.count(i.attrs["axes"])
    if i.kind == "all_to_all":
        split, concat, outs = _exchange_sizes(i, program, shape, n, coordinates)
        index = program.mesh.block_index(i.attrs["axes"], coordinates)
        return cb.all_to_all_workspace_bytes(shape, x.dtype, split, concat, *outs, index)
    axis = x.shape.position(i.attrs["dim"])
    if i.kind == "shift":
        out = program.types[i.outputs[0]].local_sizes(program.mesh, coordinates)
        return cb.shift_workspace_bytes(out, x.dtype, axis, program.exchange(i))
    if i.kind == "all_gather":
        whole = program.types[i.outputs[0]].local_sizes(program.mesh, coordinates)[axis]
        return cb.all_gather_workspace_bytes(shape, x.dtype, axis, block_sizes(whole, n))
    return cb.reduce_scatter_workspace_bytes(shape, x.dtype, axis, block_sizes(shape[axis], n))


def _exchange_sizes(
    i: Instruction, program: Program, shape: Sequence[int], n: int, coordinates: Mapping[str, int]
) -> tuple[int, int, tuple[list[int], list[int]]]:
    """Array axes and block extents of an all_to_all."""
    x, y = program.types[i.inputs[0]], program.types[i.outputs[0]]
    split, concat = x.shape.position(i.attrs["split"]), x.shape.position(i.attrs["concat"])
    whole = y.local_sizes(program.mesh, coordinates)[concat]
    return split, concat, (block_sizes(shape[split], n), block_sizes(whole, n))


class RankState:
    """Memory and coordinates of one rank."""

    def __init__(self, program: Program, rank: int, store: VariableStore, plan: MemoryPlan):
        self.rank, self.program, self.plan = rank, program, plan
        self.coordinates = program.mesh.coordinates(rank)
        self.arena = aligned_empty(plan.arena_bytes)
        self.workspace = aligned_empty(self._workspace_bytes())
        self.variables = {name: store.blocks[name][rank] for name in program.variables}
        self.feeds = {name: self._buffer(t) for name, t in program.feeds.items()}
        self.arrays: dict[int, np.ndarray] = {}
        for v in program.types:
            self.arrays[v] = self._array(v)

    def _workspace_bytes(self) -> int:
        """Scratch that the instructions need on this rank: smaller blocks may need more."""
        program, here = self.program, self.coordinates
        needed = (instruction_workspace(i, program, here) for i in program.instructions)
        return round_up(max(needed, default=0))

    def _buffer(self, t: Any) -> np.ndarray:
        sizes = t.local_sizes(self.program.mesh, self.coordinates)
        nbytes = int(np.prod(sizes, dtype=np.int64)) * numpy_dtype(t.dtype).itemsize
        return view_of(aligned_empty(nbytes), 0, sizes, t.dtype)

    def _array(self, v: int) -> np.ndarray:
        t = self.program.types[v]
        sizes = t.local_sizes(self.program.mesh, self.coordinates)
        shared = self.plan.shares.get(v)
        if shared is None:
            return view_of(self.arena, self.plan.offsets[v], sizes, t.dtype)
        if isinstance(shared, int):
            base = self.arrays[shared]
        else:
            kind, name = shared.split(" ", 1)
            base = (self.variables if kind == "variable" else self.feeds)[name]
        flat = base.view(numpy_dtype(t.dtype)).reshape(-1)
        return flat[: math.prod(sizes)].reshape(sizes)  # all, or of a slice the first

    @property
    def held_memory(self) -> dict[str, int]:
        """Kind of memory -> bytes really allocated, rounded up to cache lines as the plan does."""
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
            if i.kind == "loop":
                for kind, flops in loop_flops(i, self.program, self.coordinates).items():
                    table[kind] = table.get(kind, 0) + flops
                continue
            if i.kind == "conv":  # needs to know where blocks lie, not only their extents
                flops = conv_flops(i, self.program, self.coordinates)
                table["conv"] = table.get("conv", 0) + flops
                continue
            for one in i.leaves():
                ins, outs = ([extents(v) for v in values] for values in (one.inputs, one.outputs))
                if flops := instruction_flops(one, ins, outs):
                    table[one.kind] = table.get(one.kind, 0) + flops
        return table


class Executor:
    """Runs a program on a mesh.

    Args:
        program: Verified, the same on every rank.
        mesh: A Mesh (this process is one rank) or a SimulatedMesh (it plays all).
        store: Variables; those of the program are in it.
        kernels: "numpy", "native", or "auto": native where a compiler is found and it pays.

    Attributes:
        native: The generated kernels, or None where NumPy does everything.
        plan: Of the memory of every rank.
        tracer: Runs the calls in place of `run` while it records, see `trace.Tracer`.
    """

    def __init__(self, program: Program, mesh: Any, store: VariableStore, kernels: str = "auto"):
        self.program, self.mesh = program, mesh
        self.simulated = len(store.ranks) == mesh.shape.size and not hasattr(mesh, "comm")
        self.runtime = Runtime(blas=self._agreed_blas())
        # The rank at the origin holds the largest block of every value, so its plan fits all ranks.
        origin = dict.fromkeys(program.mesh.names, 0)
        self.plan = plan_memory(program, origin, instruction_workspace)
        self.states = [RankState(program, rank, store, self.plan) for rank in store.ranks]
        self.comm_seconds = 0.0
        self.runs = 0
        self.native = self.runtime.native = self._native_kernels(kernels)
        self._calls: list[Thunk] = []
        self._is_collective: list[bool] = []
        self._made_by: list[Instruction] = []
        self.tracer: Tracer | None = None
        self._running: dict[int, list] = {}
        self._digest = program.digest()[:8]
        for i in program.instructions:
            communicates = i.kind in (*COLLECTIVES, "wait")
            for thunk in self._described(i):
                self._add(thunk, communicates, i)
            if self._running and not communicates:
                self._add(self._advance(), True, _ADVANCE)

    def _add(self, call: Thunk, communicates: bool, i: Instruction) -> None:
        self._calls.append(call)
        self._is_collective.append(communicates)
        self._made_by.append(i)

    @property
    def calls(self) -> list[tuple[Thunk, Instruction]]:
        """What a step calls, in order, and the instruction that each call carries out."""
        return list(zip(self._calls, self._made_by, strict=True))

    def _advance(self) -> Thunk:
        """Lets MPI work on the reductions that run in the background at this place."""
        mesh, running = self.mesh, list(self._running.values())

        def advance() -> None:
            for requests in running:
                mesh.advance(requests)

        return advance

    def run(self) -> None:
        """One step on the feeds that are in place; adds the time in collectives to comm_seconds."""
        if self.tracer is not None:
            self.comm_seconds += self.tracer.run()
            self.runs += 1
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
        self.runs += 1

    def _described(self, i: Instruction) -> list[Thunk]:
        """`_bind`, with collectives that others see as this instruction of this program."""
        if i.kind not in COLLECTIVES:
            return self._bind(i)
        line = f"{i.source.file}:{i.source.line}" if i.source.file else ""
        about = f"{self._digest}%{i.outputs[0]}"
        with flight.described(line, about):
            return self._bind(i)

    def _bind(self, i: Instruction) -> list[Thunk]:
        if i.kind in ("feed", "read", "view"):
            return []
        if i.kind in COLLECTIVES:
            return [self._bind_collective(i)]
        if i.kind == "wait":
            return self._bind_wait(i)
        if i.kind == "write":
            return [t for s in self.states for t in _bind_write(s, i)]
        return [self._bind_local(i, s) for s in self.states]

    def _bind_local(self, i: Instruction, s: RankState) -> Thunk:
        if self.native is not None:
            bound = self.native.bind(i, self.program, s.coordinates, s.arrays, self.runtime)
            if bound is not None:
                return bound
        return bind(i, self.program, s.coordinates, s.arrays, s.workspace, self.runtime)

    def _agreed_blas(self) -> str:
        """The library of matrix products: one for all ranks, as no two round alike."""
        products = [i for i in self.program.instructions if i.kind in ("contract", "conv", "loop")]
        values = [v for i in products for v in (*i.inputs, *i.outputs)]
        bfloat16 = any(self.program.types[v].dtype == "bfloat16" for v in values)
        names = blas.available(bfloat16)
        return blas.agree(gathered(self.mesh, names, "compile"))

    def _native_kernels(self, kernels: str) -> NativeKernels | None:
        """Generated kernels, if they are wanted and every rank can build them.

        All ranks use the same kind, since replicated values must stay equal to the last bit.
        """
        if kernels == "numpy" or (kernels == "auto" and _points(self.program) < NATIVE_POINTS):
            return None
        native, problem = None, ""
        try:
            native = NativeKernels(self.program, [s.coordinates for s in self.states])
        except CompilerError as e:
            problem = str(e)
        problems = gathered(self.mesh, problem, "compile")
        failed = {rank: p for rank, p in enumerate(problems) if p}
        if not failed:
            return native
        rank, first = next(iter(failed.items()))
        if kernels == "native":
            raise ConfigError(
                f"kernels='native' needs a C compiler that works on every rank; on rank {rank}:"
                f" {first}",
                "Or use kernels='auto', which takes NumPy where there is none.",
            )
        return None

    def _arrays(self, v: int) -> Any:
        """The array of value v, as the mesh's collectives want it: one, or a list by rank."""
        arrays = [s.arrays[v] for s in self.states]
        return arrays if self.simulated else arrays[0]

    def _bind_collective(self, i: Instruction) -> Thunk:
        axes, mesh = i.attrs["axes"], self.mesh
        workspace = None if self.simulated else self.states[0].workspace
        if i.kind == "all_reduce":
            return self._bind_all_reduce(i, axes, workspace)
        if i.kind == "shift":
            return self._bind_shift(i, workspace)
        x, out = self._arrays(i.inputs[0]), self._arrays(i.outputs[0])
        t = self.program.types[i.inputs[0]]
        one = self.states[0]
        shape = one.arrays[i.inputs[0]].shape
        n = self.program.mesh.count(axes)
        if i.kind == "all_to_all":
            split, concat, outs = _exchange_sizes(i, self.program, shape, n, one.coordinates)
            return mesh.bound_all_to_all(x, out, split, concat, *outs, axes, workspace)
        axis = t.shape.position(i.attrs["dim"])
        if i.kind == "all_gather":
            sizes = block_sizes(one.arrays[i.outputs[0]].shape[axis], n)
            return mesh.bound_all_gather(x, out, axis, sizes, axes, workspace)
        sizes, op = block_sizes(shape[axis], n), i.attrs["op"]
        return mesh.bound_reduce_scatter(x, out, axis, sizes, axes, op, workspace)

    def _bind_shift(self, i: Instruction, workspace: np.ndarray | None) -> Thunk:
        axes, value = i.attrs["axes"], i.attrs["value"]
        xs, out = [self._arrays(v) for v in i.inputs], self._arrays(i.outputs[0])
        axis = self.program.types[i.outputs[0]].shape.position(i.attrs["dim"])
        exchange = self.program.exchange(i)
        return self.mesh.bound_shift(xs, out, axis, exchange, axes, value, workspace)

    def _bind_all_reduce(self, i: Instruction, axes: tuple, workspace: np.ndarray | None) -> Thunk:
        op = i.attrs["op"]
        if i.attrs.get("start") and not self.simulated:
            return self._bind_start(i)
        if len(i.outputs) != 1:
            return self._bind_packed(i, axes, op)
        (v, *_), (w,) = i.inputs, i.outputs
        pairs = [(s.arrays[v], s.arrays[w]) for s in self.states if s.plan.shares.get(w) != v]
        reduce = self.mesh.bound_all_reduce(self._arrays(w), axes, op, workspace)
        return run_all([*(partial(np.copyto, y, x) for x, y in pairs), reduce])

    def _bind_start(self, i: Instruction) -> Thunk:
        mesh, axes, op, (state,) = self.mesh, i.attrs["axes"], i.attrs["op"], self.states
        (v,), (w,) = i.inputs, i.outputs
        x, y, copies = state.arrays[v], state.arrays[w], state.plan.shares.get(w) != v
        requests = self._running.setdefault(w, [])

        def start() -> None:
            if copies:
                np.copyto(y, x)
            requests[:] = mesh.start_all_reduce(y, axes, op)

        return start

    def _bind_wait(self, i: Instruction) -> list[Thunk]:
        """On a simulated mesh the reduction was done when it was started."""
        if self.simulated:
            return []
        mesh, axes, requests = self.mesh, i.attrs["axes"], self._running.pop(i.inputs[0])

        def wait() -> None:
            mesh.wait(requests, axes)
            requests.clear()

        return [wait]

    def _bind_packed(self, i: Instruction, axes: tuple, op: str) -> Thunk:
        """Several values in one message, packed one behind the other in the workspace."""
        packed = [_pack(s, i, self.program) for s in self.states]
        message = [m for m, _ in packed] if self.simulated else packed[0][0]
        rows = [row for _, rows in packed for row in rows]
        copy = partial(np.copyto, casting="unsafe")
        before = [partial(copy, part, x) for x, part, _ in rows]
        after = [partial(copy, y, part) for _, part, y in rows]
        return run_all([*before, self.mesh.bound_all_reduce(message, axes, op), *after])


def _points(program: Program) -> int:
    """Elements that maps, reductions and segments of one step touch, on the largest blocks."""
    points = 0
    for i in program.instructions:
        types = {**program.types, **i.inner_types()} if i.kind == "loop" else program.types
        for one in i.attrs["body"] if i.kind == "loop" else (i,):
            if one.kind in NATIVE_KINDS:
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


def _bind_write(state: RankState, i: Instruction) -> list[Thunk]:
    x, block = state.arrays[i.inputs[0]], state.variables[i.attrs["variable"]]
    if x.size == 0 or x.__array_interface__["data"] == block.__array_interface__["data"]:
        return []
    return [lambda: np.copyto(block, x)]
