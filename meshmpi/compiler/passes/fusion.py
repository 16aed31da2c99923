"""Fusion: chains of maps become one map; instructions on the same rows become one fused kernel, a nest of two loops.

These are maps over all points or rows, uniform random numbers (dropout), reductions along each row (softmax) and sums
over the rows (gradients of biases). Intermediate values stay in registers or cache; only values that others need are
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshmpi.compiler.passes.rewrite import enclosed, fetched, only_user, users, writes_last
from meshmpi.dims import Shape
from meshmpi.ir.kinds import Fused, Map, Random, Reduce
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import Expr, Step
from meshmpi.ir.types import LocalDim

MAX_STEPS = 48
"""Most steps of a fused expression.  Status: assumption; keeps compile times of generated code and scratch small."""
MAX_INPUTS = 12
"""Most arrays read by one map.  Status: assumption; about as many streams as hardware prefetchers follow."""
MAX_BODY = 32
"""Most instructions of a fused kernel.  Status: assumption; keeps generated functions readable."""
MAX_OPERANDS = 32
"""Most values of a fused kernel, inner ones included.  Measured: with 20 a layer norm forward and
backward is cut in two and takes twice as long."""
MAX_OPEN = 8
"""Fused kernels under construction at once: more would keep their inputs alive for longer."""

Dims = tuple[LocalDim, ...]
"""What loops run over: equal global shapes are not enough, ranks must hold equal blocks."""


# ---- maps ----------------------------------------------------------------------------------------


def fuse(program: Program) -> Program:
    """Merges a map into the only instruction that uses it, where that is a map too.

    A map over fewer dims is merged only when it does no arithmetic, since it would be repeated.
    """
    once = only_user(program)
    made: dict[int, Instruction] = {}  # the one result of a map -> the map, as merged so far
    gone: set[int] = set()
    out: list[Instruction] = []
    for i in program.instructions:
        while isinstance(i.attrs, Map):
            merged = None
            for v in i.inputs:
                if v in made and v in once and _fits(program, made[v], i):
                    merged = merged_maps(made[v], i, [])
                if merged is not None and is_small(merged):
                    gone.add(v)
                    break
                merged = None
            if merged is None:
                break
            i = merged
        if isinstance(i.attrs, Map) and len(i.outputs) == 1:
            made[i.outputs[0]] = i
        out.append(i)
    return program.with_instructions(i for i in out if not i.outputs or i.outputs[0] not in gone)


def _fits(program: Program, producer: Instruction, consumer: Instruction) -> bool:
    a, b = (program.types[i.outputs[0]] for i in (producer, consumer))
    if a.partial != b.partial:
        return False
    return sorted(a.local_dims) == sorted(b.local_dims) or producer.of(Map).expr.flops == 0


def is_small(i: Instruction) -> bool:
    """Whether a map has few enough steps and inputs for one loop nest."""
    return len(i.of(Map).expr.steps) <= MAX_STEPS and len(i.inputs) <= MAX_INPUTS


def flattened(body: Sequence[Instruction], outputs: Sequence[int]) -> Instruction:
    """Maps over the same points as one map with the given results."""
    whole = body[0]
    for i in body[1:]:
        whole = merged_maps(whole, i, list(whole.outputs))
    result = dict(zip(whole.outputs, whole.of(Map).expr.results, strict=True))
    expr = Expr(whole.of(Map).expr.steps, tuple(result[v] for v in outputs))
    return whole.replaced(outputs=tuple(outputs), expr=pruned(expr))


def pruned(expr: Expr) -> Expr:
    """The expression without steps that no result needs."""
    needed = set(expr.results)
    for k in range(len(expr.steps) - 1, -1, -1):
        if f"t{k}" in needed:
            needed.update(a for a in expr.steps[k].args if isinstance(a, str))
    kept = [k for k in range(len(expr.steps)) if f"t{k}" in needed]
    new = {f"t{k}": f"t{n}" for n, k in enumerate(kept)}
    steps = tuple(
        s._replace(args=tuple(new.get(a, a) if isinstance(a, str) else a for a in s.args))
        for s in (expr.steps[k] for k in kept)
    )
    return Expr(steps, tuple(new.get(r, r) for r in expr.results))


def merged_maps(producer: Instruction, consumer: Instruction, keep: list[int]) -> Instruction:
    """One map computing both, with the results of the consumer and those in ``keep``."""
    inputs = list(producer.inputs)
    p, c = producer.of(Map).expr, consumer.of(Map).expr
    made = dict(zip(producer.outputs, p.results, strict=True))
    renaming = {f"t{k}": f"t{len(p.steps) + k}" for k in range(len(c.steps))}
    for k, v in enumerate(consumer.inputs):
        if v not in made and v not in inputs:
            inputs.append(v)
        renaming[f"i{k}"] = made[v] if v in made else f"i{inputs.index(v)}"
    steps = p.steps + tuple(
        Step(s.function, tuple(renaming[a] if isinstance(a, str) else a for a in s.args), s.dtype) for s in c.steps
    )
    results = [renaming[r] for r in c.results] + [made[w] for w in keep]
    outputs = (*consumer.outputs, *keep)
    return Instruction(Map(Expr(steps, tuple(results))), tuple(inputs), outputs, consumer.source)


# ---- fused kernels -------------------------------------------------------------------------------


def form_fused_kernels(program: Program) -> Program:
    """Groups maps and reductions that share rows; other instructions keep their order."""
    former = _Former(program)
    for i in program.instructions:
        former.add(i)
    return former.finish()


@dataclass(eq=False)
class _Open:
    """A fused kernel under construction: all points have dims ``full``, of which ``rows`` lead."""

    full: Dims
    rows: Dims | None = None
    body: list[Instruction] = field(default_factory=list[Instruction])
    over_rows: dict[int, None] = field(default_factory=dict[int, None])  # known after all rows only
    after: list[Instruction] = field(default_factory=list[Instruction])  # scalars of its results

    def accepts(self, program: Program, i: Instruction) -> bool:
        """Whether the instruction can run in these loops."""
        if not i.traits.fusible or len(self.body) >= MAX_BODY or not self.over_rows.keys().isdisjoint(i.inputs):
            return False
        if any(v in j.outputs for j in self.after for v in i.inputs):
            return False
        y = _dims(program, i.outputs[0])
        if isinstance(i.attrs, Reduce):
            x = _dims(program, i.inputs[0])
            rows = _rows(x, y, i.attrs.op)
            return x == self.full and rows is not None and self.rows in (None, rows)
        return y == self.full or y == self.rows

    def take(self, program: Program, i: Instruction) -> None:
        if isinstance(i.attrs, Reduce):
            x, y = _dims(program, i.inputs[0]), _dims(program, i.outputs[0])
            self.rows = _rows(x, y, i.attrs.op)
            if y != self.rows:
                self.over_rows[i.outputs[0]] = None
        self.body.append(i)

    def has_room(self, more: int = 0) -> bool:
        """Whether ``more`` values can be added."""
        return len(dict.fromkeys(v for i in self.body for v in (*i.inputs, *i.outputs))) + more <= MAX_OPERANDS

    def joined(self, other: _Open) -> _Open | None:
        """This kernel and one that uses none of its results as one; None where they do not fit."""
        rows = self.rows if other.rows is None else other.rows
        if self.full != other.full or self.rows not in (None, rows):
            return None
        both = _Open(
            self.full, rows, self.body + other.body, {**self.over_rows, **other.over_rows}, self.after + other.after
        )
        return both if len(both.body) < MAX_BODY and both.has_room(1) else None


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
    """Fuses the instructions of a program, which are added in order."""

    def __init__(self, program: Program):
        self.program = program
        self.used, self.kept = users(program), fetched(program)
        self.out: list[Instruction] = []
        self.open: list[_Open] = []
        self.home: dict[int, _Open] = {}  # value -> the open kernel that makes it
        self.held: dict[int, Instruction] = {}  # random numbers that nothing has used yet

    def add(self, i: Instruction) -> None:
        if isinstance(i.attrs, Random) and i.attrs.distribution == "uniform":
            self.held[i.outputs[0]] = i
            return
        if self._postponed(i):
            return
        target = self._target(i, self._sources(i))
        # Closing a kernel may open one for what waited behind it, so look again after each.
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
        """The open kernels whose results the instruction uses."""
        homes = [self.home[v] for v in i.inputs if v in self.home]
        return [s for s in self.open if any(s is h for h in homes)] if homes else []

    def _postponed(self, i: Instruction) -> bool:
        """Whether i makes a scalar (a loss) of an open kernel, and waits so as not to end it."""
        sources = self._sources(i)
        if not i.traits.scalar or len(sources) != 1 or sources[0].accepts(self.program, i):
            return False
        if any(self.program.types[v].shape for v in i.outputs):
            return False
        if isinstance(i.attrs, Reduce) and _dims(self.program, i.inputs[0]) == sources[0].full:
            return False
        sources[0].after.append(i)
        self.home.update((v, sources[0]) for v in i.outputs)
        return True

    def _take(self, target: _Open, i: Instruction) -> None:
        target.take(self.program, i)
        for v in i.outputs:
            self.home[v] = target

    def _place_held(self, i: Instruction, target: _Open | None) -> None:
        """Random numbers go into the kernel of their first user, or before it."""
        for v in dict.fromkeys(i.inputs):
            if v not in self.held:
                continue
            random = self.held.pop(v)
            if target is not None and _dims(self.program, v) == target.full:
                self._take(target, random)
            else:
                self.out.append(random)

    def _target(self, i: Instruction, sources: list[_Open]) -> _Open | None:
        """The open kernel that takes i: one whose results it uses, else one that reads the same large value."""
        if not (i.traits.fusible and i.inputs):
            return None
        self._join(sources, i)
        sources = self._sources(i)
        for s in (*sources, *(s for s in self.open if s not in sources)):
            if s.accepts(self.program, i) and s.has_room(len(i.inputs)) and (s in sources or self._share(s, i)):
                return s
        return None

    def _share(self, s: _Open, i: Instruction) -> bool:
        values = (v for b in s.body for v in b.inputs if v in i.inputs and v not in self.home)
        return any(_dims(self.program, v) == s.full for v in values)

    def _join(self, sources: Sequence[_Open], i: Instruction) -> None:
        """Makes one kernel of those whose results the instruction brings together."""
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
        if not (i.traits.fusible and i.inputs):
            return None
        x, y = _dims(self.program, i.inputs[0]), _dims(self.program, i.outputs[0])
        reduces = isinstance(i.attrs, Reduce)
        full = x if reduces else y
        if not full or (reduces and _rows(x, y, i.of(Reduce).op) is None):
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
        outputs = tuple(
            v for v in made if v in self.kept or any(not u.outputs or u.outputs[0] not in made for u in self.used[v])
        )
        types = [self.program.types[v] for v in made]
        first = (types[0].local_dims, types[0].partial)
        same_points = all((t.local_dims, t.partial) == first for t in types)
        if same_points and all(isinstance(i.attrs, Map) for i in s.body):
            return flattened(s.body, outputs)
        inputs, inner = enclosed(s.body, outputs, self.program.types)
        fused = Fused(Shape([one.dim for one in s.rows or ()]), tuple(s.body), inner)
        return Instruction(fused, inputs, outputs, s.body[-1].source)

    def finish(self) -> Program:
        self.out.extend(self.held.values())
        while self.open:
            self._close(self.open[0])
        return self.program.with_instructions(writes_last(self.out))
