"""Predicts the time of a step from its program and the description of a machine, without running it.

An instruction takes as long as its bottleneck: arithmetic, the cache level that still holds its data, or the network,
where ranks also wait for one another. Instructions run one after another; reductions may run in the background.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshmpi.compiler.passes.memory import Sharing
from meshmpi.graph.arguments import checked
from meshmpi.ir.flops import busiest_rank, local_flops, program_flops
from meshmpi.ir.kinds import Conv, Product, Tiled, Transpose, Wait, Write
from meshmpi.ir.kinds.regions import extents_in, iteration_counts, region_types
from meshmpi.ir.program import Alias, Collective, Instruction, LocalType, Memory, Program
from meshmpi.ir.scalar import ITEM_BYTES
from meshmpi.planner.machine import Machine

_READ, _WRITTEN = 0.75, 1.5
"""Bytes moved, of one read (or written to where it was read) and of one written elsewhere, whose
cache line is read before; as shares of one byte of z = x + y, by which memory is measured."""
_STRIDED = 3.0
"""A transpose touches memory this many times as slowly as a copy.  Status: assumption."""

Touched = Sequence[tuple[int, int]]
"""Values that an instruction touches, and bytes of each."""
Sizes = Mapping[str, int]
"""Dimension name -> extent of a block."""


@dataclass(frozen=True)
class Timing:
    """Predicted time of one instruction."""

    instruction: Instruction
    seconds: float  # time that this rank spends on the instruction
    bound: str  # what it waits for: "compute", "memory" or "network"; "calls" where it is too short


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one step on the rank that takes longest."""

    machine: str  # name of the description used
    timings: tuple[Timing, ...]  # one for each instruction that takes time, in order
    other: float  # seconds of the step that belong to no instruction
    flops: int  # FLOP of the rank, for the share of the peak
    peak: float  # FLOP per second of the machine's fastest product in the types that the program has

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.other + sum(t.seconds for t in self.timings)

    def by_bound(self) -> dict[str, float]:
        """Seconds by what bounds them."""
        return summed((t.bound, t.seconds) for t in self.timings)

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of instruction."""
        return summed((t.instruction.kind, t.seconds) for t in self.timings)

    def by_axes(self) -> dict[str, float]:
        """Seconds in collectives by mesh axes."""
        return summed(
            ("+".join(t.instruction.attrs.axes), t.seconds)
            for t in self.timings
            if isinstance(t.instruction.attrs, Collective)
        )

    @property
    def bound(self) -> str:
        """What most of the step waits for."""
        shares = self.by_bound()
        return max(shares, key=lambda k: shares[k]) if shares else "calls"

    @property
    def efficiency(self) -> float:
        """FLOP per second of the step, as a share of the machine's peak."""
        return self.flops / self.seconds / self.peak if self.seconds else 0.0

    def __str__(self) -> str:
        bounds = sorted(self.by_bound().items(), key=lambda item: -item[1])
        shares = ", ".join(f"{s / self.seconds:.0%} {b}" for b, s in bounds)
        return (
            f"predicted on {self.machine}: {1e3 * self.seconds:.4g} ms a step, {shares}; {self.efficiency:.0%} of peak"
        )


def summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of the seconds of each key."""
    out: dict[str, float] = {}
    for key, seconds in pairs:
        out[key] = out.get(key, 0.0) + seconds
    return out


@checked
def predict_time(program: Program, machine: Machine) -> Prediction:
    """The time of a step of ``program`` on ``machine``, on the busiest rank.

    That is the one at the origin, with the largest blocks, or the one with the most work.

    Raises:
        ConfigError: The machine has no network for an axis over which the program communicates.
    """
    origin = dict.fromkeys(program.mesh.names, 0)
    ranks = [origin] if (at := busiest_rank(program)) == origin else [origin, at]
    return max((_predicted(program, machine, r) for r in ranks), key=lambda p: p.seconds)


def _predicted(program: Program, machine: Machine, at: Mapping[str, int]) -> Prediction:
    """The time of a step on the rank at the coordinates ``at``."""
    clock, met, timings, background = 0.0, 0.0, list[Timing](), _Background()
    sharing = Sharing(program)
    timer = _Timer(program, machine, sharing, at)
    for n, i in enumerate(program.instructions):
        if i.traits.free or _in_place(i, sharing):
            continue
        if isinstance(i.attrs, Wait):
            found = Timing(i, background.wait(i.inputs[0], clock), "network")
        elif i.in_background:
            background.start(i.outputs[0], clock, timer.collective(i))
            found = Timing(i, machine.call, "calls")
        else:
            found = timer.timing(n, i)
            if isinstance(i.attrs, Collective) and program.mesh.count(i.attrs.axes) > 1:
                waited = machine.wait(clock - met)
                found = Timing(i, found.seconds + waited, "network")
                met = clock + found.seconds
                background.interrupt(clock, found.seconds)
        if found.seconds > 0.0:
            timings.append(found)
            clock += found.seconds
    flops = program_flops(program, at)
    peak = machine.peak_of(*timer.multiplied)
    return Prediction(machine.name, tuple(timings), machine.step, flops, peak)


class _Background:
    """Reductions that travel one after the other while instructions compute."""

    def __init__(self) -> None:
        self._free, self._ends = 0.0, dict[int, float]()

    def start(self, value: int, clock: float, seconds: float) -> None:
        self._free = max(self._free, clock) + seconds
        self._ends[value] = self._free

    def wait(self, value: int, clock: float) -> float:
        """Seconds until a value has arrived."""
        return max(0.0, self._ends.pop(value) - clock)

    def interrupt(self, clock: float, seconds: float) -> None:
        """Another collective takes the network: what is under way arrives later."""
        if self._free > clock:
            self._free += seconds
            self._ends = {v: e + seconds if e > clock else e for v, e in self._ends.items()}


def _in_place(i: Instruction, sharing: Sharing) -> bool:
    """Whether a write has nothing to do: its value was made in the variable's own memory."""
    return isinstance(i.attrs, Write) and sharing.root(i.inputs[0]) == Alias("variable", i.attrs.variable)


