"""Programs written by hand, right or deliberately wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmpi import SimulatedMesh, Tensor
from meshmpi.dims import MeshShape, Shape
from meshmpi.ir.kinds import KINDS
from meshmpi.ir.program import Instruction, Kind, LocalType, Program, VariableType
from meshmpi.ir.scalar import call
from meshmpi.runtime.compiled import CompiledStep

MESH = MeshShape("rows:2;cols:2")
SIZES = {"a": 4, "b": 8, "c": 6, "u": 3, "k": 2, "m": 32}


def t(dims: str = "", partial: str = "", pending: str = "sum", dtype: str = "float32") -> LocalType:
    """``t("a/rows b", partial="cols")``: dims with their axes, sizes from SIZES or ``a=5``."""
    shape, splits = [], []
    for dim in dims.split():
        name, _, axes = dim.partition("/")
        name, _, size = name.partition("=")
        shape.append((name, int(size) if size else SIZES[name]))
        splits.append(tuple(axes.split("+")) if axes else ())
    return LocalType(Shape(shape), dtype, tuple(splits), tuple(partial.split("+")) if partial else (), pending)


def run(p: Program, fetches: dict[str, Tensor], feeds: dict[str, Any], kernels: str = "numpy") -> dict[str, Any]:
    """Whole results of one step; memory and FLOP of rank 0 are as predicted."""
    step = CompiledStep(p, SimulatedMesh(p.mesh), fetches, None, kernels)
    got = step({n: feeds[n] for n in p.feeds})
    assert step._executor.states[0].held_memory == step.cost.memory
    assert sum(step.counted_flops.values()) == step.cost_of(0).flops <= step.cost.flops
    return {n: np.asarray(r if isinstance(r := got[n], float) else r.numpy()) for n in fetches}


@dataclass(frozen=True)
class Teleport(Kind):
    """A kind that is not in the table."""

    kind = "teleport"


class Hand:
    """A program being written: ``v = h.add("transpose", [x], t("b a"))``."""

    def __init__(self) -> None:
        self.types: dict[int, LocalType] = {}
        self.instructions: list[Instruction] = []
        self.variables: dict[str, VariableType] = {}
        self.feeds: dict[str, LocalType] = {}
        self.fetches: dict[str, int] = {}

    def add(self, kind: str, inputs: list[int], *types: LocalType, **attrs: Any) -> int:
        outputs = tuple(range(len(self.types), len(self.types) + len(types)))
        self.types.update(zip(outputs, types, strict=True))
        self.instructions.append(Instruction(KINDS.get(kind, Teleport)(**attrs), tuple(inputs), outputs))
        return outputs[0] if outputs else -1

    def feed(self, name: str, type: LocalType) -> int:
        self.feeds[name] = type
        return self.add("feed", [], type, name=name)

    def pending(self, dims: str, partial: str) -> int:
        """A value with a sum pending: the product of two feeds."""
        n = len(self.types)
        left = self.feed(f"left{n}", t(f"{dims} u/{partial}"))
        right = self.feed(f"right{n}", t(f"u/{partial}"))
        return self.add("contract", [left, right], t(dims, partial))

    def variable(self, name: str, type: LocalType) -> int:
        self.variables[name] = VariableType(name, type, None)
        return self.add("read", [], type, variable=name)

    def map(self, function: str, inputs: list[int], type: LocalType) -> int:
        return self.add("map", inputs, type, expr=call(function, len(inputs), type.dtype))

    def program(self) -> Program:
        return Program(MESH, self.types, tuple(self.instructions), self.variables, self.feeds, self.fetches)
