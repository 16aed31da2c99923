"""Rematerialisation: recomputes values at a later use instead of keeping them in memory.

`rematerialise` repeats what moves fewer bytes and takes no more memory; `fit_memory` trades operations for memory
until a program fits a limit. Collectives are never repeated, and random numbers are the same.
"""

from __future__ import annotations

import bisect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from meshmpi.compiler.passes.clean import dce
from meshmpi.compiler.passes.fusion import MAX_BODY, MAX_INPUTS, MAX_OPERANDS, MAX_STEPS, flattened, pruned
from meshmpi.compiler.passes.memory import MemoryPlan, aligned_bytes, plan_memory
from meshmpi.compiler.passes.rewrite import enclosed, fresh, needed_for
from meshmpi.dims import Shape
from meshmpi.errors import ConfigError
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import Fused, Map
from meshmpi.ir.program import Instruction, LocalType, Program, Region

FLOP_PER_BYTE = 8
"""Floating-point operations that take as long as moving one byte.  Status: assumption."""
SLOW = ("exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "power")
MOST_FLOPS, MOST_SLOW = 24, 2
"""Operations that a fused kernel may run again for each element, and the slow ones among them (random numbers too).
Status: assumption; an element that is written and read again costs 8 * `FLOP_PER_BYTE` operations."""
MOST_CLONES = 48
"""Largest number of instructions that are repeated for one value.  Status: assumption."""
PATIENCE = 64
"""Largest number of values that are computed again in a row without the arena getting smaller.  Status: assumption."""

Memory = Callable[[Program], int]


class _Draft:
    """A program under change: instructions keep their places (None: gone), so what is known of others stays true."""

    def __init__(self, program: Program):
        self._before, self.mesh, self.end = program, program.mesh, len(program.instructions)
        self.places: list[Instruction | None] = list(program.instructions)
        self.types = dict(program.types)
        self.made = {v: n for n, i in enumerate(program.instructions) for v in i.outputs}
        self.uses: defaultdict[int, list[int]] = defaultdict(list)  # places, once per use; `end`: it is fetched
        for n, i in enumerate(program.instructions):
            for v in i.inputs:
                self.uses[v].append(n)
        for v in program.fetches.values():
            self.uses[v].append(self.end)
        self._next = fresh(program)

    def at(self, n: int) -> Instruction:
        return cast("Instruction", self.places[n])

    def new_values(self, count: int) -> range:
        """Numbers that no value has."""
        self._next += count
        return range(self._next - count, self._next)

    def put(self, n: int, new: Instruction | None) -> None:
        """Replaces the instruction in place n, or removes it."""
        for v in self.at(n).inputs:
            self.uses[v].remove(n)
        self.places[n] = new
        if new is not None:
            self.made.update(dict.fromkeys(new.outputs, n))
            for v in new.inputs:
                bisect.insort(self.uses[v], n)

    def views(self, v: int) -> list[int]:
        """The value and all that lie in its memory."""
        makers = [self.at(n) for n in dict.fromkeys(self.uses[v]) if n < self.end]
        return [v, *(w for i in makers if i.traits.same_memory for w in self.views(i.outputs[0]))]

    def last_use(self, v: int) -> int:
        """Where the memory of v is used last; that of variables and feeds is never given back."""
        if self.at(self.made[v]).traits.given:
            return self.end
        return max((self.uses[w][-1] for w in self.views(v) if self.uses[w]), default=-1)

    def program(self) -> Program:
        return self._before.with_instructions([i for i in self.places if i is not None], self.types)


# ---- inside the kernels that use a value ---------------------------------------------------------


def rematerialise(program: Program) -> Program:
    """Moves copies of cheap maps into the fused kernels that use their results, where that saves memory and traffic.

    A gradient then reads a mean and a scale per row instead of the centred and the normalised array, and the input of
    an activation instead of all that was on the way.
    """
    draft = _Draft(program)
    for n, i in enumerate(program.instructions):
        if isinstance(i.attrs, (Map, Fused)):
            _Maker(draft, n).change()
    return draft.program()


class _Slice(NamedTuple):
    """What makes some values of a kernel again: instructions, and the large and small values that they take."""

    body: list[Instruction]
    full: dict[int, None]
    small: dict[int, None]


class _Maker:
    """A fused kernel (or map) whose results its readers may make themselves."""

    def __init__(self, draft: _Draft, at: int):
        self.draft, self.at, self.maker = draft, at, draft.at(at)
        self.body = self.maker.body or (self.maker,)
        self.types = ChainMap(self.maker.inner_types(), draft.types)
        self.type = _largest(self.types[v] for i in self.body for v in i.outputs)

    def change(self) -> None:
        """Changes the program where that pays."""
        uses = self.draft.uses
        again = {v for i in self.body if _runs_again(i) for v in i.outputs}
        full = [v for v in self.maker.outputs if v in again and uses[v] and self._is_full(v)]
        candidates = [v for v in full if all(map(self._takes, dict.fromkeys(uses[v])))]
        for chosen in [candidates, *([v] for v in candidates)] if candidates else []:
            if self._attempt(chosen, list(dict.fromkeys(n for v in chosen for n in uses[v]))):
                return

    def _is_full(self, v: int) -> bool:
        t = self.types[v]
        return t.local_dims == self.type.local_dims and not t.partial

    def _takes(self, n: int) -> bool:
        """Whether the loops of the instruction in place n are those of the maker."""
        if n == self.draft.end or not isinstance((i := self.draft.at(n)).attrs, (Map, Fused)):
            return False
        inside = ChainMap(i.inner_types(), self.draft.types)
        full = _largest(inside[v] for j in i.leaves() for v in (*j.inputs, *j.outputs))
        rows = i.attrs.rows if isinstance(i.attrs, Fused) else None
        return full.local_dims == self.type.local_dims and rows in (None, self._rows(), Shape())

    def _rows(self) -> Shape:
        a = self.maker.attrs
        return a.rows if isinstance(a, Fused) and a.rows else Shape(self.type.shape[:-1])

    def _slice(self, chosen: Sequence[int], there: Iterable[int]) -> _Slice:
        """How to make the chosen values from what the maker reads, its rows, or what is there."""
        needed, stop = dict.fromkeys(chosen), set(there) - set(chosen)
        body: list[Instruction] = []
        full, small = dict[int, None](), dict[int, None]()
        for one in reversed(self.body):
            makes = [v for v in one.outputs if v in needed and v not in stop]
            if makes and one.traits.pointwise and self._is_full(makes[0]):
                part = needed_part(one, makes, self.types)
                body.insert(0, part)
                needed.update(dict.fromkeys(part.inputs))
        made = {v for one in body for v in one.outputs}
        for v in (v for v in needed if v not in made):
            whole = self.types[v].max_elements(self.draft.mesh)
            large = 4 * whole > self.type.max_elements(self.draft.mesh)
            (full if large else small)[v] = None
        return _Slice(body, full, small)

    def _attempt(self, chosen: Sequence[int], places: Sequence[int]) -> bool:
        """Lets the readers in these places make the chosen values, if they can and it pays."""
        draft = self.draft
        parts = {n: self._slice(chosen, draft.at(n).inputs) for n in places}
        if not all(self._fits(draft.at(n), part) for n, part in parts.items()) or not self._pays(chosen, parts):
            return False
        known = (*self.maker.inputs, *self.maker.outputs)
        rows = dict.fromkeys(v for part in parts.values() for v in part.small if v not in known)
        outputs = (*(v for v in self.maker.outputs if v not in chosen), *rows)
        types = {v: self.types[v] for v in outputs}
        readers = {n: self._joined(draft.at(n), part) for n, part in parts.items()}
        draft.types.update(types)
        whole = self.maker.replaced(outputs=(*self.maker.outputs, *rows))
        draft.put(self.at, needed_part(whole, outputs, draft.types) if outputs else None)
        for n, i in readers.items():
            draft.put(n, i)
        return True

    def _fits(self, i: Instruction, part: _Slice) -> bool:
        """Whether the reader can run the slice, and few enough operations with it."""
        maps = [one.attrs.expr for one in part.body if isinstance(one.attrs, Map)]
        slow = len(part.body) - len(maps) + sum(s.function in SLOW for expr in maps for s in expr.steps)
        together = [*part.body, *i.leaves()]
        operands = {v for one in together for v in (*one.inputs, *one.outputs)}
        return (
            bool(part.body)
            and all(v in self.maker.inputs or v in i.inputs for v in part.full)
            and slow <= MOST_SLOW
            and sum(expr.flops for expr in maps) <= MOST_FLOPS
            and len(together) <= MAX_BODY
            and len(operands) <= MAX_OPERANDS
        )

    def _pays(self, chosen: Sequence[int], parts: Mapping[int, _Slice]) -> bool:
        """Whether fewer bytes are moved, and no more are held."""
        held = moved = -sum(self._bytes(v) for v in chosen)
        extended: dict[int, None] = {}
        for n, part in parts.items():
            inputs = self.draft.at(n).inputs
            moved -= sum(self._bytes(v) for v in chosen if v in inputs)
            moved += sum(self._bytes(v) for v in part.full if v not in inputs)
            extended.update(dict.fromkeys(v for v in part.full if self.draft.last_use(v) < n))
        return held + sum(map(self._bytes, extended)) <= 0 and moved < 0

    def _bytes(self, v: int) -> int:
        return self.types[v].max_bytes(self.draft.mesh)

    def _joined(self, i: Instruction, part: _Slice) -> Instruction:
        """The reader with the slice before its own instructions."""
        made = [v for one in part.body for v in one.outputs]
        again = dict(zip(made, self.draft.new_values(len(made)), strict=True))
        whole = [renamed_values(one, again) for one in (*part.body, *(i.body or (i,)))]
        if isinstance(i.attrs, Map) and all(isinstance(one.attrs, Map) for one in whole):
            one = flattened(whole, i.outputs)
            if len(one.inputs) <= MAX_INPUTS and len(one.of(Map).expr.steps) <= MAX_STEPS:
                return one
        types = ChainMap({n: self.types[v] for v, n in again.items()}, i.inner_types(), self.draft.types)
        inputs, inner = enclosed(whole, i.outputs, types)
        rows = i.attrs.rows if isinstance(i.attrs, Fused) else self._rows()
        return Instruction(Fused(rows, tuple(whole), inner), inputs, i.outputs, i.source)


def _runs_again(i: Instruction) -> bool:
    """Whether a reader can make its results: sums over rows do not run again, and are small."""
    return i.traits.pointwise


def _largest(types: Iterable[LocalType]) -> LocalType:
    """The first of those with the most dims: what the loops of a fused kernel run over."""
    return max(types, key=lambda t: len(t.shape))


# ---- for a limit of memory -----------------------------------------------------------------------


def fit_memory(program: Program, limit_bytes: int, total: Memory) -> Program:
    """Recomputes values until the memory of a rank fits: residual streams stay, what lies between them goes.

    Where most memory is in use, the waiting value that frees most bytes for its price is computed again just before
    its next use, with all that it is made of back to values that are there anyway.

    Args:
        program: After all other passes.
        limit_bytes: Most bytes of variables, feeds, arena and workspace together.
        total: Bytes that a program needs, as its plan says.

    Raises:
        ConfigError: Recomputing does not suffice; names the least memory it comes down to.
    """
    needed, prices = total(program), _Prices(program)
    arena = prices.plan(program).arena_bytes
    now, best = needed, program
    while now > limit_bytes:
        rest = now - arena  # changes little, but a part of a fused kernel may need more scratch
        while arena + rest > limit_bytes:
            smaller = _with_smaller_arena(best, arena, prices)
            if smaller is None:
                raise ConfigError(
                    f"the step needs {total(best):,} bytes per rank with full rematerialisation,"
                    f" {needed:,} without; the limit is {limit_bytes:,}.",
                    "Split more dimensions over the mesh, store variables split, or make batches smaller.",
                )
            best, arena = smaller
        now = total(best)
    return best


def _with_smaller_arena(program: Program, arena: int, prices: _Prices) -> tuple[Program, int] | None:
    """A program with a smaller arena; None where recomputing some values does not give any."""
    for _ in range(PATIENCE):
        step = _Peak(program, prices).without_best_value()
        if step is None:
            return None
        program, now = step, prices.plan(step).arena_bytes
        if now < arena:
            return program, now
    return None


class _Prices:
    """Bytes of values and costs of instructions of the largest rank, remembered between steps."""

    def __init__(self, program: Program):
        self.origin = dict.fromkeys(program.mesh.names, 0)
        self._bytes: dict[LocalType, int] = {}
        self._costs: dict[tuple[int, ...], int] = {}
        self._last: tuple[Program, MemoryPlan] | None = None

    def plan(self, program: Program) -> MemoryPlan:
        if self._last is None or program is not self._last[0]:
            self._last = program, plan_memory(program, self.origin)
        return self._last[1]

    def bytes(self, program: Program, v: int) -> int:
        t = program.types[v]
        if t not in self._bytes:
            self._bytes[t] = aligned_bytes(t, program, self.origin)
        return self._bytes[t]

    def cost(self, program: Program, i: Instruction) -> int:
        """Operations that take as long as the instruction."""
        if i.outputs not in self._costs:
            moved = sum(self.bytes(program, v) for v in (*i.inputs, *i.outputs))
            flops = local_flops(i, program, self.origin)
            self._costs[i.outputs] = 0 if i.traits.free else flops + FLOP_PER_BYTE * moved
        return self._costs[i.outputs]


class _Repeat(NamedTuple):
    """What it takes to have a value again: places to repeat, and values that must live longer at the peak."""

    places: dict[int, None]
    kept: dict[int, None]


class _Peak:
    """A program at the instruction where its arena is fullest."""

    def __init__(self, program: Program, prices: _Prices):
        self.program, self.prices, self.draft = program, prices, _Draft(program)
        self.plan = prices.plan(program)
        self.at = max(range(len(self.plan.live_bytes)), key=lambda n: self.plan.live_bytes[n])
        self._found: dict[int, list[int]] = {}

    def without_best_value(self) -> Program | None:
        """The program with the best value of all that wait here computed again later."""
        found = [(*worth, v) for v in self.program.types if (worth := self._worth(v))]
        if not found:
            return None
        _, repeat, v = max(found, key=lambda one: one[0])
        return self._rewritten(v, repeat)

    def _uses(self, v: int) -> list[int]:
        """Places that use the value or a view of it; views themselves do not count."""
        if v not in self._found:
            draft = self.draft
            uses = {n for w in draft.views(v) for n in draft.uses[w]}
            self._found[v] = sorted(n for n in uses if n == draft.end or not draft.at(n).traits.same_memory)
        return self._found[v]

    def _in_arena(self, v: int) -> bool:
        return isinstance(self.plan.root(v), int)

    def _worth(self, v: int) -> tuple[float, _Repeat] | None:
        """(bytes freed at the peak per cost, how) where v waits at the peak for a later use."""
        made = self.draft.made[v]
        if made >= self.at or self.draft.at(made).traits.same_memory or not self._in_arena(v):
            return None
        uses = self._uses(v)
        later = [n for n in uses if n > self.at]
        if not later or self.at in uses or later[-1] == self.draft.end:
            return None
        repeat = self._with_maker(v, _Repeat({}, {}))
        if repeat is None:
            return None
        freed = self.prices.bytes(self.program, v) - sum(self.prices.bytes(self.program, w) for w in repeat.kept)
        price = 1 + sum(self.prices.cost(self.program, self.draft.at(n)) for n in repeat.places)
        return (freed / price, repeat) if freed > 0 else None

    def _with_maker(self, v: int, repeat: _Repeat) -> _Repeat | None:
        """``repeat`` and what makes v again; None where that is impossible or too much."""
        n = self.draft.made[v]
        if not self.draft.at(n).traits.repeatable or len(repeat.places) > MOST_CLONES:
            return None
        repeat = _Repeat({**repeat.places, n: None}, repeat.kept)
        for x in self.draft.at(n).inputs:
            if self.draft.made[x] not in repeat.places and not self._is_there(x):
                repeat = self._with_maker(x, repeat) or repeat._replace(kept={**repeat.kept, x: None})
        return repeat

    def _is_there(self, x: int) -> bool:
        """Whether x is in memory at the peak anyway, or not made before."""
        if not self._in_arena(x) or self.draft.made[x] >= self.at:
            return True
        while (i := self.draft.at(self.draft.made[x])).traits.same_memory:
            x = i.inputs[0]
        return any(n >= self.at for n in self._uses(x))

    def _rewritten(self, v: int, repeat: _Repeat) -> Program:
        """The program with clones before the first later use, which that and all others take."""
        draft, views = self.draft, self.draft.views(v)
        use = next(n for n in self._uses(v) if n > self.at)
        types, new, clones = dict(draft.types), dict[int, int](), list[Instruction]()
        waiting = [draft.made[w] for w in views[1:] if any(n > self.at for n in draft.uses[w])]
        places = sorted({*repeat.places, *(n for n in waiting if n < use)})
        wanted = {x for n in places for x in draft.at(n).inputs} | set(views)
        for n in places:
            i = needed_part(draft.at(n), wanted, types)
            inside = [x for x in i.inner_types() if x not in i.outputs]
            own = dict(zip((*i.outputs, *inside), draft.new_values(len(i.outputs) + len(inside)), strict=True))
            types.update((own[x], types[x]) for x in i.outputs)
            clones.append(renamed_values(i, {**new, **own}))
            new.update((x, own[x]) for x in i.outputs)
        again = {w: new[w] for w in views if w in new}
        old = self.program.instructions
        late = (renamed_values(i, again) if any(x in again for x in i.inputs) else i for i in old[use:])
        return dce(self.program.with_instructions((*old[:use], *clones, *late), types))


# ---- parts and copies of instructions ------------------------------------------------------------


def needed_part(i: Instruction, wanted: Iterable[int], types: Mapping[int, LocalType]) -> Instruction:
    """A fused kernel or map that makes only what is wanted of its results; anything else as it is."""
    wanted, a = set(wanted), i.attrs
    outputs = tuple(v for v in i.outputs if v in wanted)
    if outputs == i.outputs:
        return i
    if isinstance(a, Map):
        results = tuple(r for r, v in zip(a.expr.results, i.outputs, strict=True) if v in wanted)
        return i.replaced(outputs=outputs, expr=pruned(a.expr._replace(results=results)))
    if not isinstance(a, Fused):
        return i
    body = needed_for(a.body, outputs)
    inner = {v: types.get(v) or a.inner[v] for one in body for v in one.outputs if v not in outputs}
    inputs = tuple(v for v in i.inputs if any(v in one.inputs for one in body))
    return Instruction(Fused(a.rows, tuple(body), inner), inputs, outputs, i.source)


def renamed_values(i: Instruction, new: Mapping[int, int]) -> Instruction:
    """The instruction on other values, those in its body included."""
    ins, outs = (tuple(new.get(v, v) for v in vs) for vs in (i.inputs, i.outputs))
    if not isinstance(i.attrs, Region):
        return i.replaced(inputs=ins, outputs=outs)
    body = tuple(renamed_values(one, new) for one in i.body)
    inner = {new.get(v, v): t for v, t in i.attrs.inner.items()}
    return i.replaced(inputs=ins, outputs=outs, body=body, inner=inner)
