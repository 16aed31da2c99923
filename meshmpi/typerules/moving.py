"""Type rules of the instructions that redistribute, and the types that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshmpi.dims import Axes, MeshShape
from meshmpi.program import COLLECTIVES, Instruction, LocalType, Program
from meshmpi.typerules.basics import Violation, require, result_type, same_splits


def redistributed(mesh: MeshShape, x: LocalType, kind: str, attrs: Mapping[str, Any]) -> LocalType:
    """Type of the result of ``kind`` applied to x; raises Violation where a rule is broken."""
    axes: Axes = tuple(attrs["axes"])
    if kind == "all_reduce":
        return _reduced(x, axes, attrs["op"])
    if kind == "reduce_scatter":
        return _split_more(mesh, _reduced(x, axes, attrs["op"]), attrs["dim"], axes)
    if kind == "take_shard":
        if set(x.partial) & set(axes):
            raise Violation(
                f"takes blocks over {axes} of a value with a sum pending over {x.partial}"
            )
        return _split_more(mesh, x, attrs["dim"], axes)
    if kind == "all_gather":
        return _split_less(mesh, x, attrs["dim"], axes)
    if kind == "all_to_all":
        return _split_more(mesh, _split_less(mesh, x, attrs["concat"], axes), attrs["split"], axes)
    raise Violation(f"{kind} does not redistribute")


def _reduced(x: LocalType, axes: Axes, op: str) -> LocalType:
    if not axes or any(a not in x.partial for a in axes):
        raise Violation(f"reduces over {axes}, but the reduction is pending over {x.partial}")
    if op != x.pending:
        raise Violation(f"reduces with {op} what is pending as {x.pending}")
    return x.finished(axes)


def _split_more(mesh: MeshShape, x: LocalType, dim: str, axes: Axes) -> LocalType:
    taken = set(axes) & set(x.used_axes)
    if taken or not axes:
        raise Violation(f"splits '{dim}' over {axes} of {x}")
    _check_nested(mesh, x, dim, x.split(dim), axes)
    return x.with_split(dim, (*x.split(dim), *axes))


def _split_less(mesh: MeshShape, x: LocalType, dim: str, axes: Axes) -> LocalType:
    old = x.split(dim)
    if not axes or old[len(old) - len(axes) :] != axes:
        raise Violation(f"joins '{dim}' over {axes}, but it is split over {old}")
    _check_nested(mesh, x, dim, old[: len(old) - len(axes)], axes)
    return x.with_split(dim, old[: len(old) - len(axes)])


def nests(mesh: MeshShape, size: int, outer: Axes, inner: Axes) -> bool:
    """Whether cutting blocks over ``outer`` further over ``inner`` gives the blocks over both."""
    return not outer or not inner or size % mesh.count((*outer, *inner)) == 0


def _check_nested(mesh: MeshShape, x: LocalType, dim: str, outer: Axes, inner: Axes) -> None:
    size = x.shape.dim(dim).size
    if not nests(mesh, size, outer, inner):
        raise Violation(
            f"blocks of '{dim}' ({size}) over {outer} do not hold whole blocks over {inner}"
        )


def redistribution_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Makes exactly the type that `redistributed` says."""
    require(len(xs) == len(i.outputs) > 0, "has not one result per input")
    require(len(xs) == 1 or i.kind == "all_reduce", "combines several values")
    require(len({x.dtype for x in xs}) == 1, "combines several data types")
    for x, v in zip(xs, i.outputs, strict=True):
        if i.kind in COLLECTIVES and i.kind not in ("all_reduce", "reduce_scatter"):
            require(not x.partial, "moves an unfinished sum")
        expected = redistributed(program.mesh, x, i.kind, i.attrs)
        require(expected == program.types[v], f"should make {expected}")


def shift_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Blocks of one dim, split alike in all values, become blocks or windows."""
    a, y, dim = i.attrs, result_type(program, i), i.attrs["dim"]
    require(len(xs) == len(a["offsets"]) > 0 and a["stride"] >= 1, "has not one offset per input")
    require(bool(a["axes"]) and y.split(dim) == a["axes"], f"has '{dim}' split otherwise")
    for x in xs:
        require(x.shape.names == y.shape.names and x.dtype == y.dtype, "changes dims or type")
        require(x.split(dim) == a["axes"] and x.window(dim) is None, f"has no blocks of '{dim}'")
        require(not x.partial and not y.partial, "moves an unfinished sum")
        for d in x.shape:
            if d.name != dim:
                same_splits(x, y, [d.name])
                require(x.window(d.name) == y.window(d.name), f"changes a window of '{d.name}'")
    require(not a["wrap"] or len(xs) == 1, "makes a ring of several inputs")
    if y.window(dim) is not None:
        plain = len(xs) == 1 and (a["stride"], a["offsets"]) == (1, (0,))
        require(plain and xs[0].shape == y.shape, "moves elements into a window")


def wait_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Changes nothing."""
    require(len(xs) == 1 and xs[0] == result_type(program, i), "changes its value")
