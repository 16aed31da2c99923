"""Kinds that reorder, rename, split and join dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmpi.dims import Axes, Dimension, MeshShape, Shape
from meshmpi.ir.kinds.checks import passes_partial, require, result_type, same_splits
from meshmpi.ir.program import Instruction, Kind, LocalType, Program, Traits


@dataclass(frozen=True, eq=False, repr=False)
class Transpose(Kind, kind="transpose", traits=Traits(repeatable=True, carries_gradient=True)):
    """The same dims in the result's order."""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (x,), y = xs, result_type(program, i)
        require(sorted(x.shape) == sorted(y.shape), "changes dims")
        same_splits(x, y, x.shape.names)
        passes_partial(x, y)

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class View(Kind, kind="view", traits=Traits(free=True, repeatable=True, same_memory=True, carries_gradient=True)):
    """The same elements in the same order under other dims.

    With a ``barrier`` it is not merged with an equal view: what is computed from it is computed anew.
    """

    barrier: str = ""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (x,), y = xs, result_type(program, i)
        passes_partial(x, y)
        for ins, outs in aligned_groups(x.shape, y.shape):
            a = [x.split(d.name) for d in ins]
            b = [y.split(d.name) for d in outs]
            require(view_splits(program.mesh, ins, a, outs) == b, f"is not local from {ins} to {outs}")

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return True


class AlongDim(Kind):
    """Kinds that work along a dimension that is whole on every rank."""

    dim: str

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        dim, y = self.dim, result_type(program, i)
        total = 0
        for x in xs:
            require(not x.split(dim) and not y.split(dim), f"works along '{dim}', which is split")
            require(x.shape.names == y.shape.names, "changes the order of dims")
            same_splits(x, y, [n for n in x.shape.names if n != dim])
            passes_partial(x, y)
            total += x.shape.dim(dim).size
        total = self.elements(xs, total)
        require(y.shape.dim(dim).size == total, f"'{dim}' should have {total} elements")

    def elements(self, xs: Sequence[LocalType], total: int) -> int:
        """Size of the result along ``dim``, where its inputs have ``total`` together."""
        return total


@dataclass(frozen=True, eq=False, repr=False)
class Slice(AlongDim, kind="slice", traits=Traits(repeatable=True)):
    """Elements ``start`` to ``stop`` in steps of ``stride``, along a whole dimension."""

    dim: str
    start: int
    stop: int
    stride: int

    def elements(self, xs: Sequence[LocalType], total: int) -> int:
        return len(range(self.start, self.stop, self.stride))

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return True

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return only_what_is_taken(i, sizes)

    def alias(self, program: Program, i: Instruction) -> int | None:
        """The first elements in memory lie where the whole does."""
        x, y = program.types[i.inputs[0]].shape, program.types[i.outputs[0]].shape
        leads = not self.start and self.stride == 1 and y.position(self.dim) == 0
        return i.inputs[0] if leads and x.names == y.names else None


@dataclass(frozen=True, eq=False, repr=False)
class Pad(AlongDim, kind="pad", traits=Traits(repeatable=True)):
    """``before`` and ``after`` elements of ``value`` around x, along a whole dimension."""

    dim: str
    before: int
    after: int
    value: float

    def elements(self, xs: Sequence[LocalType], total: int) -> int:
        require(not xs[0].partial or not self.value, "pads an unfinished sum with a number")
        return total + self.before + self.after

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return not self.value


@dataclass(frozen=True, eq=False, repr=False)
class Concat(AlongDim, kind="concat", traits=Traits(repeatable=True)):
    """One input behind the other, along a whole dimension."""

    dim: str

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return all(marks)


def only_what_is_taken(i: Instruction, sizes: Mapping[int, int]) -> dict[int, int]:
    """Bytes that are touched where the first input is read only as far as the result takes it."""
    return {**sizes, i.inputs[0]: sizes[i.outputs[0]]}


def aligned_groups(old: Shape, new: Shape) -> list[tuple[list[Dimension], list[Dimension]]]:
    """Smallest runs of old and new dims with equal products of sizes, each reshaped alone."""
    groups: list[tuple[list[Dimension], list[Dimension]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        ins, outs = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(d.size for d in ins)) != (b := math.prod(d.size for d in outs)):
            if a < b:
                ins.append(old[i])
                i += 1
            else:
                outs.append(new[j])
                j += 1
        groups.append((ins, outs))
    rest = (list(old[i:]), list(new[j:]))  # dims of size 1
    if any(rest):
        if groups:
            groups[-1] = (groups[-1][0] + rest[0], groups[-1][1] + rest[1])
        else:
            groups.append(rest)
    return groups


def view_splits(
    mesh: MeshShape, ins: Sequence[Dimension], splits: Sequence[Axes], outs: Sequence[Dimension]
) -> list[Axes] | None:
    """Splits of ``outs`` when ``ins`` with ``splits`` are reshaped locally; None when they cannot.

    Local is: nothing split; one dim renamed; or only the leading dim split, evenly on both sides.
    """
    if not any(splits):
        return [()] * len(outs)
    lead_in = next((k for k, d in enumerate(ins) if d.size > 1), 0)
    lead_out = next((k for k, d in enumerate(outs) if d.size > 1), 0)
    if not ins or not outs or any(s for k, s in enumerate(splits) if k != lead_in):
        return None
    axes, n, m = splits[lead_in], ins[lead_in].size, outs[lead_out].size
    k = mesh.count(axes)
    if n != m and (n % k or m % k):
        return None
    return [axes if j == lead_out else () for j in range(len(outs))]
