"""einsum over named dimensions: every matrix product of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import DimsLike, Shape, ShapeLike, dim_names
from meshmpi.errors import ShapeError, suggest
from meshmpi.graph import Operation, Tensor, call_of
from meshmpi.graph.ops.elementwise import broadcast
from meshmpi.graph.ops.positions import check_band
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.structure import transpose
from meshmpi.ir.bands import Band


class Einsum(Operation):
    """y[out] = sum over all other dims of x1 * x2 * ..., dims matched by name.

    With a ``band`` the products of pairs of indices outside it do not exist: they are in no sum,
    and 0 in a result that has both dims.

    Gradient of an input: einsum of dy with the other inputs, in the same band, repeated along dims
    that only this input has.
    Lowers: local `contract`s of two operands, in the order opt_einsum finds cheapest for the local
    sizes; where a summed-out dim is split, an `all_reduce` over its axes.
    Source: Shazeer et al. 2018, section 4.
    """

    def __init__(self, xs: Sequence[Tensor], output_shape: Shape, band: Band | None = None):
        self.output_shape, self.band = output_shape, band
        super().__init__(xs, "einsum")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        known = self.sizes([x.shape for x in self.inputs])
        shapes = " and ".join(str(x.shape) for x in self.inputs)
        for d in self.output_shape:
            if d.name in known and known[d.name] != d.size:
                raise self.fail(
                    f"output dimension '{d.name}' has size {d.size}, and {known[d.name]} in {shapes}.",
                    f"Give {d.name}={known[d.name]}, the Dimension of the inputs.",
                )
            if d.name not in known:
                raise self.fail(
                    f"output dimension '{d.name}' ({d.size}) is in none of the inputs {shapes}.", suggest(d.name, known)
                )
        dtype = self.one_dtype(self.inputs)
        if dtype == "bool":
            raise self.fail("the inputs are bool.", "Convert them with mm.cast(x, 'float32').")
        if self.band is not None:
            self._check_band(self.band)
        return [(self.output_shape, dtype)]

    def _check_band(self, band: Band) -> None:
        shapes = [*(x.shape for x in self.inputs), self.output_shape]
        check_band(self, band, shapes)
        dims = [d for s in shapes for d in s]
        alone = [d.name for d in dict.fromkeys(dims) if dims.count(d) == 1]
        if len(self.inputs) != 2 or alone:
            raise self.fail(
                f"a product with the band {band} has {len(self.inputs)} inputs"
                + (f" and sums {alone} of one of them alone." if alone else "."),
                "Give two inputs, and sum such dimensions with mm.reduce_sum() first.",
            )

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (dy,) = dys
        out = []
        for i, x in enumerate(self.inputs):
            others = [dy, *self.inputs[:i], *self.inputs[i + 1 :]]
            present = {d for t in others for d in t.shape}
            shape = Shape([d for d in x.shape if d in present])
            dx = einsum(others, shape, band=self.band)
            out.append(dx if shape == x.shape else broadcast(dx, x.shape))
        return out

    def lower(self, lowering: Any) -> None:
        values = [lowering.computed(x) for x in self.inputs]
        lowering.define(self.output, lowering.contract(values, self.output_shape, self.band))


def einsum(
    xs: Sequence[Tensor],
    output_shape: ShapeLike | None = None,
    reduced_dims: DimsLike | None = None,
    *,
    band: Band | None = None,
) -> Tensor:
    """Product of all inputs, summed over the dims that the output lacks.

    Args:
        xs: One or more tensors of one data type.
        output_shape: Dims of the result, in order; each must be in an input.
        reduced_dims: Dims (or names) to sum over instead; the result has the others in order of
            appearance.  With neither, the result has the dims that appear exactly once.
        band: Pairs of two indices that take part, of two inputs: whatever stands outside, NaN too,
            is in no sum, and a result with both dims is 0 there.

    Returns:
        A tensor of ``output_shape``.

    Raises:
        ShapeError: Sizes differ, or an output dim is in no input.

    Example:
        >>> y = mm.einsum([x, w], [batch, hidden])
    """
    xs = list(xs)
    if not xs:
        raise ShapeError("einsum: there are no inputs.", "Give at least one tensor.")
    shape = _einsum_shape(xs, output_shape, reduced_dims)
    if len(xs) == 1 and (band is not None or sorted(shape) != sorted(xs[0].shape)):
        return reduce_sum(xs[0], output_shape=shape, band=band)
    if len(xs) == 1:
        return transpose(xs[0], shape)
    return Einsum(xs, shape, band).output


def _einsum_shape(xs: Sequence[Tensor], output_shape: ShapeLike | None, reduced_dims: DimsLike | None) -> Shape:
    dims = [d for x in xs for d in x.shape]
    unique = list(dict.fromkeys(dims))
    if reduced_dims is not None:
        names = dim_names(reduced_dims)
        for n in names:
            if n not in [d.name for d in unique]:
                raise ShapeError(
                    f"einsum: reduced dimension '{n}' is in no input.",
                    suggest(n, [d.name for d in unique]),
                    call_of("einsum", *xs),
                )
        rest = [d for d in unique if d.name not in names]
        if output_shape is not None and sorted(Shape(output_shape)) != sorted(rest):
            raise ShapeError(
                f"einsum: output_shape {Shape(output_shape)} and reduced_dims {names} contradict"
                f" each other; without these dims there is {Shape(rest)}.",
                "Give one of them.",
                call_of("einsum", *xs),
            )
    else:
        rest = [d for d in unique if dims.count(d) == 1]
    return Shape(rest if output_shape is None else output_shape)


def matmul(a: Tensor, b: Tensor, output_shape: ShapeLike | None = None) -> Tensor:
    """einsum of two tensors: sums over the dims that both have and ``output_shape`` lacks."""
    return einsum([a, b], output_shape)
