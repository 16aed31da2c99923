"""Chains of maps become one map: one pass over memory, no intermediate arrays."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.compiler.passes.rewrite import fetched, users
from meshmpi.ir.kinds import Map
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import Expr, Step

MAX_STEPS = 48
"""Most steps of a fused expression.  Status: assumption; keeps compile times of generated code and scratch small."""
MAX_INPUTS = 12
"""Most arrays read by one map.  Status: assumption; hardware prefetchers have so many streams."""


def fuse(program: Program) -> Program:
    """Merges a map into the only instruction that uses it, where that is a map too.

    A map over fewer dims is merged only when it does no arithmetic, since it would be repeated.
    """
    used, kept = users(program), fetched(program)
    made: dict[int, Instruction] = {}  # the one result of a map -> the map, as merged so far
    gone: set[int] = set()
    out: list[Instruction] = []
    for i in program.instructions:
        while i.kind == "map":
            merged = None
            for v in i.inputs:
                once = v in made and len(used[v]) == 1 and v not in kept
                if once and _fits(program, made[v], i):
                    merged = merged_maps(made[v], i, [])
                if merged is not None and _small(merged):
                    gone.add(v)
                    break
                merged = None
            if merged is None:
                break
            i = merged
        if i.kind == "map" and len(i.outputs) == 1:
            made[i.outputs[0]] = i
        out.append(i)
    return program.with_instructions(i for i in out if not i.outputs or i.outputs[0] not in gone)


def _fits(program: Program, producer: Instruction, consumer: Instruction) -> bool:
    a, b = (program.types[i.outputs[0]] for i in (producer, consumer))
    if a.partial != b.partial:
        return False
    same_points = sorted(a.local_dims) == sorted(b.local_dims)
    return same_points or producer.of(Map).expr.flops == 0


def _small(i: Instruction) -> bool:
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
        Step(s.function, tuple(renaming[a] if isinstance(a, str) else a for a in s.args), s.dtype) for s in c.steps
    )
    results = [renaming[r] for r in c.results] + [made[w] for w in keep]
    outputs = (*consumer.outputs, *keep)
    return Instruction(Map(Expr(steps, tuple(results))), tuple(inputs), outputs, consumer.source)