class _Timer:
    """Times of single instructions on one rank."""

    def __init__(self, program: Program, machine: Machine, sharing: Sharing, at: Mapping[str, int]):
        self.program, self.machine, self.sharing, self.at = program, machine, sharing, at
        self.sizes = {v: self._extents(t) for v, t in program.types.items()}
        self.touched = [
            [] if i.traits.free or _in_place(i, sharing) else self._touched(i) for i in program.instructions
        ]
        self.distances = reuse_distances(program, sharing, self.touched)
        self.multiplied: set[str] = set()
        """Data types of the products timed so far."""

    def timing(self, n: int, i: Instruction) -> Timing:
        """The time of instruction i, number n of the program."""
        if i.communicates:
            return Timing(i, self.collective(i) + self.machine.call, "network")
        if isinstance(i.attrs, Tiled):
            arithmetic = self._loop(i)
        else:
            inner, known = i.inner_types(), self.program.types
            types = {v: inner.get(v) or known[v] for v in self._values(i)}
            sizes = {v: self.sizes[v] if v in self.sizes else self._extents(t) for v, t in types.items()}
            arithmetic = sum(self._arithmetic(one, types, sizes) for one in i.leaves())
        memory = self._memory(n, i)
        if isinstance(i.attrs, Product):  # one after the other: operands are copied first
            arithmetic, memory = arithmetic + memory, 0.0
        longest = max(arithmetic, memory)
        if longest < self.machine.call:
            return Timing(i, longest + self.machine.call, "calls")
        bound = "compute" if arithmetic >= memory else "memory"
        return Timing(i, longest + self.machine.call, bound)

    def collective(self, i: Instruction) -> float:
        """Seconds of a collective, without its call."""
        assert isinstance(i.attrs, Collective), i.kind
        program, axes = self.program, i.attrs.axes
        handed = program.elements_handed(i)  # it waits for the largest blocks of all
        handed *= i.attrs.wire_bytes(program.types[i.inputs[0]].dtype)
        several = program.mesh.count(axes) > 1
        seconds = self.machine.collective(program.mesh, axes, i.kind, handed) if several else 0.0
        if len(i.inputs) > 1:  # packed into one message and unpacked
            seconds += 4 * handed / self.machine.memory(4 * handed)
        return seconds

    # ---- local instructions --------------------------------------------------------------

    def _values(self, i: Instruction) -> list[int]:
        found = [v for one in i.leaves() for v in (*one.inputs, *one.outputs)]
        return list(dict.fromkeys([*i.inputs, *i.outputs, *found]))

    def _extents(self, t: LocalType) -> Sizes:
        return dict(zip(t.shape.names, t.local_sizes(self.program.mesh, self.at), strict=True))

    def _loop(self, i: Instruction) -> float:
        """Arithmetic of all iterations."""
        types, arithmetic = region_types(i, self.program), 0.0
        for count, ranges in iteration_counts(i, self.program, self.at):
            sizes = {v: extents_in(t.shape, ranges) for v, t in types.items()}
            once = sum(self._arithmetic(one, types, sizes) for one in i.leaves())
            arithmetic += count * once
        return arithmetic

    def _arithmetic(self, i: Instruction, types: Mapping[int, LocalType], sizes: Mapping[int, Sizes]) -> float:
        """Seconds of the arithmetic of one leaf, its operands in cache."""
        if isinstance(i.attrs, Conv):
            return self._conv(i, i.attrs)
        if isinstance(i.attrs, Product):
            return self._product(i, types, sizes)
        work = i.attrs.work
        if work is None:
            return 0.0
        each = sum(map(self.machine.operation, work.operations))
        weight = _width(types[(i.outputs or i.inputs)[0]].dtype) if work.weight is None else work.weight
        return weight * each * _count(sizes[(i.outputs if work.per == "output" else i.inputs)[0]])

    def _product(self, i: Instruction, types: Mapping[int, LocalType], sizes: Mapping[int, Sizes]) -> float:
        a, b = (sizes[v] for v in i.inputs)
        y = sizes[i.outputs[0]]
        both = [d for d in a if d in b]
        batch = math.prod(a[d] for d in both if d in y)
        k = math.prod(a[d] for d in both if d not in y)
        m = math.prod(a[d] for d in a if d not in b)
        n = math.prod(b[d] for d in b if d not in a)
        if not batch * m * n * k:
            return 0.0
        if min(m, n) == 1:  # a matrix times a vector is as fast as the matrix is read
            touched = ITEM_BYTES[types[i.inputs[0]].dtype] * batch * k * max(m, n)
            return touched / self.machine.memory(touched)
        self.multiplied.add(types[i.inputs[0]].dtype)
        rate = self.machine.product_rate(types[i.inputs[0]].dtype, m, n, k)
        return 2.0 * batch * m * n * k / rate

    def _conv(self, i: Instruction, conv: Conv) -> float:
        """As the product of its patches: positions x (window and channels) x channels."""
        program = self.program
        flops = local_flops(i, program, self.at)
        y = _count(self.sizes[i.outputs[0]])
        if not y or not flops:
            return 0.0
        taps = [s.w for s in conv.dims]
        b, made = self.sizes[i.inputs[1]], program.types[i.outputs[0]].shape
        n = math.prod(size for d, size in b.items() if d not in taps and made.find(d) >= 0)
        k = max(1, flops // (2 * y))
        self.multiplied.add(program.types[i.inputs[0]].dtype)
        rate = self.machine.product_rate(program.types[i.inputs[0]].dtype, y // max(n, 1), n, k)
        patches = ITEM_BYTES[program.types[i.inputs[0]].dtype] * 2 * k * (y // max(n, 1))
        return flops / rate + patches / self.machine.memory(patches)

    def _touched(self, i: Instruction) -> Touched:
        """Values that an instruction reads and writes, once each, and how many bytes of them."""
        own = {v: self._bytes(v) for v in (*i.inputs, *i.outputs)}
        both = i.inputs[:1] + i.outputs[:1]
        in_place = len(both) == 2 and len({self.sharing.root(v) for v in both}) == 1
        return list(i.attrs.touched(i, own, in_place).items())

    def _bytes(self, v: int) -> int:
        return ITEM_BYTES[self.program.types[v].dtype] * _count(self.sizes[v])

    def _memory(self, n: int, i: Instruction) -> float:
        """Seconds to read and write the values of an instruction from where they are."""
        touched, distances, rate = self.touched[n], self.distances[n], self.machine.memory
        if isinstance(i.attrs, Product):  # the measured rate holds for operands in a cache
            own = sum(size for _, size in touched)
            found = sum(size / rate(distances[v]) for v, size in touched if size)
            return max(0.0, found - own / rate(own)) if own else 0.0
        read = {self.sharing.root(v) for v in i.inputs}
        seconds = 0.0
        for v, size in touched:
            fresh = v in i.outputs and self.sharing.root(v) not in read
            seconds += (_WRITTEN if fresh else _READ) * size / rate(distances[v]) if size else 0.0
        return _STRIDED * seconds if isinstance(i.attrs, Transpose) else seconds


def _count(sizes: Sizes) -> int:
    return math.prod(sizes.values())


def _width(dtype: str) -> float:
    """Vectors hold half as many float64 as float32."""
    return 2.0 if dtype in ("float64", "int64") else 1.0


def reuse_distances(program: Program, sharing: Sharing, touched: Sequence[Touched]) -> list[Mapping[int, int]]:
    """Value -> bytes touched since its memory was touched before, of every instruction.

    A cache serves an access if it is larger than that (Mattson et al., "Evaluation techniques for storage hierarchies",
    1970).  Repeated touches count each time, so distances are upper bounds; they contain the instruction's own bytes.
    A variable's first use finds what the end of the step before has left.  A new value lies where others did that are
    no longer needed: it finds what was touched one length of the memory of such values ago.
    """
    fresh = _most_alive(program, sharing)
    last: dict[Memory, int] = {}
    passed, found = 0, list[Mapping[int, int]]()
    for _ in range(2):  # the second time around, variables have been touched before
        born: set[Memory] = set()
        found = []
        for one in touched:
            passed += sum(size for _, size in one)
            own: dict[int, int] = {}
            for v, _ in one:
                root = sharing.root(v)
                kept = isinstance(root, Alias) or root in born
                own[v] = passed - last.get(root, 0) if kept else min(fresh, passed)
                born.add(root)
            last.update((sharing.root(v), passed) for v, _ in one)
            found.append(own)
    return found


def _most_alive(program: Program, sharing: Sharing) -> int:
    """The most bytes of values needed at the same time that are neither variables nor feeds."""
    alive = most = 0
    for n, i in enumerate(program.instructions):
        for v in i.outputs:
            if sharing.root(v) == v:
                alive += program.types[v].max_bytes(program.mesh)
        most = max(most, alive)
        for v in sharing.ending[n]:
            alive -= program.types[v].max_bytes(program.mesh)
    return most
