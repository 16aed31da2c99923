"""Operations that address by index: gather, scatter_add, top_k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, only
from meshmpi.ops.structure import DimLike, dim_name
from meshmpi.scalar import INTEGERS


class Gather(Operation):
    """y[index dims, rest] = table[index[...], rest]; an index outside gives zeros.

    Gradient: scatter_add of dy.
    Lowers: local `gather` of the rows in the own block; where ``dim`` is split, an all_reduce of y
    over its axes.  Where y is split over the same axes, ``dim`` is gathered first.
    """

    def __init__(self, table: Tensor, index: Tensor, dim: str):
        self.dim = dim
        super().__init__([table, index])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        table, index = self.inputs
        table.shape.position(self.dim)
        if index.dtype not in INTEGERS:
            raise self.fail(f"the index {index!r} is not an integer.", "Convert it with mm.cast().")
        rest = table.shape.without([self.dim])
        for d in rest:
            if index.shape.find(d.name) >= 0:
                raise self.fail(
                    f"dimension '{d.name}' is in the index {index.shape} and in the rows {rest}.",
                    "Rename one with mm.rename_dimension().",
                )
        return [(index.shape + rest, table.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        table, index = self.inputs
        return [scatter_add(only(dys), index, table.shape.dim(self.dim), table.shape), None]

    def lower(self, lowering: Any) -> None:
        table, index = self.inputs
        out = lowering.type_of(self.output)
        axes = [a for a in lowering.type_of(table).split(self.dim) if a not in out.used_axes]
        same = lowering.splits_of(out)
        if tuple(axes) != lowering.type_of(table).split(self.dim):
            axes = []
        values = [
            lowering.fit(table, {**same, self.dim: tuple(axes)}), lowering.fit(index, same),
        ]  # fmt: skip
        result = lowering.emit("gather", values, lowering.pending(out, axes), dim=self.dim)
        lowering.define(self.output, result)


def gather(weights: Tensor, indices: Tensor, dim: DimLike) -> Tensor:
    """Rows of ``weights`` along ``dim`` at ``indices``: an embedding lookup.

    An index outside 0..size-1 gives a row of zeros in every layout.
    """
    return Gather(weights, indices, dim_name(dim)).output


class ScatterAdd(Operation):
    """y[dim, rest] = sum of the rows of updates[index dims, rest] whose index is that of y's row.

    Gradient: gather of dy.
    Lowers: local `scatter_add` into the own block of ``dim``; where an index dim is split, an
    all_reduce of y over its axes.
    """

    def __init__(self, updates: Tensor, index: Tensor, dim: Dimension, output_shape: Shape):
        self.dim, self.output_shape = dim, output_shape
        super().__init__([updates, index], "scatter_add")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        updates, index = self.inputs
        rest = updates.shape.without(index.shape.names)
        if index.dtype not in INTEGERS or any(d not in updates.shape for d in index.shape):
            raise self.fail(
                f"the index {index!r} is not an integer tensor over dimensions of {updates.shape}.",
                "Give an index for every update.",
            )
        if sorted(rest + [self.dim]) != sorted(self.output_shape):
            raise self.fail(f"the output {self.output_shape} is not {self.dim} and {rest}.")
        return [(self.output_shape, updates.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        updates, index = self.inputs
        from meshmpi.ops.structure import transpose

        return [transpose(gather(only(dys), index, self.dim), updates.shape), None]

    def lower(self, lowering: Any) -> None:
        updates, index = self.inputs
        out = lowering.type_of(self.output)
        summed = lowering.type_of(index).used_axes
        axes = out.split(self.dim.name)
        here = out if not set(axes) & set(summed) else out.with_split(self.dim.name, ())
        wanted = {**lowering.splits_of(here), **lowering.splits_of(lowering.type_of(index))}
        values = [lowering.fit(updates, wanted), lowering.value(index)]
        free = [a for a in summed if a not in here.used_axes]
        result = lowering.emit(
            "scatter_add", values, lowering.pending(here, free), dim=self.dim.name
        )
        lowering.define(self.output, result)


def scatter_add(
    updates: Tensor, indices: Tensor, dim: Dimension, output_shape: Shape | None = None
) -> Tensor:
    """Sums ``updates`` into rows of a tensor of zeros: the transpose of `gather`.

    Args:
        updates: [index dims, rest].
        indices: Integers over the index dims; outside 0..dim.size-1 an update is dropped.
        dim: The dimension addressed, of the output only.
        output_shape: Default [dim, rest].
    """
    shape = output_shape or Shape([dim, *updates.shape.without(indices.shape.names)])
    return ScatterAdd(updates, indices, dim, shape).output


class TopK(Operation):
    """The k largest along one dim and where they are; ties: lowest index first.

    Gradient of the values: scattered back through a one-hot of the index.
    Lowers: local `top_k`; where the dim is split, an all_gather of it first.
    """

    def __init__(self, x: Tensor, dim: str, k_dim: Dimension):
        self.dim, self.k_dim = dim, k_dim
        super().__init__([x], "top_k")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        n = x.shape.dim(self.dim).size
        if self.k_dim.size > n:
            raise self.fail(f"{self.k_dim} of the {n} elements of '{self.dim}' are asked for.")
        shape = x.shape.without([self.dim]) + [self.k_dim]
        return [(shape, x.dtype), (shape, "int32")]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        from meshmpi.ops import elementwise as ew
        from meshmpi.ops.reductions import reduce_sum
        from meshmpi.ops.sources import range as index_range

        (x,), dy = self.inputs, dys[0]
        if dy is None:
            return [None]
        hit = ew.equal(self.outputs[1], index_range(x.shape.dim(self.dim)))
        return [reduce_sum(ew.where(hit, dy, 0.0), output_shape=x.shape)]

    def lower(self, lowering: Any) -> None:
        value = lowering.whole(self.inputs[0], self.dim)
        types = [lowering.like_input(value, t) for t in self.outputs]
        values = lowering.emit_many("top_k", [value], types, dim=self.dim, k=self.k_dim.name)
        for t, v in zip(self.outputs, values, strict=True):
            lowering.define(t, v)


def top_k(x: Tensor, reduced_dim: DimLike, k_dim: Dimension) -> tuple[Tensor, Tensor]:
    """(values, indices) of the ``k_dim.size`` largest along ``reduced_dim``, in falling order."""
    if not isinstance(k_dim, Dimension):
        raise ShapeError(f"top_k: k_dim is {k_dim!r}.", "Give mm.Dimension(name, k).")
    values, indices = TopK(x, dim_name(reduced_dim), k_dim).outputs
    return values, indices
