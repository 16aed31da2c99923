"""Operations that address by index: gather, scatter_add, put, top_k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, DimLike, Shape, ShapeLike, dim_name
from meshmpi.graph import Operation, Tensor, only
from meshmpi.graph.ops.sources import zeros_like
from meshmpi.graph.ops.structure import transpose
from meshmpi.ir import kinds as ir
from meshmpi.ir.program import LocalType
from meshmpi.ir.scalar import INTEGERS


class Gather(Operation):
    """y[batch, index dims, rest] = table[batch, index[batch, ...], rest]; an index outside: zeros.

    Dims that table and index share are batch dims.
    Gradient: scatter_add of dy.
    Lowers: local `gather` of the rows in the own block; where ``dim`` is split, an all_reduce of y
    over its axes.  Where y is split over the same axes, ``dim`` is gathered first.
    """

    def __init__(self, table: Tensor, index: Tensor, dim: str, may_miss: bool):
        self.dim, self.may_miss = dim, may_miss
        super().__init__([table, index])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        table, index = self.inputs
        table.dim(self.dim, "gather")
        if index.dtype not in INTEGERS:
            raise self.fail(f"the index {index!r} is not an integer.", "Convert it with mm.cast(x, 'int32').")
        rest = table.shape.without([self.dim])
        self.sizes([index.shape, rest])
        return [(index.shape + rest.without(index.shape.names), table.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        table, index = self.inputs
        dim = table.shape.dim(self.dim)
        return [ScatterAdd(only(dys), index, dim, table.shape, self.may_miss).output, None]

    def lower(self, lowering: Any) -> None:
        table, index = self.inputs
        out = lowering.type_of(self.output)
        axes = [a for a in lowering.type_of(table).split(self.dim) if a not in out.used_axes]
        same = lowering.splits_of(out)
        if tuple(axes) != lowering.type_of(table).split(self.dim):
            axes = []
        values = [lowering.fit(table, {**same, self.dim: tuple(axes)}), lowering.fit(index, same)]
        result = lowering.emit(ir.Gather(self.dim, self.may_miss), values, lowering.pending(out, axes))
        lowering.define(self.output, result)


def gather(weights: Tensor, indices: Tensor, dim: DimLike, may_miss: bool = False) -> Tensor:
    """Elements of ``weights`` along ``dim`` at ``indices``: an embedding lookup, take_along_axis.

    Args:
        weights: [batch, dim, rest], dims in any order.
        indices: Integers [batch, index dims]; the dims that both have (but for ``dim``) are batch
            dims: y[b, i, r] = weights[b, indices[b, i], r].
        dim: The dim addressed.
        may_miss: Says that indices outside are meant, so that debug mode accepts them.

    Returns:
        [dims of indices, rest].  An index outside 0..size-1 gives zeros in every layout; with
        ``mm.compile(..., debug=True)`` it raises `RangeError` unless ``may_miss``.
    """
    return Gather(weights, indices, dim_name(dim), may_miss).output


class ScatterAdd(Operation):
    """y[batch, dim, rest] = sum of the updates[batch, index dims, rest] whose index is y's row.

    Index dims that y has too are batch dims.
    Gradient: gather of dy.
    Lowers: local `scatter_add` into the own block of ``dim``; where an index dim that is summed is
    split, an all_reduce of y over its axes.
    """

    def __init__(self, updates: Tensor, index: Tensor, dim: Dimension, output_shape: Shape, may_miss: bool):
        self.dim, self.output_shape, self.may_miss = dim, output_shape, may_miss
        super().__init__([updates, index], "scatter_add")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        updates, index = self.inputs
        if index.dtype not in INTEGERS or any(d not in updates.shape for d in index.shape):
            raise self.fail(
                f"the index {index!r} is not an integer tensor over dimensions of {updates.shape}.",
                "Give an index for every update.",
            )
        others = self.output_shape.without([self.dim.name])
        self.sizes([index.shape, others])
        rest = updates.shape.without([n for n in index.shape.names if n not in others.names])
        if sorted(rest) != sorted(others) or self.dim not in self.output_shape:
            raise self.fail(
                f"the output {self.output_shape} is not {self.dim}, the rest of {updates.shape} and"
                f" any of the dimensions of the index {index.shape}.",
                "Name every dimension of the updates that the index lacks.",
            )
        return [(self.output_shape, updates.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        updates, index = self.inputs
        dx = gather(only(dys), index, self.dim, self.may_miss)
        return [transpose(dx, updates.shape), None]

    def lower(self, lowering: Any) -> None:
        updates, index = self.inputs
        out, where = lowering.type_of(self.output), lowering.type_of(index)
        dim = self.dim.name
        kept = out.shape.without([dim])
        summed = {n: where.split(n) for n in index.shape.names if kept.find(n) < 0}
        free = [a for axes in summed.values() for a in axes]
        here = out.with_split(dim, ()) if set(out.split(dim)) & set(free) else out
        for n, axes in summed.items():
            if set(axes) & set(here.used_axes):
                summed[n] = ()
        wanted = {**lowering.splits_of(here), **summed}
        values = [lowering.fit(updates, wanted), lowering.fit(index, wanted)]
        t = lowering.pending(here, [a for axes in summed.values() for a in axes])
        lowering.define(self.output, lowering.emit(ir.ScatterAdd(dim, self.may_miss), values, t))


def scatter_add(
    updates: Tensor, indices: Tensor, dim: Dimension, output_shape: ShapeLike | None = None, may_miss: bool = False
) -> Tensor:
    """Sums ``updates`` into a tensor of zeros: the transpose of `gather`.

    Args:
        updates: [index dims, rest].
        indices: Integers over the index dims; outside 0..dim.size-1 an update is dropped.
        dim: The dimension addressed, of the output.
        output_shape: Default [dim, rest].  Index dims that it has too are batch dims:
            y[b, indices[b, i], r] += updates[b, i, r].
        may_miss: Says that indices outside are meant; otherwise `RangeError` in debug mode.
    """
    if output_shape is None:
        output_shape = [dim, *updates.shape.without(indices.shape.names)]
    return ScatterAdd(updates, indices, dim, Shape(output_shape), may_miss).output


class Put(Operation):
    """y = x, but y[batch, index[batch, ...], rest] = updates[batch, index dims, rest].

    Gradient: of x, dy with zeros in those rows; of the updates, these rows of dy.
    Lowers: local `put` into the own block; index dims that are no batch dims are gathered first.
    """

    def __init__(self, x: Tensor, updates: Tensor, index: Tensor, dim: str):
        self.dim = dim
        super().__init__([x, updates, index])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        x, updates, index = self.inputs
        rest = x.shape.without([self.dim])
        x.dim(self.dim, "put")
        if index.dtype not in INTEGERS or updates.dtype != x.dtype:
            raise self.fail(
                f"the index {index!r} is not an integer, or the updates {updates!r} are not {x.dtype}.",
                "Convert with mm.cast().",
            )
        self.sizes([index.shape, rest])
        wanted = [*index.shape, *rest.without([d.name for d in self._batch()])]
        if sorted(updates.shape) != sorted(wanted):
            raise self.fail(
                f"the updates {updates.shape} are not the index {index.shape} and the rest of {x.shape}.",
                f"Give updates with the dimensions {Shape(wanted)}.",
            )
        return [(x.shape, x.dtype)]

    def _batch(self) -> list[Dimension]:
        x, _, index = self.inputs
        return [d for d in index.shape if d.name != self.dim and d in x.shape]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (_, updates, index), dy = self.inputs, only(dys)
        rows = transpose(gather(dy, index, self.dim, may_miss=True), updates.shape)
        return [put(dy, zeros_like(updates), index, self.dim), rows, None]

    def lower(self, lowering: Any) -> None:
        x, updates, index = self.inputs
        out = lowering.type_of(self.output)
        batch = [d.name for d in self._batch()]
        wanted = {n: () for n in index.shape.names if n not in batch}
        wanted = {**lowering.splits_of(out), **wanted}
        values = [lowering.fit(x, lowering.splits_of(out))]
        values += [lowering.fit(t, wanted) for t in (updates, index)]
        lowering.define(self.output, lowering.emit(ir.Put(self.dim), values, out))


def put(x: Tensor, updates: Tensor, indices: Tensor, dim: DimLike) -> Tensor:
    """x with the rows at ``indices`` replaced by ``updates``.

    As the new value of a variable that nothing else reads, it is written in place: only the rows
    that are replaced are touched.  A cache of keys and values grows so.

    Args:
        x: [batch, dim, rest], dims in any order.
        updates: [dims of indices, rest].
        indices: Integers [batch, index dims]; the dims that both have (but for ``dim``) are batch
            dims: y[b, indices[b, i], r] = updates[b, i, r].  An index outside 0..size-1 drops its
            update.  The indices of one batch must differ.
        dim: The dim addressed (or its name); may be split.

    Returns:
        A tensor of the shape of x.

    Lowers: where an index dim that is no batch dim is split, an all_gather of the updates.
    """
    return Put(x, updates, indices, dim_name(dim)).output


class TopK(Operation):
    """The k largest (or smallest) along one dim and where they are; ties: lowest index first.

    NaN counts as the largest.
    Gradient of the values: scatter_add by the index.
    Lowers: local `top_k`; where the dim is split over R ranks, an all_gather of the k candidates
    of each and their indices, and a `top_k` of these; of the whole dim where that is no more.
    """

    def __init__(self, x: Tensor, dim: str, k_dim: Dimension, smallest: bool):
        self.dim, self.k_dim, self.smallest = dim, k_dim, smallest
        super().__init__([x], "top_k")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        n = x.dim(self.dim, "top_k").size
        if not 1 <= self.k_dim.size <= n:
            raise self.fail(f"{self.k_dim} is more than the {n} elements of '{self.dim}'.", f"Give 1 to {n}.")
        shape = x.shape.without([self.dim]) + [self.k_dim]
        return [(shape, x.dtype), (shape, "int32")]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (x,), dy = self.inputs, dys[0]
        if dy is None:
            return [None]
        return [scatter_add(dy, self.outputs[1], x.shape.dim(self.dim), x.shape)]

    def lower(self, lowering: Any) -> None:
        (x,), dim = self.inputs, self.dim
        values = [lowering.computed(x)]
        ranks = lowering.mesh.count(lowering.types[values[0]].split(dim))
        if ranks > 1 and self.k_dim.size * ranks < x.shape.dim(dim).size:
            many = Dimension(f"_{self.k_dim.name}_candidates", self.k_dim.size * ranks)
            found = self._emit(lowering, values, dim, many)
            whole = lowering.types[found[0]].with_split(many.name, ()).splits
            values, dim = [lowering.redistribute(v, whole) for v in found], many.name
        else:
            values = [lowering.whole(x, dim)]
        found = self._emit(lowering, values, dim, self.k_dim)
        for t, v in zip(self.outputs, found, strict=True):
            lowering.define(t, v)

    def _emit(self, lowering: Any, values: list[int], dim: str, k_dim: Dimension) -> list[int]:
        x: LocalType = lowering.types[values[0]]
        shape = x.shape.without([dim])
        splits = (*(x.split(n) for n in shape.names), x.split(dim))
        types = [LocalType(shape + [k_dim], d, splits) for d in (x.dtype, "int32")]
        return lowering.emit_many(ir.TopK(dim, k_dim.name, self.smallest), values, types)


def top_k(x: Tensor, reduced_dim: DimLike, k_dim: Dimension, smallest: bool = False) -> tuple[Tensor, Tensor]:
    """The ``k_dim.size`` largest along ``reduced_dim``, in falling order, and where they are.

    Args:
        x: Any data type; NaN counts as the largest.
        reduced_dim: The dim (or its name); may be split.
        k_dim: The dim in its place, of the results.
        smallest: The smallest instead, in rising order.

    Returns:
        (values, int32 indices); of equal elements the one with the lowest index comes first, in every layout.
    """
    values, indices = TopK(x, dim_name(reduced_dim), k_dim, smallest).outputs
    return values, indices
