"""Reductions over named dimensions and compositions of them; running sums along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import DimLike, DimsLike, Shape, ShapeLike, dim_name, dim_names
from meshmpi.errors import ShapeError, suggest
from meshmpi.graph import Operation, Tensor, call_of, only
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.positions import check_band, inside_band
from meshmpi.ir import kinds as ir
from meshmpi.ir.bands import Band
from meshmpi.ir.program import LocalType
from meshmpi.ir.scalar import FLOATS


class Reduce(Operation):
    """y[rest] = op over dims of x[rest, dims]; op is sum, max, min or prod.

    With a ``band`` only elements whose pair of indices is in it take part.

    Gradient: of sum, dy repeated; of max and min, dy shared equally among the elements that attain it (the reference
    gives all of it to each); of prod, dy times the product of the others; outside the band 0.
    Lowers: a local `reduce`; where a reduced dim is split, an `all_reduce` of y over its axes.
    """

    follows = True

    def __init__(self, op: str, x: Tensor, output_shape: Shape, band: Band | None = None):
        self.op, self.output_shape, self.band = op, output_shape, band
        super().__init__([x], f"reduce_{op}")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        if self.band is not None:
            check_band(self, self.band, [x.shape])
        if self.op in ("sum", "prod") and x.dtype == "bool":
            raise self.fail("the input is bool.", "Count with mm.reduce_sum(mm.cast(x, 'int32')).")
        return [(self.output_shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (x,), dy, y = self.inputs, only(dys), self.output
        if self.op == "sum":
            return [inside_band(ew.broadcast(dy, x.shape), self.band)]
        if self.op == "prod":
            return [ew.multiply(dy, _product_of_others(x, y.shape))]
        hit = inside_band(ew.cast(ew.equal(x, y), x.dtype), self.band)
        dx = ew.multiply(hit, ew.divide(dy, reduce_sum(hit, output_shape=y.shape)))
        return [inside_band(dx, self.band)]  # a row without any pair divides by 0

    def lower(self, lowering: Any) -> None:
        (x,) = self.inputs
        value = lowering.reduce(lowering.value(x), self.op, self.output_shape, self.band)
        lowering.define(self.output, value)


def _product_of_others(x: Tensor, shape: Shape) -> Tensor:
    """At every point the product of all other elements of its group, zeros among them or not.

    The product of those that are not 0 gives it without another pass: divided by x where none is
    0, as it is where x is the only 0, and 0 elsewhere.
    """
    is_zero = ew.equal(x, 0.0)
    zeros = reduce_sum(ew.cast(is_zero, "int32"), output_shape=shape)
    without = ew.where(is_zero, 1.0, x)
    product = reduce_prod(without, output_shape=shape)
    others = ew.divide(product, without, output_shape=x.shape)  # x itself where it is 0: product
    alone = ew.logical_and(is_zero, ew.equal(zeros, 1))
    return ew.where(ew.logical_or(ew.equal(zeros, 0), alone), others, 0.0, output_shape=x.shape)


def _output_shape(x: Tensor, output_shape: ShapeLike | None, reduced_dim: DimsLike | None, what: str) -> Shape:
    if output_shape is not None:
        if reduced_dim is not None:
            raise ShapeError(
                f"{what}: both output_shape {output_shape} and reduced_dim {reduced_dim} are given.",
                "Give one of them.",
                call_of(what, x),
            )
        out = Shape(output_shape)
        for d in out:
            if d not in x.shape:
                raise ShapeError(
                    f"{what}: output dimension {d} is not in the input {x.users_name} {x.shape}.",
                    f"Its dimension is {x.shape.dim(d.name)}."
                    if x.shape.find(d.name) >= 0
                    else suggest(d.name, x.shape.names),
                    call_of(what, x),
                )
        return out
    if reduced_dim is None:
        return Shape()
    names = dim_names(reduced_dim)
    for n in names:
        x.dim(n, what)
    return x.shape.without(names)


def _reduce(
    op: str, x: Tensor, output_shape: ShapeLike | None, reduced_dim: DimsLike | None, band: Band | None = None
) -> Tensor:
    shape = _output_shape(x, output_shape, reduced_dim, f"reduce_{op}")
    return x if shape == x.shape and band is None else Reduce(op, x, shape, band).output


def reduce_sum(
    x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None, band: Band | None = None
) -> Tensor:
    """Sum over ``reduced_dim`` (one or a list, dims or names), or down to ``output_shape``.

    With neither, over all dims.  With a ``band`` over elements whose pair of indices is in it; no
    other is looked at.  Lowers: all_reduce of the result over the axes of reduced split
    dims.  Source: Mesh-TensorFlow's reduce_sum.
    """
    return _reduce("sum", x, output_shape, reduced_dim, band)


def reduce_max(
    x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None, band: Band | None = None
) -> Tensor:
    """Largest element; arguments as `reduce_sum`.  Ties share the gradient equally."""
    return _reduce("max", x, output_shape, reduced_dim, band)


def reduce_min(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Smallest element; arguments as `reduce_sum`.  Ties share the gradient equally."""
    return _reduce("min", x, output_shape, reduced_dim)


