"""Kinds for lookups, rankings and running sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmpi.dims import Axes, Dimension, MeshShape, Shape
from meshmpi.ir.kinds.checks import check_pending, require, result_type, same_splits
from meshmpi.ir.kinds.computing import PerInput
from meshmpi.ir.kinds.shaping import only_what_is_taken
from meshmpi.ir.program import Extents, Instruction, Kind, LocalType, Program, Traits, Work

RANKING = 30
"""Operations of the simplest sort that ranking one element costs.  Status: assumption."""


@dataclass(frozen=True, eq=False, repr=False)
class Lookup(Kind):
    """Kinds whose second input is an index along ``dim``, and which are linear in the first alone.

    Dims that the index and the table have are batch dims, but for ``dim``.  ``checked``, the name
    of the index: one that is outside raises `RangeError`; ``may_miss``: it is meant.
    """

    dim: str
    may_miss: bool = False
    checked: str = ""

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return list(marks) == [True, False]


@dataclass(frozen=True, eq=False, repr=False)
class Gather(Lookup, kind="gather", traits=Traits(repeatable=True, hides_network=True)):
    """Rows of the block of a table that the index hits, else 0."""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (table, index), y, dim = xs, result_type(program, i), self.dim
        same_splits(y, index, index.shape.names)
        same_splits(y, table, [n for n in table.shape.names if n != dim])
        require(not index.partial and table.dtype == y.dtype, "has an unfinished index or changes type")
        axes = table.split(dim)
        require(not set(axes) & set(y.used_axes), f"splits its result like its dimension '{dim}'")
        check_pending(program.mesh, y, [*table.partial, *axes], "sum")

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return only_what_is_taken(i, sizes)


@dataclass(frozen=True, eq=False, repr=False)
class ScatterAdd(PerInput, Lookup, kind="scatter_add", traits=Traits(native=True, hides_network=True)):
    """Sums updates into the rows of the result that the index hits."""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (updates, index), y, dim = xs, result_type(program, i), self.dim
        same_splits(updates, index, index.shape.names)
        same_splits(y, updates, [n for n in y.shape.names if n != dim])
        require(not index.partial and updates.dtype == y.dtype, "has an unfinished index or changes type")
        require(not set(y.split(dim)) & set(updates.used_axes), "has updates split like its dimension")
        summed = [n for n in index.shape.names if n == dim or y.shape.find(n) < 0]
        gone = [a for n in summed for a in index.split(n)]
        check_pending(program.mesh, y, [*updates.partial, *gone], "sum")

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        (y,) = i.outputs
        return {**sizes, y: sizes[y] + sizes[i.inputs[0]]}


@dataclass(frozen=True, eq=False, repr=False)
class Put(Kind, kind="put", traits=Traits(in_place="same")):
    """x but for the rows that the index hits, where they are held: those are the updates."""

    dim: str

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (x, updates, index), y, dim = xs, result_type(program, i), self.dim
        require(x == y and updates.dtype == y.dtype, "changes the type of its input")
        require(not any(t.partial for t in xs), "has an unfinished input")
        same_splits(updates, index, index.shape.names)
        others = [n for n in index.shape.names if n == dim or y.shape.find(n) < 0]
        require(not any(index.split(n) for n in others), "has updates split over dims of the index")
        rest = [n for n in y.shape.names if n != dim]
        same_splits(y, updates, rest)
        same_splits(y, index, [n for n in index.shape.names if n not in others])
        require(len(updates.shape) == len(rest) + len(others), "has updates with other dims")

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return {**sizes, i.inputs[0]: 0, i.outputs[0]: sizes[i.inputs[1]]} if in_place else dict(sizes)


@dataclass(frozen=True, eq=False, repr=False)
class TopK(Kind, kind="top_k", traits=Traits(native=True)):
    """The ``k`` (name of a dim) largest elements along ``dim``, and their indices; ties in order.

    Along a split dim the k largest of each block.  With a second input, the index of every
    element, that is given instead of its position.
    """

    dim: str
    k: str
    smallest: bool = False

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        x, ys, dim, k = xs[0], [program.types[v] for v in i.outputs], self.dim, self.k
        require(len(ys) == 2 and not x.partial, "needs one finished dim")
        for y in ys:
            same_splits(x, y, [n for n in x.shape.names if n != dim])
            require(y.split(k) == x.split(dim) and not y.partial, "splits its result in another way")
        ranks = program.mesh.count(x.split(dim))
        most = x.shape.dim(dim).size // ranks
        fits = ys[0].shape.dim(k).size % ranks == 0 and ys[0].shape.dim(k).size // ranks <= most
        require(fits, f"takes not one number of elements of every block, or more than {most}")
        if len(xs) > 1:
            index = LocalType(x.shape, "int32", x.splits)
            require(xs[1] == index and ranks == 1, "has an index that is not one of a whole dim")

    @property
    def work(self) -> Work:
        return Work(("simple",), "input", weight=RANKING)


@dataclass(frozen=True, eq=False, repr=False)
class BlockSum(PerInput, kind="block_sum", traits=Traits()):
    """Sum of the own block along ``dim``; the result has one element per block in its place."""

    dim: str
    blocks: str

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (x,), y = xs, result_type(program, i)
        require(bool(x.split(self.dim)), "sums blocks of a whole dimension")
        require(y == block_sums(program.mesh, x, self.dim, self.blocks) and not x.partial, "is not a sum of each block")


@dataclass(frozen=True, eq=False, repr=False)
class Cumsum(PerInput, kind="cumsum", traits=Traits(repeatable=True)):
    """Running sums along ``dim``; along a split one from the sums of all ``blocks`` on."""

    dim: str
    exclusive: bool
    reverse: bool
    blocks: str = ""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        x, *sums = xs
        require(result_type(program, i) == x and not x.partial, "changes the type of its input")
        wanted: list[LocalType] = []
        if x.split(self.dim):
            blocks = block_sums(program.mesh, x, self.dim, self.blocks)
            wanted = [blocks.with_split(self.blocks, ())]
        require(sums == wanted, "has not the sums of all blocks of a split dimension")

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return len(ins) * super().flops(ins, outs)


def block_sums(mesh: MeshShape, x: LocalType, dim: str, blocks: str) -> LocalType:
    """Type of the sums of the blocks of x: one element per block in place of ``dim``."""
    at = x.shape.position(dim)
    shape = Shape([*x.shape[:at], Dimension(blocks, mesh.count(x.splits[at])), *x.shape[at + 1 :]])
    return LocalType(shape, "float32" if x.dtype == "bfloat16" else x.dtype, x.splits)
