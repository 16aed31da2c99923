"""Fused kernels compute again what they would otherwise load: less memory and less traffic at once.

A normalisation or activation leaves arrays behind that only its gradient reads.  Where the gradient
can make them from what it reads anyway, or from one array instead of several, it does, and nothing
is stored: a mean and a scale per row instead of the centred and the normalised array, the input of
an activation instead of all that was on the way.
Reductions do not run again; their results are small and are stored.
"""

from __future__ import annotations

import bisect
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from meshmpi.compiler.passes.fuse import MAX_INPUTS, MAX_STEPS, flattened
from meshmpi.compiler.passes.fused_kernels import MAX_BODY, MAX_OPERANDS
from meshmpi.compiler.passes.recompute import needed_part, renamed_values
from meshmpi.compiler.passes.rewrite import fetched, fresh
from meshmpi.dims import Shape
from meshmpi.ir.kinds import Fused, Map
from meshmpi.ir.program import Instruction, LocalType, Program

MOST_FLOPS, MOST_SLOW = 24, 2
"""Operations that may run again for each element, and of these the slow ones.  Status: assumption;
an element written and read again takes as long as some 50 simple operations."""
AGAIN = ("map", "random")
"""Kinds that may run again in the fused kernels that use their results."""
SLOW = ("exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "power", "random")


def rematerialise(program: Program) -> Program:
    """Moves copies of cheap maps into the fused kernels that use their results, where that saves both
    memory and traffic.

    Args:
        program: After `form_fused_kernels`.
    """
    draft = _Draft(program)
    for n, i in enumerate(program.instructions):
        if i.kind in ("map", "fused"):
            _Leaner(draft, n).change()
    return draft.program()


class _Draft:
    """A program under change: instructions keep their places, so what is known of others stays true.

    Attributes:
        places: The instructions; None where one is gone.
        types: Of all values outside bodies.
        uses: Value -> places that use it, ascending, once per use.
        kept: Values that are fetched.
        lookups: Uses that were looked at, a measure of the work.
    """

    def __init__(self, program: Program):
        self._before, self._changed = program, False
        self.mesh, self.kept, self.lookups = program.mesh, fetched(program), 0
        self.places: list[Instruction | None] = list(program.instructions)
        self.types = dict(program.types)
        self.uses: dict[int, list[int]] = {v: [] for v in program.types}
        self._maker: dict[int, int] = {}
        for n, i in enumerate(program.instructions):
            self._maker.update(dict.fromkeys(i.outputs, n))
            for v in i.inputs:
                self.uses[v].append(n)
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
        self.places[n], self._changed = new, True
        if new is not None:
            self._maker.update(dict.fromkeys(new.outputs, n))
            for v in new.outputs:
                self.uses.setdefault(v, [])
            for v in new.inputs:
                bisect.insort(self.uses[v], n)

    def last_use(self, v: int) -> int:
        """Where memory of v is used last, by itself or a view; variables stay for ever."""
        self.lookups += 1
        end, maker = len(self.places), self.at(self._maker[v])
        if maker.kind == "read":
            return end
        last = self.uses[v][-1] if self.uses[v] else end if maker.kind == "feed" else -1
        views = (self.at(n) for n in dict.fromkeys(self.uses[v]))
        return max([last, *(self.last_use(i.outputs[0]) for i in views if i.kind == "view")])

    def program(self) -> Program:
        if not self._changed:
            return self._before
        return self._before.with_instructions([i for i in self.places if i is not None], self.types)


class _Slice(NamedTuple):
    """What makes some values of a fused kernel again: instructions, and what they take."""

    body: list[Instruction]
    full: dict[int, None]
    small: dict[int, None]


class _Leaner:
    """One fused kernel (or map) whose results others may make themselves."""

    def __init__(self, draft: _Draft, at: int):
        self.draft, self.at, self.maker = draft, at, draft.at(at)
        self.body = self.maker.body or (self.maker,)
        self.types = ChainMap(self.maker.inner_types(), draft.types)
        self.type = _largest(self.types[v] for i in self.body for v in i.outputs)

    def change(self) -> None:
        """Changes the program where that pays."""
        draft = self.draft
        users_of = {v: draft.uses[v] for v in self.maker.outputs if v not in draft.kept and draft.uses[v]}
        # Sums do not run again: a reader could not make what a reduction of the body makes.
        again = {v for i in self.body if i.kind in AGAIN for v in i.outputs}
        candidates = [
            v
            for v, us in users_of.items()
            if v in again and self._is_full(v) and all(self._takes(n) for n in dict.fromkeys(us))
        ]
        for chosen in [candidates, *([v] for v in candidates)] if candidates else []:
            if self._attempt(chosen, list(dict.fromkeys(n for v in chosen for n in users_of[v]))):
                return

    def _is_full(self, v: int) -> bool:
        t = self.types[v]
        return t.local_dims == self.type.local_dims and not t.partial

    def _takes(self, n: int) -> bool:
        """Whether the loops of the instruction in place n are those of the maker."""
        i = self.draft.at(n)
        self.draft.lookups += 1
        if i.kind not in ("map", "fused") or n == self.at:
            return False
        inside = ChainMap(i.inner_types(), self.draft.types)
        full = _largest(inside[v] for j in i.leaves() for v in (*j.inputs, *j.outputs))
        rows = i.attrs.rows if isinstance(i.attrs, Fused) else None
        return full.local_dims == self.type.local_dims and (rows is None or rows in (self._rows(), Shape()))

    def _rows(self) -> Shape:
        fused = self.maker.attrs
        return fused.rows if isinstance(fused, Fused) else Shape(self.type.shape[:-1])

    def _slice(self, chosen: Sequence[int], there: Iterable[int]) -> _Slice:
        """How to make the chosen values from what the maker reads, its rows, or what is there."""
        needed, stop = dict.fromkeys(chosen), set(there) - set(chosen)
        body: list[Instruction] = []
        full, small = dict[int, None](), dict[int, None]()
        for one in reversed(self.body):
            makes = [v for v in one.outputs if v in needed and v not in stop]
            if makes and one.kind in AGAIN and self._is_full(makes[0]):
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
        readers = dict[int, Instruction]()
        for n, part in parts.items():
            made = [v for one in part.body for v in one.outputs]
            again = dict(zip(made, draft.new_values(len(made)), strict=True))
            readers[n] = self._joined(draft.at(n), part, again)
        draft.types.update(types)
        whole = self.maker.replaced(outputs=(*self.maker.outputs, *rows))
        draft.put(self.at, needed_part(whole, outputs, draft.types) if outputs else None)
        for n, i in readers.items():
            draft.put(n, i)
        return True

    def _fits(self, i: Instruction, part: _Slice) -> bool:
        steps = [s for one in part.body if one.kind == "map" for s in one.of(Map).expr.steps]
        slow = sum(s.function in SLOW for s in steps)
        slow += sum(one.kind == "random" for one in part.body)
        flops = sum(one.of(Map).expr.flops for one in part.body if one.kind == "map")
        together = [*part.body, *i.leaves()]
        operands = len({v for one in together for v in (*one.inputs, *one.outputs)})
        if any(v not in self.maker.inputs and v not in i.inputs for v in part.full):
            return False  # a stored result of the maker that this reader does not read
        return (
            bool(part.body)
            and slow <= MOST_SLOW
            and flops <= MOST_FLOPS
            and len(together) <= MAX_BODY
            and operands <= MAX_OPERANDS
        )

    def _pays(self, chosen: Sequence[int], parts: Mapping[int, _Slice]) -> bool:
        """Whether fewer bytes are held, and fewer moved."""
        held = -sum(self._bytes(v) for v in chosen)
        moved = held
        extended: dict[int, None] = {}
        for n, part in parts.items():
            inputs = self.draft.at(n).inputs
            moved -= sum(self._bytes(v) for v in chosen if v in inputs)
            for v in part.full:
                moved += 0 if v in inputs else self._bytes(v)
                if self.draft.last_use(v) < n:
                    extended[v] = None
        held += sum(map(self._bytes, extended))
        return held <= 0 and moved < 0

    def _bytes(self, v: int) -> int:
        return self.types[v].max_bytes(self.draft.mesh)

    def _joined(self, i: Instruction, part: _Slice, again: dict[int, int]) -> Instruction:
        """The reader with the slice before its own instructions."""
        body = [renamed_values(one, again) for one in part.body]
        own = [renamed_values(one, again) for one in i.body or (i,)]
        inner = {n: self.types[v] for v, n in again.items()} | i.inner_types()
        whole = [*body, *own]
        if i.kind == "map" and all(one.kind == "map" for one in whole):
            one = flattened(whole, i.outputs)
            if len(one.inputs) <= MAX_INPUTS and len(one.of(Map).expr.steps) <= MAX_STEPS:
                return one
        made = {v for one in whole for v in one.outputs}
        inputs = tuple(dict.fromkeys(v for one in whole for v in one.inputs if v not in made))
        rows = i.attrs.rows if isinstance(i.attrs, Fused) else self._rows()
        return Instruction(Fused(rows, tuple(whole), inner), inputs, i.outputs, i.source)


def _largest(types: Iterable[LocalType]) -> LocalType:
    """The first of those with the most dims: what the loops of a fused kernel run over."""
    return max(types, key=lambda t: len(t.shape))
