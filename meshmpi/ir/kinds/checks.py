"""Checks shared by several type rules."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import MeshShape
from meshmpi.ir.program import Instruction, LocalType, Program, Violation


def require(condition: bool, rule: str) -> None:
    """Raises Violation with ``rule`` unless ``condition`` holds."""
    if not condition:
        raise Violation(rule)


def result_type(program: Program, i: Instruction) -> LocalType:
    """Type of the one result of ``i``."""
    require(len(i.outputs) == 1, "has not exactly one result")
    return program.types[i.outputs[0]]


def same_splits(x: LocalType, y: LocalType, names: Sequence[str]) -> None:
    """The dims called ``names`` must be the same, and split alike, in x and y."""
    for name in names:
        i, j = x.shape.find(name), y.shape.find(name)
        if i < 0 or j < 0 or x.shape[i] != y.shape[j] or x.splits[i] != y.splits[j]:
            raise Violation(f"dimension '{name}' is not the same in {x} and {y}")


def passes_partial(x: LocalType, y: LocalType) -> None:
    """What is pending in x, and its data type, must be so in y."""
    require((x.partial, x.pending, x.dtype) == (y.partial, y.pending, y.dtype), "changes what is pending")


def check_pending(mesh: MeshShape, y: LocalType, axes: Sequence[str], op: str) -> None:
    """``op`` must be left pending in y over exactly ``axes``."""
    require(y.partial == mesh.in_mesh_order(axes), f"must leave a reduction pending over {axes}")
    require(not y.partial or y.pending == op, f"must leave {op} pending")
