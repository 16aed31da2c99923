"""Type rules of lookups, rankings and running sums."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Dimension, MeshShape, Shape
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.typerules.basics import check_pending, require, result_type, same_splits


def gather_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Axes of the split dim looked up in are left pending."""
    (table, index), y, dim = xs, result_type(program, i), i.attrs["dim"]
    same_splits(y, index, index.shape.names)
    same_splits(y, table, [n for n in table.shape.names if n != dim])
    require(not index.partial and table.dtype == y.dtype, "has an unfinished index or changes type")
    axes = table.split(dim)
    require(not set(axes) & set(y.used_axes), f"splits its result like its dimension '{dim}'")
    check_pending(program.mesh, y, [*table.partial, *axes], "sum")


def scatter_add_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Axes of split dims of the index are left pending."""
    (updates, index), y, dim = xs, result_type(program, i), i.attrs["dim"]
    same_splits(updates, index, index.shape.names)
    same_splits(y, updates, [n for n in y.shape.names if n != dim])
    require(
        not index.partial and updates.dtype == y.dtype, "has an unfinished index or changes type"
    )
    require(not set(y.split(dim)) & set(updates.used_axes), "has updates split like its dimension")
    summed = [n for n in index.shape.names if n == dim or y.shape.find(n) < 0]
    gone = [a for n in summed for a in index.split(n)]
    check_pending(program.mesh, y, [*updates.partial, *gone], "sum")


def put_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Every rank has all updates of its block of batch and other dims; index dims are whole."""
    (x, updates, index), y, dim = xs, result_type(program, i), i.attrs["dim"]
    require(x == y and updates.dtype == y.dtype, "changes the type of its input")
    require(not any(t.partial for t in xs), "has an unfinished input")
    same_splits(updates, index, index.shape.names)
    others = [n for n in index.shape.names if n == dim or y.shape.find(n) < 0]
    require(not any(index.split(n) for n in others), "has updates split over dims of the index")
    rest = [n for n in y.shape.names if n != dim]
    same_splits(y, updates, rest)
    same_splits(y, index, [n for n in index.shape.names if n not in others])
    require(len(updates.shape) == len(rest) + len(others), "has updates with other dims")


def top_k_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Of a split dim, as many elements of every block."""
    x, ys, dim, k = xs[0], [program.types[v] for v in i.outputs], i.attrs["dim"], i.attrs["k"]
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


def block_sum_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """One sum for every block of a split dim."""
    (x,), y = xs, result_type(program, i)
    require(bool(x.split(i.attrs["dim"])), "sums blocks of a whole dimension")
    require(y == _block_sums(program.mesh, x, i) and not x.partial, "is no sum of each block")


def _block_sums(mesh: MeshShape, x: LocalType, i: Instruction) -> LocalType:
    """Type of the sums of the blocks of x: one element per block in place of ``dim``."""
    at = x.shape.position(i.attrs["dim"])
    blocks = Dimension(i.attrs["blocks"], mesh.count(x.splits[at]))
    shape = Shape([*x.shape[:at], blocks, *x.shape[at + 1 :]])
    return LocalType(shape, "float32" if x.dtype == "bfloat16" else x.dtype, x.splits)


def cumsum_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Along a split dim it needs the sums of all blocks."""
    x, *sums = xs
    require(result_type(program, i) == x and not x.partial, "changes the type of its input")
    wanted: list[LocalType] = []
    if x.split(i.attrs["dim"]):
        blocks = _block_sums(program.mesh, x, i)
        wanted = [blocks.with_split(i.attrs["blocks"], ())]
    require(sums == wanted, "has not the sums of all blocks of a split dimension")
