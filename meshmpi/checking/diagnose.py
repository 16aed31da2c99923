"""Finds the operation that made the first NaN or infinity of a step, by repeating the step instruction by instruction.

The search goes back from wrong results over wrong inputs to an instruction with correct inputs. NaN and +inf count as
wrong. -inf is followed only if an instruction made NaN or +inf from it, because masks consist of -inf. A NaN that
nobody uses, such as the unused branch of `mm.where`, is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.checking.observe import watched
from meshmpi.compiler.passes.memory import plan_memory
from meshmpi.errors import place
from meshmpi.ir.kinds import Feed, Map, Read
from meshmpi.ir.program import Collective, Instruction, LocalType, Program, Source
from meshmpi.ir.scalar import FLOATS
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.executor import Executor, RankState, instruction_workspace
from meshmpi.runtime.mesh_protocol import AnyMesh


class Found(NamedTuple):
    """What a rank's block of a value held just after it was made."""

    low: float  # least value, or NaN
    high: float  # greatest value, or NaN
    nan: int = 0  # number of NaN; likewise the next two
    inf: int = 0
    minus_inf: int = 0
    elements: int = 0
    index: tuple[int, ...] = ()  # global, of the first NaN, else of the first +inf, else of the first -inf

    @property
    def wrong(self) -> bool:
        """Whether it holds NaN or +inf."""
        return self.nan > 0 or self.inf > 0

    @property
    def finite(self) -> bool:
        return not (self.wrong or self.minus_inf)


class Culprit(NamedTuple):
    """The first wrong value of a step."""

    instruction: Instruction  # what made it
    type: LocalType
    rank: int  # the lowest rank on which its inputs were in order and it was not
    found: Found  # what it held there
    inputs: tuple[tuple[str, Found], ...] = ()  # (name, what it held there) of each float input
    later: Source | None = None  # name and place of what made NaN or +inf of its -inf, or None
    also: int = 0  # how many other instructions on the way back made wrong values of right ones

    def __str__(self) -> str:
        i, f, t = self.instruction, self.found, self.type
        kinds = [(f.nan, "NaN"), (f.inf, "+inf"), (f.minus_inf, "-inf")]
        counts = " and ".join(f"{n:,} {what}" for n, what in kinds if n)
        at = ", ".join(f"{d.name}={k}" for d, k in zip(t.shape, f.index, strict=True))
        held = f"holds {counts} among {f.elements:,} values on rank {self.rank}"
        held += f", first at [{at}]" if at else ""
        if isinstance(i.attrs, Feed):
            return f"feed '{i.attrs.name}' {t} {held}"
        if isinstance(i.attrs, Read):
            return f"variable '{i.attrs.variable}' {t} {held}, before the step"
        text = f"'{i.source.name}' {t}, made by {_operation(i)}{_place(i.source)}, {held}"
        for name, x in self.inputs:
            lies = f"lies in [{x.low:.6g}, {x.high:.6g}]"
            text += f"; its input {name} {lies if x.finite else f'holds {x.minus_inf:,} -inf'}"
        if self.later is not None:
            text += f"; it becomes wrong in '{self.later.name}'{_place(self.later)}"
        return text


def _place(source: Source) -> str:
    return f" at {place(source.file, source.line)}" if source.file else ""


def _operation(i: Instruction) -> str:
    """The kind of an instruction, with the functions and the tensors inside of it."""
    names: list[str] = []
    for one in i.leaves():
        functions = [s.function for s in one.attrs.expr.steps] if isinstance(one.attrs, Map) else []
        names += functions or [one.kind]
    inside = list(dict.fromkeys(one.source for one in i.leaves() if one.source != i.source))
    text = i.kind if names == [i.kind] else f"{i.kind} ({', '.join(dict.fromkeys(names))})"
    places = ", ".join(f"'{s.name}'{_place(s)}" for s in inside[:4] if s.name)
    return f"{text} of {places}" if places else text


def first_wrong(step: Any, program: Program | None, number: int) -> Culprit | None:
    """Runs a step once more and finds what made its first NaN or infinity.  Collective.

    Args:
        step: A `CompiledStep` with the feeds of that step still in place.
        program: What to run: the step as lowered, without updates; or None: the compiled program
            itself, whose updates must not have taken effect and take none now (`only_if`).
        number: Number of the step, for its random numbers.

    Returns:
        The culprit, the same on every rank; None where no fetch is wrong.
    """
    old = step.executor
    executor = old if program is None else Executor(program, step.mesh, step.variables, "numpy")
    for mine, theirs in zip(executor.states, old.states, strict=True):
        for name, block in mine.feeds.items():
            if block is not theirs.feeds[name]:
                np.copyto(block, theirs.feeds[name])
    before, executor.runtime.step = executor.runtime.step, number
    records = _watched_run(executor)
    executor.runtime.step = before
    ranks = {s.rank: {v: f for v, f in r.items() if not f.finite} for s, r in records}
    wrong = _everywhere(step.mesh, ranks)
    search = _Search(executor.program, wrong)
    culprit = search.culprit()
    if culprit is None:
        return None
    inputs = {
        s.rank: tuple((_name(search.maker[v]), r[v]) for v in culprit.instruction.inputs if v in r)
        for s, r in records
        if s.rank == culprit.rank
    }
    return culprit._replace(inputs=_everywhere(step.mesh, inputs)[culprit.rank])


