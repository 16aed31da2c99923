"""Values computed again where they are used later, until a program fits a limit of memory.

At the instruction where most memory is in use, values wait that were made earlier and are needed
later.  The one that frees most bytes for the time that it costs is computed again just before its
next use, with all that it is made of back to values that are there anyway; then the memory is
planned anew.  So residual streams stay and what lies between them goes, without a word about layers
in the model.  No collective runs twice, and random numbers come out the same, since they depend on
seed, name, step and index only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from meshmpi.compiler.passes.fuse import pruned
from meshmpi.compiler.passes.memory import MemoryPlan, Sharing, aligned_bytes, plan_memory
from meshmpi.compiler.passes.rewrite import fresh
from meshmpi.errors import ConfigError
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import Fused, Map
from meshmpi.ir.program import Instruction, LocalType, Program, Region

REPEATABLE = (
    "map",
    "fused",
    "transpose",
    "view",
    "iota",
    "random",
    "reduce",
    "slice",
    "pad",
    "concat",
    "gather",
    "contract",
    "conv",
    "tiled",
    "step",
    "take_shard",
    "cumsum",
)
"""Kinds that may run twice: no collective, nothing that writes."""
MOST_CLONES = 48
"""Instructions that may be repeated for one value.  Status: assumption."""
FLOP_PER_BYTE = 8.0
"""What moving one byte costs beside a floating-point operation.  Status: assumption."""

Memory = Callable[[Program], int]


def fit_memory(program: Program, limit_bytes: int, total: Memory) -> Program:
    """Recomputes values until the memory of a rank fits.

    Args:
        program: After all other passes.
        limit_bytes: Of variables, feeds, arena and workspace together.
        total: Bytes that a program needs, as its plan says.

    Raises:
        ConfigError: Recomputing does not suffice; names the least memory it comes down to.
    """
    needed, prices = total(program), _Prices(program)
    arena = prices.plan(program).arena_bytes
    now, best = needed, program
    while now > limit_bytes:
        beside_arena = now - arena  # changes little, but a part of a fused kernel may need more scratch
        while arena + beside_arena > limit_bytes:
            smaller = _with_lower_peak(best, arena, prices)
            if smaller is None:
                raise _out_of_reach(needed, total(best), limit_bytes)
            best, arena = smaller
        now = total(best)
    return best


def _out_of_reach(needed: int, least: int, limit_bytes: int) -> ConfigError:
    return ConfigError(
        f"the step needs {least:,} bytes per rank with everything recomputed that helps,"
        f" {needed:,} without; the limit is {limit_bytes:,}.",
        "Split more dimensions over the mesh, store variables split, or make batches smaller.",
    )


def _with_lower_peak(program: Program, arena: int, prices: _Prices, patience: int = 64) -> tuple[Program, int] | None:
    """A program with a smaller arena; None where some steps of recomputing do not give any."""
    for _ in range(patience):
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
        self._costs: dict[tuple[int, ...], float] = {}
        self._last = program, plan_memory(program, self.origin, _no_scratch)

    def plan(self, program: Program) -> MemoryPlan:
        if program is not self._last[0]:
            self._last = program, plan_memory(program, self.origin, _no_scratch)
        return self._last[1]

    def bytes(self, program: Program, v: int) -> int:
        t = program.types[v]
        if t not in self._bytes:
            self._bytes[t] = aligned_bytes(t, program, self.origin)
        return self._bytes[t]

    def cost(self, program: Program, i: Instruction) -> float:
        if i.outputs not in self._costs:
            moved = sum(self.bytes(program, v) for v in (*i.inputs, *i.outputs))
            flops = local_flops(i, program, self.origin)
            self._costs[i.outputs] = 0.0 if i.kind == "view" else flops + FLOP_PER_BYTE * moved
        return self._costs[i.outputs]


def _no_scratch(i: Instruction, program: Program, coordinates: Mapping[str, int]) -> int:
    return 0


@dataclass
class _Repeat:
    """What it takes to have a value again.

    Attributes:
        instructions: To repeat, in program order.
        kept: Values that must live longer at the peak than they would.
    """

    instructions: dict[int, Instruction] = field(default_factory=dict[int, Instruction])
    kept: dict[int, None] = field(default_factory=dict[int, None])


class _Peak:
    """A program at the instruction where its arena is fullest."""

    def __init__(self, program: Program, prices: _Prices):
        self.program, self.prices = program, prices
        plan = prices.plan(program)
        self.sharing = Sharing(program)
        self.at = max(range(len(plan.live_bytes)), key=lambda n: plan.live_bytes[n])
        self.made = {v: n for n, i in enumerate(program.instructions) for v in i.outputs}
        self.uses: dict[int, list[int]] = {v: [] for v in program.types}
        for n, i in enumerate(program.instructions):
            for v in i.inputs:
                self.uses[v].append(n)
        for v in program.fetches.values():
            self.uses[v].append(len(program.instructions))
        self._found: dict[int, list[int]] = {}
        self.views: dict[int, list[int]] = {}
        for i in program.instructions:
            if i.kind == "view":
                self.views.setdefault(i.inputs[0], []).append(i.outputs[0])

    def without_best_value(self) -> Program | None:
        """The program with the best value of all that wait here computed again later."""
        best: tuple[float, int, _Repeat] | None = None
        for v in self.program.types:
            found = self._worth(v)
            if found is not None and (best is None or found[0] > best[0]):
                best = found[0], v, found[1]
        return None if best is None else self._rewritten(best[1], best[2])

    def _aliases(self, v: int) -> list[int]:
        """The value and all views of it."""
        return [v, *(w for x in self.views.get(v, ()) for w in self._aliases(x))]

    def _all_uses(self, v: int) -> list[int]:
        """Instructions that use the value or a view of it; views themselves do not count."""
        if v not in self._found:
            all_ = self.program.instructions
            uses = [n for w in self._aliases(v) for n in self.uses[w]]
            self._found[v] = sorted(n for n in uses if n == len(all_) or all_[n].kind != "view")
        return self._found[v]

    def _bytes(self, v: int) -> int:
        return self.prices.bytes(self.program, v)

    def _in_arena(self, v: int) -> bool:
        return isinstance(self.sharing.root(v), int)

    def _worth(self, v: int) -> tuple[float, _Repeat] | None:
        """(bytes freed at the peak per cost, how) where v waits at the peak for a later use."""
        maker = self.program.instructions[self.made[v]]
        if self.made[v] >= self.at or maker.kind == "view" or not self._in_arena(v):
            return None
        uses = self._all_uses(v)
        later = [n for n in uses if n > self.at]
        if not later or self.at in uses or later[-1] == len(self.program.instructions):
            return None
        repeat = _Repeat()
        if not self._collect(v, later[0], repeat):
            return None
        freed = self._bytes(v) - sum(self._bytes(w) for w in repeat.kept)
        return (freed / self._cost(repeat), repeat) if freed > 0 else None

    def _cost(self, repeat: _Repeat) -> float:
        return 1.0 + sum(self.prices.cost(self.program, i) for i in repeat.instructions.values())

    def _collect(self, v: int, use: int, repeat: _Repeat) -> bool:
        """Adds what makes v again at ``use``; False where that is impossible or too much."""
        n = self.made[v]
        i = self.program.instructions[n]
        if i.kind not in REPEATABLE or len(repeat.instructions) > MOST_CLONES:
            return False
        repeat.instructions[n] = i
        for x in i.inputs:
            if self.made[x] in repeat.instructions or self._is_there(x, use):
                continue
            attempt = _Repeat(dict(repeat.instructions), dict(repeat.kept))
            if self._collect(x, use, attempt):
                repeat.instructions, repeat.kept = attempt.instructions, attempt.kept
            else:
                repeat.kept[x] = None
        return True

    def _is_there(self, x: int, use: int) -> bool:
        """Whether x is in memory at the use, and keeping it until then costs nothing here."""
        if not self._in_arena(x) or self.made[x] >= self.at:
            return True
        held = self._holder(x)
        return any(n >= self.at for n in self._all_uses(held))

    def _holder(self, x: int) -> int:
        """The value whose memory x looks at through views."""
        i = self.program.instructions[self.made[x]]
        return self._holder(i.inputs[0]) if i.kind == "view" else x

    def _rewritten(self, v: int, repeat: _Repeat) -> Program:
        """The program with clones before the first later use, which that and all others take."""
        use = min(n for n in self._all_uses(v) if n > self.at)
        types, renamed, clones = dict(self.program.types), dict[int, int](), list[Instruction]()
        number = fresh(self.program)
        instructions = dict(repeat.instructions)
        for w in self._aliases(v)[1:]:
            if any(n > self.at for n in self.uses[w]):
                instructions[self.made[w]] = self.program.instructions[self.made[w]]
        wanted = {x for i in instructions.values() for x in i.inputs} | set(self._aliases(v))
        for _, i in sorted(instructions.items()):
            i = needed_part(i, wanted, types)
            inside = {v: t for v, t in i.inner_types().items() if v not in i.outputs}
            own = dict(zip((*i.outputs, *inside), itertools.count(number), strict=False))
            number += len(own)
            types.update((own[x], types[x]) for x in i.outputs)
            clones.append(renamed_values(i, {**renamed, **own}))
            renamed.update((x, own[x]) for x in i.outputs)
        again = {w: renamed[w] for w in self._aliases(v) if w in renamed}
        out: list[Instruction] = []
        for n, i in enumerate(self.program.instructions):
            if n == use:
                out += clones
            if n >= use and any(x in again for x in i.inputs):
                i = renamed_values(i, again)
            out.append(i)
        return _without_dead_views(self.program.with_instructions(out, types))


def needed_part(i: Instruction, wanted: Iterable[int], types: Mapping[int, LocalType]) -> Instruction:
    """A fused kernel that makes only what is wanted of its results; anything else as it is."""
    wanted = set(wanted)
    outputs = tuple(v for v in i.outputs if v in wanted)
    if i.kind not in ("fused", "map") or outputs == i.outputs:
        return i
    if i.kind == "map":
        expr = i.of(Map).expr
        results = tuple(r for r, v in zip(expr.results, i.outputs, strict=True) if v in wanted)
        return i.replaced(outputs=outputs, expr=pruned(expr._replace(results=results)))
    needed, body, fused = set(outputs), list[Instruction](), i.of(Fused)
    for one in reversed(fused.body):
        if any(v in needed for v in one.outputs):
            body.insert(0, one)
            needed.update(one.inputs)
    made = [v for one in body for v in one.outputs]
    inner = {v: types.get(v) or fused.inner[v] for v in made if v not in outputs}
    inputs = tuple(v for v in i.inputs if any(v in one.inputs for one in body))
    return i.replaced(inputs=inputs, outputs=outputs, body=tuple(body), inner=inner)


def renamed_values(i: Instruction, new: Mapping[int, int]) -> Instruction:
    """The instruction on other values, those in its body included."""
    ins, outs = (tuple(new.get(v, v) for v in vs) for vs in (i.inputs, i.outputs))
    if not isinstance(i.attrs, Region):
        return i.replaced(inputs=ins, outputs=outs)
    body = tuple(renamed_values(one, new) for one in i.body)
    return i.replaced(inputs=ins, outputs=outs, body=body, inner={new.get(v, v): t for v, t in i.attrs.inner.items()})


def _without_dead_views(program: Program) -> Program:
    """Views that only later uses needed keep nothing alive, but nothing needs them either."""
    used = {v for i in program.instructions for v in i.inputs} | set(program.fetches.values())
    kept = [i for i in program.instructions if i.kind != "view" or any(v in used for v in i.outputs)]
    if len(kept) == len(program.instructions):
        return program
    return _without_dead_views(program.with_instructions(kept))
