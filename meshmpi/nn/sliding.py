"""Sizes, strides and padding of sliding dimensions in convolution and pooling layers.

Names and integers of dimensions only; the layers make tensors from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshmpi.dims import Dimension
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.ir.convolutions import ConvDims

Padding = str | Sequence[tuple[int, int]]
"""``"SAME"``: ceil(size / stride) elements, zeros shared by both ends, the odd one behind;
``"VALID"``: only where the whole filter lies inside, floor; or (before, after) for each dim."""
Sizes = int | Sequence[int]
"""One number for all dims that slide, or one for each."""


class Geometry(NamedTuple):
    """How one dim slides.

    Attributes:
        dim: The dim of the input.
        taps: Elements of the filter.
        stride, dilation: In elements of the input.
        before: Padding in front.
        size: Size of the result.
    """

    dim: Dimension
    taps: int
    stride: int
    dilation: int
    before: int
    size: int

    @property
    def filter_dim(self) -> Dimension:
        """The dim of the filter, called after that of the input."""
        return Dimension(f"filter_{self.dim.name}", self.taps)

    def slide(self) -> ConvDims:
        """The slide from the input into a dim of the same name."""
        name = self.dim.name
        return ConvDims(name, self.filter_dim.name, name, self.stride, self.dilation, self.before)


def sliding_dims(
    x: Tensor, count: int, spatial_dims: Sequence[DimLike] | None, channels: DimLike | None, what: str
) -> tuple[list[Dimension], Dimension]:
    """(the dims that slide, the channels) of x: as named, else the last ones, channels last.

    Raises:
        ShapeError: x has too few dims, or another number of dims is named.
    """
    if len(x.shape) < count + 1:
        raise ShapeError(
            f"{what}: {x!r} has {len(x.shape)} dimensions; {count} that slide and one of channels are needed.",
            "Add one with mm.reshape().",
            str(x.source),
        )
    channel = x.shape[-1] if channels is None else x.dim(dim_name(channels), what)
    if spatial_dims is None:
        return list(x.shape.without([channel.name])[-count:]), channel
    names = [dim_name(d) for d in spatial_dims]
    if len(names) != count or len(dict.fromkeys([*names, channel.name])) != count + 1:
        raise ShapeError(
            f"{what}: {names} and channels '{channel.name}' are not {count} dimensions that slide"
            " and another of channels.",
            "Name each once.",
            str(x.source),
        )
    return [x.dim(n, what) for n in names], channel


def each(value: Sizes | None, count: int, what: str) -> list[int]:
    """One number for each dim that slides."""
    if value is None:
        return [1] * count
    numbers = [value] * count if isinstance(value, int) else list(value)
    if len(numbers) != count or any(n < 1 for n in numbers):
        raise ShapeError(f"{what} is {value}.", f"Give one number of at least 1, or {count} of them.")
    return numbers


def geometry(
    dims: Sequence[Dimension],
    filter_size: Sizes,
    strides: Sizes | None,
    dilations: Sizes | None,
    padding: Padding,
    what: str,
) -> list[Geometry]:
    """How each of ``dims`` slides, and the size of the result.

    Raises:
        ShapeError: A number is missing or below 1, or nothing is left.
    """
    n = len(dims)
    taps, steps = each(filter_size, n, "filter_size"), each(strides, n, "strides")
    spread = each(dilations, n, "dilations")
    explicit = None if isinstance(padding, str) else [tuple(p) for p in padding]
    if explicit is None and padding not in ("SAME", "VALID"):
        raise ShapeError(f"{what}: padding is '{padding}'.", "Use 'SAME', 'VALID' or pairs.")
    if explicit is not None and (len(explicit) != n or any(len(p) != 2 for p in explicit)):
        raise ShapeError(f"{what}: padding is {explicit}.", f"Give {n} pairs (before, after).")
    out = []
    for k, dim in enumerate(dims):
        reach = (taps[k] - 1) * spread[k] + 1
        if explicit is not None:
            before, size = explicit[k][0], (dim.size + sum(explicit[k]) - reach) // steps[k] + 1
        elif padding == "VALID":
            before, size = 0, (dim.size - reach) // steps[k] + 1
        else:
            size = -(-dim.size // steps[k])
            before = max(0, (size - 1) * steps[k] + reach - dim.size) // 2
        if size < 1:
            raise ShapeError(
                f"{what}: a filter that reaches over {reach} elements does not fit into {dim} with padding {padding}.",
                f"Use padding='SAME', or a filter that reaches over {dim.size} at most.",
            )
        out.append(Geometry(dim, taps[k], steps[k], spread[k], before, size))
    return out