def _name(i: Instruction) -> str:
    return f"'{i.attrs.label or i.source.name or i.kind}'"


def needed_bytes(program: Program) -> int:
    """Bytes that a rank allocates to run the program in addition to the compiled one."""
    origin = dict.fromkeys(program.mesh.names, 0)
    plan = plan_memory(program, origin, instruction_workspace)
    return plan.arena_bytes + max((instruction_workspace(i, program, origin) for i in program.instructions), default=0)


def _everywhere(mesh: AnyMesh, mine: Mapping[int, Any]) -> dict[int, Any]:
    """Rank -> value, of all ranks; collective."""
    return {rank: value for part in gathered(mesh, mine) for rank, value in part.items()}


def _watched_run(executor: Executor) -> list[tuple[RankState, dict[int, Found]]]:
    """The step, and what each float value held on each rank of this process."""
    records: list[tuple[RankState, dict[int, Found]]] = [(s, {}) for s in executor.states]
    for i in watched(executor):
        for state, found in records:
            for v in i.outputs:
                t = executor.program.types[v]
                if t.dtype in FLOATS:
                    found[v] = _look(state.arrays[v], t, executor.program, state.coordinates)
                    if i.traits.same_memory:
                        found[i.inputs[0]] = found[v]
    return records


def _look(x: np.ndarray, t: LocalType, program: Program, coordinates: Mapping[str, int]) -> Found:
    if x.size == 0:
        return Found(math.inf, -math.inf)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32) if x.dtype.name == "bfloat16" else x
        low, high = float(wide.min()), float(wide.max())
    if math.isfinite(low) and math.isfinite(high):
        return Found(low, high, elements=x.size)
    nan, inf, minus = np.isnan(wide), wide == np.inf, wide == -np.inf
    first = next(mask for mask in (nan, inf, minus) if mask.any())
    local = np.unravel_index(int(np.argmax(first)), x.shape)
    begins = [start for start, _ in t.block(program.mesh, coordinates)]
    index = tuple(int(k) + b for k, b in zip(local, begins, strict=True))
    counts = [int(np.count_nonzero(m)) for m in (nan, inf, minus)]
    return Found(low, high, counts[0], counts[1], counts[2], x.size, index)


class _Search:
    """The way back from wrong fetches; ``found``: rank -> value -> what it held, where that was not finite."""

    def __init__(self, program: Program, found: Mapping[int, Mapping[int, Found]]):
        self.program, self.found = program, found
        self.maker = {v: i for i in program.instructions for v in i.outputs}
        self.place = {v: k for k, i in enumerate(program.instructions) for v in i.outputs}

    def culprit(self) -> Culprit | None:
        """The earliest instruction that made a wrong value of right ones."""
        guilty = sorted(self._guilty(), key=lambda pair: (self.place[pair[0].outputs[0]], pair[1]))
        if not guilty:
            return None
        i, rank = guilty[0]
        others = len(dict.fromkeys(other.outputs for other, _ in guilty)) - 1
        origin = self._origin(i, rank)
        if origin is None:
            return self._made(i, rank)._replace(also=others)
        return self._made(*origin)._replace(later=i.source, also=others)

    def _made(self, i: Instruction, rank: int) -> Culprit:
        v = next(v for v in i.outputs if v in self.found[rank])
        return Culprit(i, self.program.types[v], rank, self.found[rank][v])

    def _wrong(self, v: int, rank: int) -> bool:
        return v in self.found[rank] and self.found[rank][v].wrong

    def _ranks(self, i: Instruction, rank: int) -> Sequence[int]:
        """The ranks whose inputs an output on ``rank`` is made of."""
        if isinstance(i.attrs, Collective):
            return self.program.mesh.group(rank, i.attrs.axes)
        return (rank,)

    def _guilty(self) -> Iterator[tuple[Instruction, int]]:
        waiting, seen = self._ends(), set[int]()
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            i = self.maker[v]
            for rank in self.found:
                if not self._wrong(v, rank):
                    continue
                sources = [x for x in i.inputs if any(self._wrong(x, r) for r in self._ranks(i, rank))]
                if not sources:
                    yield i, rank
                waiting += sources

    def _ends(self) -> list[int]:
        """Wrong values that fetches are, or that the flags among the fetches were made of."""
        ends: list[int] = []
        waiting = list(self.program.fetches.values())
        while waiting:
            v = waiting.pop()
            if self.program.types[v].dtype in FLOATS:
                ends.append(v)
            else:
                waiting += self.maker[v].inputs
        return ends

    def _origin(self, i: Instruction, rank: int) -> tuple[Instruction, int] | None:
        """What computed the -inf that ``i`` made a wrong value of; None where it is a mask's."""
        while True:
            step = [
                (v, r)
                for v in i.inputs
                for r in self._ranks(i, rank)
                if v in self.found.get(r, {}) and self.found[r][v].minus_inf
            ]
            if not step:
                break
            i, rank = self.maker[step[0][0]], step[0][1]
        literal = i.traits.given or any(
            isinstance(a, float) and math.isinf(a)
            for one in i.leaves()
            if isinstance(one.attrs, Map)
            for s in one.attrs.expr.steps
            for a in s.args
        )
        found_here = any(self.found[rank][v].minus_inf for v in i.outputs if v in self.found[rank])
        wrong = any(self._wrong(v, rank) for v in i.outputs)
        return (i, rank) if found_here and not literal and not wrong else None
