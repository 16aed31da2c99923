"""Segments compute again what they would otherwise load: less memory and less traffic at once.

A normalisation or activation leaves arrays behind that only its gradient reads.  Where the gradient
can make them from what it reads anyway, or from one array instead of several, it does, and nothing
is stored: a mean and a scale per row instead of the centred and the normalised array, the input of
an activation instead of all that was on the way.
Reductions do not run again; their results are small and are stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from meshmpi.dims import Shape
from meshmpi.passes.fuse import MAX_INPUTS, MAX_STEPS, flattened
from meshmpi.passes.recompute import needed_part, renamed_values
from meshmpi.passes.rewrite import fetched, fresh, users
from meshmpi.passes.segments import MAX_BODY, MAX_OPERANDS
from meshmpi.program import Instruction, Program

MOST_FLOPS, MOST_SLOW = 24, 2
"""Operations that may run again for each element, and of these the slow ones.  Status: assumption;
an element written and read again takes as long as some 50 simple operations."""
SLOW = ("exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "power", "random")


def recompute_cheap(program: Program) -> Program:
    """Moves copies of cheap maps into the segments that use their results, where that saves both
    memory and traffic.

    Args:
        program: After `form_segments`.
    """
    facts = _Facts(program)
    for outputs in [i.outputs for i in program.instructions if i.kind in ("map", "segment")]:
        changed = _Leaner(facts, outputs).result()
        if changed is not None:
            facts = _Facts(changed)
    return facts.program


class _Facts:
    """What is asked of a program again and again, found once."""

    def __init__(self, program: Program):
        self.program, self.kept = program, fetched(program)

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        return users(self.program)

    @cached_property
    def position(self) -> dict[tuple[int, ...], int]:
        """Outputs -> number of the instruction."""
        return {i.outputs: n for n, i in enumerate(self.program.instructions)}

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """Value -> its last use as things are; variables and feeds stay for ever."""
        end = len(self.program.instructions)
        out = dict.fromkeys(self.program.types, -1)
        for n, i in enumerate(self.program.instructions):
            out.update(dict.fromkeys(i.inputs, n))
            if i.kind in ("read", "feed"):
                out.update(dict.fromkeys(i.outputs, end))
        for i in reversed(self.program.instructions):  # a view keeps what it looks at
            if i.kind == "view":
                out[i.inputs[0]] = max(out[i.inputs[0]], out[i.outputs[0]])
        for i in self.program.instructions:
            if i.kind == "read":
                out[i.outputs[0]] = end
        return out


class _Slice(NamedTuple):
    """What makes some values of a segment again: instructions, and what they take."""

    body: list[Instruction]
    full: dict[int, None]
    small: dict[int, None]


class _Leaner:
    """One segment (or map) whose results others may make themselves."""

    def __init__(self, facts: _Facts, outputs: tuple[int, ...]):
        self.facts, program = facts, facts.program
        self.program, self.at = program, facts.position[outputs]
        self.maker = program.instructions[self.at]
        self.body = self.maker.attrs.get("body", (self.maker,))
        self.types = {**program.types, **self.maker.inner_types()}
        self.shape = max((self.types[v].shape for i in self.body for v in i.outputs), key=len)
        self.type = next(self.types[v] for i in self.body for v in i.outputs
                         if self.types[v].shape == self.shape)  # fmt: skip

    def result(self) -> Program | None:
        """The program changed, or None where that does not pay."""
        used, kept = self.facts.users, self.facts.kept
        users_of = {v: used[v] for v in self.maker.outputs if v not in kept and used[v]}
        candidates = [v for v, us in users_of.items() if self._is_full(v)
                      and all(self._takes(i) for i in us)]  # fmt: skip
        for chosen in [candidates, *([v] for v in candidates)] if candidates else []:
            readers = {i.outputs: i for v in chosen for i in users_of[v]}
            changed = self._attempt(chosen, list(readers.values()))
            if changed is not None:
                return changed
        return None

    def _is_full(self, v: int) -> bool:
        t = self.types[v]
        return (t.shape, t.splits, t.partial) == (self.shape, self.type.splits, ())

    def _takes(self, i: Instruction) -> bool:
        """Whether the loops of an instruction are those of the maker."""
        if i.kind not in ("map", "segment") or i.outputs == self.maker.outputs:
            return False
        inside = {**self.program.types, **i.inner_types()}
        shape = max((inside[v].shape for j in i.leaves() for v in (*j.inputs, *j.outputs)), key=len)
        rows = i.attrs.get("rows")
        return shape == self.shape and (rows is None or rows in (self._rows(), Shape()))

    def _rows(self) -> Shape:
        return self.maker.attrs.get("rows") or Shape(self.shape[:-1])

    def _slice(self, chosen: Sequence[int], there: Iterable[int]) -> _Slice:
        """How to make the chosen values from what the maker reads, its rows, or what is there."""
        needed, stop = dict.fromkeys(chosen), set(there) - set(chosen)
        body: list[Instruction] = []
        full, small = dict[int, None](), dict[int, None]()
        for one in reversed(self.body):
            makes = [v for v in one.outputs if v in needed and v not in stop]
            if makes and one.kind in ("map", "random") and self._is_full(makes[0]):
                part = needed_part(one, makes, self.types)
                body.insert(0, part)
                needed.update(dict.fromkeys(part.inputs))
        made = {v for one in body for v in one.outputs}
        for v in (v for v in needed if v not in made):
            whole = self.types[v].max_elements(self.program.mesh)
            large = 4 * whole > self.type.max_elements(self.program.mesh)
            (full if large else small)[v] = None
        return _Slice(body, full, small)

    def _attempt(self, chosen: Sequence[int], readers: Sequence[Instruction]) -> Program | None:
        parts = [self._slice(chosen, i.inputs) for i in readers]
        if not all(self._fits(i, part) for i, part in zip(readers, parts, strict=True)):
            return None
        if not self._pays(chosen, readers, parts):
            return None
        number = fresh(self.program)
        types = dict(self.program.types)
        new: dict[tuple[int, ...], Instruction] = {}
        for i, part in zip(readers, parts, strict=True):
            made = [v for one in part.body for v in one.outputs]
            again = dict(zip(made, itertools.count(number), strict=False))
            number += len(made)
            new[i.outputs] = self._joined(i, part, again)
        known = (*self.maker.inputs, *self.maker.outputs)
        rows = dict.fromkeys(v for part in parts for v in part.small if v not in known)
        outputs = (*(v for v in self.maker.outputs if v not in chosen), *rows)
        types.update((v, self.types[v]) for v in outputs)
        out = [new.get(i.outputs, i) if i.outputs else i for i in self.program.instructions]
        if not outputs:
            del out[self.at]
            return self.program.with_instructions(out, types)
        whole = self.maker.replaced(outputs=(*self.maker.outputs, *rows))
        out[self.at] = needed_part(whole, outputs, types)
        return self.program.with_instructions(out, types)

    def _fits(self, i: Instruction, part: _Slice) -> bool:
        steps = [s for one in part.body if one.kind == "map" for s in one.attrs["expr"].steps]
        slow = sum(s.function in SLOW for s in steps)
        slow += sum(one.kind == "random" for one in part.body)
        flops = sum(one.attrs["expr"].flops for one in part.body if one.kind == "map")
        together = [*part.body, *i.leaves()]
        operands = len({v for one in together for v in (*one.inputs, *one.outputs)})
        if any(v not in self.maker.inputs and v not in i.inputs for v in part.full):
            return False  # a stored result of the maker that this reader does not read
        return (bool(part.body) and slow <= MOST_SLOW and flops <= MOST_FLOPS
                and len(together) <= MAX_BODY and operands <= MAX_OPERANDS)  # fmt: skip

    def _pays(
        self, chosen: Sequence[int], readers: Sequence[Instruction], parts: Sequence[_Slice]
    ) -> bool:
        """Whether fewer bytes are held, and fewer moved."""
        held = -sum(self._bytes(v) for v in chosen)
        moved = held
        extended: dict[int, None] = {}
        for i, part in zip(readers, parts, strict=True):
            moved -= sum(self._bytes(v) for v in chosen if v in i.inputs)
            for v in part.full:
                moved += 0 if v in i.inputs else self._bytes(v)
                if self.facts.last_uses[v] < self.facts.position[i.outputs]:
                    extended[v] = None
        held += sum(map(self._bytes, extended))
        return held <= 0 and moved < 0

    def _bytes(self, v: int) -> int:
        return self.types[v].max_bytes(self.program.mesh)

    def _joined(self, i: Instruction, part: _Slice, again: dict[int, int]) -> Instruction:
        """The reader with the slice before its own instructions."""
        body = [renamed_values(one, again) for one in part.body]
        own = [renamed_values(one, again) for one in i.attrs.get("body", (i,))]
        inner = {n: self.types[v] for v, n in again.items()} | dict(i.attrs.get("inner", {}))
        whole = [*body, *own]
        if i.kind == "map" and all(one.kind == "map" for one in whole):
            one = flattened(whole, i.outputs)
            if len(one.inputs) <= MAX_INPUTS and len(one.attrs["expr"].steps) <= MAX_STEPS:
                return one
        made = {v for one in whole for v in one.outputs}
        inputs = tuple(dict.fromkeys(v for one in whole for v in one.inputs if v not in made))
        rows = i.attrs.get("rows", self._rows())
        attrs = {"rows": rows, "body": tuple(whole), "inner": inner}
        return Instruction("segment", inputs, i.outputs, attrs, i.source)
