"""Kinds for redistribution: collectives, local slices, and the end of a collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmpi.dims import Axes, MeshShape, block_sizes
from meshmpi.ir import collective_bytes as cb
from meshmpi.ir.halos import HaloExchange
from meshmpi.ir.kinds.checks import require, result_type, same_splits
from meshmpi.ir.kinds.shaping import only_what_is_taken
from meshmpi.ir.program import Collective, Instruction, Kind, LocalType, Program, Traits, Violation


class Redistribution(Kind):
    """Kinds that change how a value is split, or finish what is pending: see `result`."""

    axes: Axes
    many = False
    """Whether one instruction may do it to several values."""
    takes_partial = False
    """Whether a reduction may be pending in its input."""

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        """Type of the result for an input of type x; raises `Violation` where a rule is broken."""
        raise NotImplementedError

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        require(len(xs) == len(i.outputs) > 0, "has not one result per input")
        require(len(xs) == 1 or self.many, "combines several values")
        require(len({x.dtype for x in xs}) == 1, "combines several data types")
        for x, v in zip(xs, i.outputs, strict=True):
            require(self.takes_partial or not x.partial, "moves an unfinished sum")
            expected = self.result(program.mesh, x)
            require(expected == program.types[v], f"should make {expected}")


@dataclass(frozen=True, eq=False, repr=False)
class AllReduce(
    Redistribution,
    Collective,
    kind="all_reduce",
    traits=Traits(meets_ranks=True, scalar=True, in_place="same", carries_gradient=True),
):
    """Finishes what is pending over ``axes``, of all values in one message.

    With ``start`` it runs while the next instructions do; only `Wait` may use its result.
    """

    axes: Axes
    op: str
    start: bool = False
    many = takes_partial = reduces = True

    @staticmethod
    def sent(nbytes: int, n: int) -> int:
        return 2 * (n - 1) * nbytes // n

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        return _reduced(x, self.axes, self.op)

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return not set(self.axes) & set(axes) and len(marks) == 1 and self.op == "sum"

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        types = [program.types[v] for v in i.inputs]
        shapes = [t.local_sizes(program.mesh, at) for t in types]
        if len(types) > 1:
            return sum(map(math.prod, shapes)) * self.wire_bytes(types[0].dtype)
        return cb.all_reduce_workspace_bytes(shapes[0], types[0].dtype)


@dataclass(frozen=True, eq=False, repr=False)
class ReduceScatter(
    Redistribution, Collective, kind="reduce_scatter", traits=Traits(meets_ranks=True, carries_gradient=True)
):
    """Finishes what is pending over ``axes``, and keeps only the own block of ``dim``."""

    dim: str
    axes: Axes
    op: str
    takes_partial = reduces = True

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        return _split_more(mesh, _reduced(x, self.axes, self.op), self.dim, self.axes)

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        x, shape, axis = _operand(program, i, at, self.dim)
        sizes = block_sizes(shape[axis], program.mesh.count(self.axes))
        return cb.reduce_scatter_workspace_bytes(shape, x.dtype, axis, sizes)


@dataclass(frozen=True, eq=False, repr=False)
class AllGather(Redistribution, Collective, kind="all_gather", traits=Traits(meets_ranks=True, carries_gradient=True)):
    """Makes ``dim`` whole over its last axes.

    Where the blocks of a variable are ``joined`` in one array, that is the result: ranks only wait for each other.
    """

    dim: str
    axes: Axes
    joined: bool = False

    @staticmethod
    def sent(nbytes: int, n: int) -> int:
        return (n - 1) * nbytes

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        return _split_less(mesh, x, self.dim, self.axes)

    def elements_handed(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        return 0 if self.joined else super().elements_handed(program, i, at)

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return {} if self.joined else super().touched(i, sizes, in_place)

    def alias(self, program: Program, i: Instruction) -> int | None:
        return i.inputs[0] if self.joined else None

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        if self.joined:
            return 0
        x, shape, axis = _operand(program, i, at, self.dim)
        whole = program.types[i.outputs[0]].local_sizes(program.mesh, at)[axis]
        return cb.all_gather_workspace_bytes(shape, x.dtype, axis, block_sizes(whole, program.mesh.count(self.axes)))


@dataclass(frozen=True, eq=False, repr=False)
class AllToAll(Redistribution, Collective, kind="all_to_all", traits=Traits(meets_ranks=True, carries_gradient=True)):
    """Moves ``axes`` from the dim ``concat`` to the dim ``split``."""

    split: str
    concat: str
    axes: Axes

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        return _split_more(mesh, _split_less(mesh, x, self.concat, self.axes), self.split, self.axes)

    def exchange(
        self, program: Program, i: Instruction, at: Mapping[str, int]
    ) -> tuple[int, int, list[int], list[int]]:
        """Array axes of ``split`` and ``concat``, and the extents of all blocks along both."""
        x, shape, split = _operand(program, i, at, self.split)
        concat, n = x.shape.position(self.concat), program.mesh.count(self.axes)
        whole = program.types[i.outputs[0]].local_sizes(program.mesh, at)[concat]
        return split, concat, block_sizes(shape[split], n), block_sizes(whole, n)

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        x = program.types[i.inputs[0]]
        index = program.mesh.block_index(self.axes, at)
        shape = x.local_sizes(program.mesh, at)
        return cb.all_to_all_workspace_bytes(shape, x.dtype, *self.exchange(program, i, at), index)


@dataclass(frozen=True, eq=False, repr=False)
class LocalSlice(Redistribution, kind="take_shard", traits=Traits(repeatable=True, carries_gradient=True)):
    """Keeps the own block of ``dim``; no traffic."""

    dim: str
    axes: Axes
    takes_partial = True

    def result(self, mesh: MeshShape, x: LocalType) -> LocalType:
        if set(x.partial) & set(self.axes):
            raise Violation(f"takes blocks over {self.axes} of a value with a sum pending over {x.partial}")
        return _split_more(mesh, x, self.dim, self.axes)

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return not set(self.axes) & set(axes) and len(marks) == 1

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return only_what_is_taken(i, sizes)


@dataclass(frozen=True, eq=False, repr=False)
class Shift(
    Collective, kind="shift", traits=Traits(meets_ranks=True, takes_halos=True, makes_halos=True, by_place=True)
):
    """y[o] = x_j[stride o + offset_j] along the split ``dim``, else ``value``.

    Blocks exchange what others need of them; with ``wrap`` the dim is a ring.  Where the result has
    a `HaloRegion` along dim, each rank gets that part of x instead of its block.
    """

    dim: str
    axes: Axes
    stride: int
    offsets: tuple[int, ...]
    wrap: bool
    value: float

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        y, dim = result_type(program, i), self.dim
        require(len(xs) == len(self.offsets) > 0 and self.stride >= 1, "has not one offset per input")
        require(bool(self.axes) and y.split(dim) == self.axes, f"has '{dim}' split otherwise")
        for x in xs:
            require(x.shape.names == y.shape.names and x.dtype == y.dtype, "changes dims or type")
            require(x.split(dim) == self.axes and x.halo(dim) is None, f"has no blocks of '{dim}'")
            require(not x.partial and not y.partial, "moves an unfinished sum")
            for d in x.shape:
                if d.name != dim:
                    same_splits(x, y, [d.name])
                    require(x.halo(d.name) == y.halo(d.name), f"changes a halo of '{d.name}'")
        require(not self.wrap or len(xs) == 1, "makes a ring of several inputs")
        if y.halo(dim) is not None:
            plain = len(xs) == 1 and (self.stride, self.offsets) == (1, (0,))
            require(plain and xs[0].shape == y.shape, "moves elements into a halo")

    def exchange(self, program: Program, i: Instruction) -> HaloExchange:
        """What moves between the blocks of ``dim``."""
        y = program.types[i.outputs[0]]
        return HaloExchange(
            program.mesh.count(self.axes),
            tuple(program.types[v].shape.dim(self.dim).size for v in i.inputs),
            self.offsets,
            y.shape.dim(self.dim).size,
            self.stride,
            self.wrap,
            y.halo(self.dim),
        )

    @staticmethod
    def sent(nbytes: int, n: int) -> int:
        return nbytes

    def elements_handed(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        _, sizes, dim = _operand(program, i, at, self.dim)
        others = math.prod(n for k, n in enumerate(sizes) if k != dim)
        return others * self.exchange(program, i).rows_sent(program.mesh.block_index(self.axes, at))

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        x, _, axis = _operand(program, i, at, self.dim)
        out = program.types[i.outputs[0]].local_sizes(program.mesh, at)
        return cb.shift_workspace_bytes(out, x.dtype, axis, self.exchange(program, i))


@dataclass(frozen=True, eq=False, repr=False)
class Wait(Kind, kind="wait", traits=Traits(meets_ranks=True, same_memory=True, carries_gradient=True)):
    """The result of an `AllReduce` that was only started."""

    axes: Axes

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        y = result_type(program, i)
        require(len(xs) == 1 and xs[0] == y, f"changes its value to one of type {y}")

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return {}


COLLECTIVES: dict[str, type[Collective]] = {
    row.kind: row for row in (AllReduce, ReduceScatter, AllGather, AllToAll, Shift)
}
"""The kinds that communicate."""


def bytes_sent(kind: str, elements: int, item_bytes: int, n: int) -> int:
    """Bytes that a rank sends which hands ``elements`` to a collective of ``n`` ranks.

    Its block for all_gather, what it sends to other ranks for shift, the whole input otherwise.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"'{kind}' is not a collective: {', '.join(COLLECTIVES)}.")
    return COLLECTIVES[kind].sent(elements * item_bytes, n) if n > 1 else 0


def wire_bytes(kind: str, dtype: object) -> int:
    """Bytes of one element on the wire of collective ``kind``."""
    return COLLECTIVES[kind].wire_bytes(dtype)


def _operand(
    program: Program, i: Instruction, at: Mapping[str, int], dim: str
) -> tuple[LocalType, tuple[int, ...], int]:
    """Type and extents of the first input, and the position of ``dim`` in it."""
    x = program.types[i.inputs[0]]
    return x, x.local_sizes(program.mesh, at), x.shape.position(dim)


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
        raise Violation(f"blocks of '{dim}' ({size}) over {outer} do not hold whole blocks over {inner}")