def reduce_prod(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Product; arguments as `reduce_sum`.  The gradient is right where elements are 0 too.

    Not so second derivatives, which take the elements that are 0 for constants.
    """
    return _reduce("prod", x, output_shape, reduced_dim)


def reduce_mean(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Mean; arguments as `reduce_sum`."""
    if x.dtype not in FLOATS:
        raise ShapeError(
            f"reduce_mean: {x!r} is not floating-point.",
            "Convert it with mm.cast(x, 'float32').",
            call_of("reduce_mean", x),
        )
    y = reduce_sum(x, output_shape=output_shape, reduced_dim=reduced_dim)
    return y if y is x else ew.multiply(y, y.shape.size / x.shape.size)


def reduce_variance(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Mean of the squares of the deviations from the mean; arguments as `reduce_sum`."""
    mean = reduce_mean(x, output_shape=output_shape, reduced_dim=reduced_dim)
    return reduce_mean(ew.square(ew.subtract(x, mean, output_shape=x.shape)), output_shape=mean.shape)


def reduce_std(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Square root of `reduce_variance`; its gradient is infinite where that is 0."""
    return ew.sqrt(reduce_variance(x, output_shape=output_shape, reduced_dim=reduced_dim))


def reduce_any(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Whether any element of a bool tensor holds."""
    return _reduce("max", _bool(x, "reduce_any"), output_shape, reduced_dim)


def reduce_all(x: Tensor, *, output_shape: ShapeLike | None = None, reduced_dim: DimsLike | None = None) -> Tensor:
    """Whether all elements of a bool tensor hold."""
    return _reduce("min", _bool(x, "reduce_all"), output_shape, reduced_dim)


def _bool(x: Tensor, what: str) -> Tensor:
    if x.dtype != "bool":
        raise ShapeError(f"{what}: {x!r} is not bool.", "Compare it first, as in x > 0.", call_of(what, x))
    return x


class Cumsum(Operation):
    """y[i] = x[0] + ... + x[i] along one dim; exclusive: without x[i]; reverse: from the other end.

    Gradient: the cumsum of dy from the other end.
    Lowers: local `cumsum`; where the dim is split into R blocks, a local `block_sum` and an
    all_gather of the R sums of blocks first.
    """

    follows = True

    def __init__(self, x: Tensor, dim: str, exclusive: bool, reverse: bool):
        self.dim, self.exclusive, self.reverse = dim, exclusive, reverse
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        x.dim(self.dim, "cumsum")
        if x.dtype == "bool":
            raise self.fail("the input is bool.", "Count with mm.cumsum(mm.cast(x, 'int32'), dim).")
        return [(x.shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [cumsum(only(dys), self.dim, self.exclusive, not self.reverse)]

    def lower(self, lowering: Any) -> None:
        value = lowering.value(self.inputs[0])
        x: LocalType = lowering.types[value]
        values, blocks = [value], ""
        if x.split(self.dim):
            blocks = f"_{self.dim}_blocks"
            t = ir.block_sums(lowering.mesh, x, self.dim, blocks)
            sums = lowering.emit(ir.BlockSum(self.dim, blocks), values, t)
            values.append(lowering.redistribute(sums, t.with_split(blocks, ()).splits))
        running = ir.Cumsum(self.dim, self.exclusive, self.reverse, blocks)
        lowering.define(self.output, lowering.emit(running, values, x))


def cumsum(x: Tensor, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sums of x along ``dim``, in one pass over the elements.

    Args:
        x: Any numbers; sums over bfloat16 are formed in float32, those of integers wrap around.
        dim: The dim (or its name); may be split.
        exclusive: y[i] sums what comes before x[i] only.
        reverse: Sums from the last element to the first.

    Returns:
        A tensor of x's shape and data type.

    Lowers: where ``dim`` is split into R blocks, an all_gather of R sums for each row.
    Source: Mesh-TensorFlow's cumsum, whose cost is the square of the size.

    Example:
        >>> position = mm.cumsum(mm.cast(is_chosen, "int32"), "tokens", exclusive=True)
    """
    return Cumsum(x, dim_name(dim), exclusive, reverse).output
