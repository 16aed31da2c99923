"""Maps and reductions over the same rows become one segment: one loop nest over memory.

A fused kernel has a shape of rows and columns.  Its instructions are maps over all points or over rows,
uniform random numbers (dropout), reductions along each row (softmax, normalisations) and sums over
the rows (gradients of biases and scales).  Row by row its intermediate values stay in registers or
in cache; only what others need is stored.  Which loops that becomes is the business of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshmpi.compiler.passes.fuse import flattened
from meshmpi.compiler.passes.rewrite import fetched, users
from meshmpi.dims import Shape
from meshmpi.ir.kinds import Fused, Random, Reduce
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.types import LocalDim

MAX_BODY = 32
"""Most instructions of a fused kernel.  Status: assumption; keeps generated functions readable."""
MAX_OPERANDS = 32
"""Most values of a fused kernel, inner ones included.  Measured: with 20 a layer norm forward and
backward is cut in two and takes twice as long."""
MAX_OPEN = 8
"""Fused kernels under construction at once: more would keep their inputs alive for longer."""

SCALAR_KINDS = ("map", "reduce", "all_reduce")
"""Kinds that can wait for the end of a fused kernel when they make a scalar."""
Dims = tuple[LocalDim, ...]
"""What loops run over: equal global shapes are not enough, ranks must hold equal blocks."""


def form_fused_kernels(program: Program) -> Program:
    """Groups maps and reductions that share rows; other instructions keep their order."""
    former = _Former(program)
    for i in program.instructions:
        former.add(i)
    return former.finish()


@dataclass
class _Open:
    """A fused kernel under construction: all points have dims ``full``, of which ``rows`` lead."""

    full: Dims
    rows: Dims | None = None
    body: list[Instruction] = field(default_factory=list[Instruction])
    over_rows: dict[int, None] = field(default_factory=dict[int, None])  # known after all rows only
    after: list[Instruction] = field(default_factory=list[Instruction])  # scalars of its results

    def accepts(self, program: Program, i: Instruction) -> bool:
        """Whether the instruction can run in these loops; settles ``rows`` when it tells them."""
        later = [*self.over_rows, *(v for j in self.after for v in j.outputs)]
        if len(self.body) >= MAX_BODY or any(v in later for v in i.inputs):
            return False
        y = _dims(program, i.outputs[0])
        if i.kind == "map":
            return y == self.full or y == self.rows
        if i.kind != "reduce":
            return False
        x = _dims(program, i.inputs[0])
        rows = _rows(x, y, i.of(Reduce).op)
        return x == self.full and rows is not None and self.rows in (None, rows)

    def take(self, program: Program, i: Instruction) -> None:
        if i.kind == "reduce":
            x, y = _dims(program, i.inputs[0]), _dims(program, i.outputs[0])
            self.rows = _rows(x, y, i.of(Reduce).op)
            if y != self.rows:
                self.over_rows[i.outputs[0]] = None
        self.body.append(i)

    def operands(self) -> int:
        return len(dict.fromkeys(v for i in self.body for v in (*i.inputs, *i.outputs)))

    def joined(self, other: _Open) -> _Open | None:
        """This fused kernel and one that uses none of its results as one; None where they do not fit."""
        rows = self.rows if other.rows is None else other.rows
        if self.full != other.full or self.rows not in (None, rows):
            return None
        both = _Open(
            self.full, rows, self.body + other.body, {**self.over_rows, **other.over_rows}, self.after + other.after
        )
        fits = len(both.body) < MAX_BODY and both.operands() < MAX_OPERANDS
        return both if fits else None


def _dims(program: Program, v: int) -> Dims:
    return program.types[v].local_dims


def _rows(x: Dims, y: Dims, op: str) -> Dims | None:
    """The leading dims that are rows when x is reduced to y; None where it fits no fused kernel."""
    if y == x[: len(y)] and len(y) < len(x):
        return y
    lead = len(x) - len(y)
    if y == x[lead:] and len(y) and op == "sum":
        return x[:lead]
    return None


class _Former:
    def __init__(self, program: Program):
        self.program = program
        self.used, self.kept = users(program), fetched(program)
        self.out: list[Instruction] = []
        self.open: list[_Open] = []
        self.home: dict[int, _Open] = {}  # value -> the open fused kernel that makes it
        self.held: dict[int, Instruction] = {}  # random numbers that nothing has used yet

    def add(self, i: Instruction) -> None:
        if isinstance(i.attrs, Random) and i.attrs.distribution == "uniform":
            self.held[i.outputs[0]] = i
            return
        if self._postponed(i):
            return
        target = self._target(i, self._sources(i))
        # Closing a fused kernel may open one for what waited behind it, so look again after each.
        while others := [s for s in self._sources(i) if s is not target]:
            self._close(others[0])
            target = self._target(i, self._sources(i))
        if target is None:
            target = self._new(i)
        self._place_held(i, target)
        if target is None:
            self.out.append(i)
        else:
            self._take(target, i)

    def _sources(self, i: Instruction) -> list[_Open]:
        """The open fused kernels whose results the instruction uses."""
        return [s for s in self.open if any(self.home.get(v) is s for v in i.inputs)]

    def _postponed(self, i: Instruction) -> bool:
        """Whether i makes a scalar (a loss) of an open fused kernel, and waits so as not to end it."""
        sources = self._sources(i)
        if i.kind not in SCALAR_KINDS or len(sources) != 1 or sources[0].accepts(self.program, i):
            return False
        if any(self.program.types[v].shape for v in i.outputs):
            return False
        if i.kind == "reduce" and _dims(self.program, i.inputs[0]) == sources[0].full:
            return False
        sources[0].after.append(i)
        self.home.update((v, sources[0]) for v in i.outputs)
        return True

    def _take(self, target: _Open, i: Instruction) -> None:
        target.take(self.program, i)
        for v in i.outputs:
            self.home[v] = target

    def _place_held(self, i: Instruction, target: _Open | None) -> None:
        """Random numbers go into the fused kernel of their first user, or before it."""
        for v in dict.fromkeys(i.inputs):
            if v not in self.held:
                continue
            random = self.held.pop(v)
            if target is not None and _dims(self.program, v) == target.full:
                self._take(target, random)
            else:
                self.out.append(random)

    def _target(self, i: Instruction, sources: list[_Open]) -> _Open | None:
        if i.kind not in ("map", "reduce") or not i.inputs:
            return None
        self._join(sources, i)
        for s in self._sources(i):
            if s.accepts(self.program, i) and s.operands() + len(i.inputs) <= MAX_OPERANDS:
                return s
        for s in self.open:
            if s in sources or not s.accepts(self.program, i):
                continue
            shared = [
                v
                for b in s.body
                for v in b.inputs
                if v in i.inputs and _dims(self.program, v) == s.full and v not in self.home
            ]
            if shared and s.operands() + len(i.inputs) <= MAX_OPERANDS:
                return s
        return None

    def _join(self, sources: Sequence[_Open], i: Instruction) -> None:
        """Makes one fused kernel of those whose results the instruction brings together."""
        if len(sources) < 2:
            return
        a, b = sources[:2]
        both = a.joined(b)
        if both is None or not both.accepts(self.program, i):
            return
        self.open[self.open.index(a)] = both
        self.open.remove(b)
        self.home.update((v, both) for j in (*both.body, *both.after) for v in j.outputs)

    def _new(self, i: Instruction) -> _Open | None:
        if i.kind not in ("map", "reduce") or not i.inputs:
            return None
        x, y = _dims(self.program, i.inputs[0]), _dims(self.program, i.outputs[0])
        full = y if i.kind == "map" else x
        if i.kind == "reduce" and _rows(x, y, i.of(Reduce).op) is None:
            return None
        if not full:
            return None
        if len(self.open) >= MAX_OPEN:
            self._close(self.open[0])
        new = _Open(full)
        self.open.append(new)
        return new

    def _close(self, s: _Open) -> None:
        self.open.remove(s)
        for i in (*s.body, *s.after):
            for v in i.outputs:
                del self.home[v]
        self.out.append(s.body[0] if len(s.body) == 1 else self._fused(s))
        for i in s.after:
            self.add(i)

    def _fused(self, s: _Open) -> Instruction:
        made = [v for i in s.body for v in i.outputs]
        inputs = dict.fromkeys(v for i in s.body for v in i.inputs if v not in made)
        outputs = tuple(
            v for v in made if v in self.kept or any(not u.outputs or u.outputs[0] not in made for u in self.used[v])
        )
        if all(i.kind == "map" for i in s.body) and self._same_points(s.body):
            return flattened(s.body, outputs)
        inner = {v: self.program.types[v] for v in made if v not in outputs}
        fused = Fused(Shape([one.dim for one in s.rows or ()]), tuple(s.body), inner)
        return Instruction(fused, tuple(inputs), outputs, s.body[-1].source)

    def _same_points(self, body: list[Instruction]) -> bool:
        types = [self.program.types[v] for i in body for v in i.outputs]
        first = (types[0].local_dims, types[0].partial)
        return all((t.local_dims, t.partial) == first for t in types)

    def finish(self) -> Program:
        self.out.extend(self.held.values())
        while self.open:
            self._close(self.open[0])
        return self.program.with_instructions(self._writes_last())

    def _writes_last(self) -> list[Instruction]:
        writes = [i for i in self.out if i.kind == "write"]
        return [i for i in self.out if i.kind != "write"] + writes
