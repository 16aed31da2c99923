"""Chains of maps become one map: one pass over memory, no intermediate arrays."""

from __future__ import annotations

from meshmpi.passes.rewrite import fetched, users
from meshmpi.program import Instruction, Program
from meshmpi.scalar import Expr, Step

MAX_STEPS = 48
"""Longest tape.  Status: assumption; keeps compile times of generated code and scratch rows small."""
MAX_INPUTS = 12
"""Most arrays read by one map.  Status: assumption; beyond, hardware prefetchers run out of streams."""


def fuse(program: Program) -> Program:
    """Merges a map into the map that uses it.

    A result that something later needs too stays a result of the merged map.  A map over fewer dims
    is merged only when it does no arithmetic, since it would be repeated.
    """
    fusion = _Fusion(program)
    for i in program.instructions:
        fusion.add(i)
    return program.with_instructions(fusion.out())


class _Fusion:
    def __init__(self, program: Program):
        self.program = program
        self.kept: list[Instruction | None] = []
        self.made_at: dict[int, int] = {}
        self.fetched = fetched(program)
        position = {id_: n for n, id_ in enumerate(map(_key, program.instructions))}
        self.uses = {
            v: [position[_key(u)] for u in us] for v, us in users(program).items()
        }  # fmt: skip
        self.now = -1

    def add(self, i: Instruction) -> None:
        self.now += 1
        while i.kind == "map":
            merged = next((m for v in i.inputs if (m := self._merge(v, i)) is not None), None)
            if merged is None:
                break
            i = merged
        for v in i.outputs:
            self.made_at[v] = len(self.kept)
        self.kept.append(i)

    def out(self) -> list[Instruction]:
        return [i for i in self.kept if i is not None]

    def _merge(self, v: int, consumer: Instruction) -> Instruction | None:
        """The consumer with the map that makes v merged in, or None where that is not allowed."""
        at = self.made_at.get(v)
        producer = self.kept[at] if at is not None else None
        if producer is None or producer.kind != "map":
            return None
        keep = [w for w in producer.outputs if self._needed_beside(w)]
        if not self._fits(producer, consumer, keep):
            return None
        merged = _merged(producer, consumer, keep)
        if len(merged.attrs["expr"].steps) > MAX_STEPS or len(merged.inputs) > MAX_INPUTS:
            return None
        self.kept[at] = None  # type: ignore[index]
        return merged

    def _needed_beside(self, w: int) -> bool:
        """Whether anything but the present instruction needs w."""
        return w in self.fetched or any(n != self.now for n in self.uses[w])

    def _fits(self, producer: Instruction, consumer: Instruction, keep: list[int]) -> bool:
        types = self.program.types
        a, b = types[producer.outputs[0]], types[consumer.outputs[0]]
        if a.partial != b.partial:
            return False
        if (a.shape, a.splits) != (b.shape, b.splits):
            same_points = sorted(a.shape) == sorted(b.shape)
            return not keep and (same_points or producer.attrs["expr"].flops == 0)
        # A kept result moves down to the consumer: nothing between may need it.
        return all(n >= self.now for w in keep for n in self.uses[w])


def _key(i: Instruction) -> tuple:
    return (i.kind, i.outputs, i.inputs, str(i.attrs.get("variable", "")))


def _merged(producer: Instruction, consumer: Instruction, keep: list[int]) -> Instruction:
    """One map computing both, with the results of the consumer and those in ``keep``."""
    inputs = list(producer.inputs)
    p, c = producer.attrs["expr"], consumer.attrs["expr"]
    made = dict(zip(producer.outputs, p.results, strict=True))
    renaming: dict[str, str] = {}
    for k, v in enumerate(consumer.inputs):
        if v in made:
            renaming[f"i{k}"] = made[v]
        else:
            if v not in inputs:
                inputs.append(v)
            renaming[f"i{k}"] = f"i{inputs.index(v)}"
    base = len(p.steps)
    for k in range(len(c.steps)):
        renaming[f"t{k}"] = f"t{base + k}"
    steps = p.steps + tuple(
        Step(s.function, tuple(renaming[a] if isinstance(a, str) else a for a in s.args), s.dtype)
        for s in c.steps
    )
    results = [renaming[r] for r in c.results] + [made[w] for w in keep]
    outputs = (*consumer.outputs, *keep)
    return Instruction("map", tuple(inputs), outputs, {"expr": Expr(steps, tuple(results))}, consumer.source)
