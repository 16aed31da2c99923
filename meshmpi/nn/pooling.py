"""Pooling: the largest or mean element of each position of a window that slides.

Windows may overlap, leave gaps and reach over the border; any dim may be split by the layout.
Pooling over a whole dim is `mm.reduce_max` or `mm.reduce_mean`.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.positions import range as indices
from meshmpi.graph.ops.reductions import reduce_max
from meshmpi.graph.ops.sources import ones
from meshmpi.graph.ops.structure import DimLike, pad, slice, stack
from meshmpi.ir.scalar import FLOATS
from meshmpi.nn.sliding import Geometry, Padding, Sizes, geometry, resized, sliding_dims

_SMALLEST = {"int32": -(1 << 31), "int64": -(1 << 63), "uint8": 0}
_TAPS = "_taps"


def _geometry(
    x: Tensor,
    ksize: Sizes,
    strides: Sizes | None,
    padding: Padding,
    count: int,
    spatial_dims: Sequence[DimLike] | None,
    channels: DimLike | None,
    name: str,
) -> list[Geometry]:
    dims, _ = sliding_dims(x, count, spatial_dims, channels, name)
    found = geometry(dims, ksize, ksize if strides is None else strides, None, padding, name)
    for g in found:
        last = (g.size - 1) * g.stride - g.before
        if g.before >= g.taps or last >= g.dim.size:
            raise ShapeError(
                f"{name}: with {g.before} elements of padding before {g.dim} and windows of"
                f" {g.taps}, a window holds padding only.",
                "Pad less than a window.",
                str(x.source),
            )
    return found


def _max_along(x: Tensor, g: Geometry) -> Tensor:
    """The largest of the elements under each position of the window along one dim."""
    reach = (g.size - 1) * g.stride
    behind = reach + g.taps - g.before - g.dim.size
    smallest = float("-inf") if x.dtype in FLOATS else _SMALLEST[x.dtype]
    padded = pad(x, [g.before, max(0, behind)], g.dim, smallest)
    taps = [slice(padded, t, reach + 1, g.dim, g.stride) for t in range(g.taps)]
    if g.taps == 1:
        return taps[0]
    if g.taps == 2:  # half the gradient to each of two that are equal
        return ew.maximum(taps[0], taps[1])
    return reduce_max(stack(taps, _TAPS), reduced_dim=_TAPS)


def _max_pool(
    count: int,
    x: Tensor,
    ksize: Sizes,
    strides: Sizes | None,
    padding: Padding,
    name: str,
    spatial_dims: Sequence[DimLike] | None,
    channels: DimLike | None,
) -> Tensor:
    if x.dtype not in FLOATS and x.dtype not in _SMALLEST:
        raise ShapeError(f"{name}: x is {x.dtype}.", "Convert with mm.cast(x, dtype).")
    for g in _geometry(x, ksize, strides, padding, count, spatial_dims, channels, name):
        x = _max_along(x, g)
    return x


def max_pool1d(
    x: Tensor,
    ksize: Sizes = 2,
    name: str = "max_pool1d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The largest element of windows along one dim; see `max_pool2d`."""
    return _max_pool(1, x, ksize, strides, padding, name, spatial_dims, channels)


def max_pool2d(
    x: Tensor,
    ksize: Sizes = (2, 2),
    name: str = "max_pool2d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The largest element of windows along two dims.

    Args:
        x: [..., height, width, channels], or any shape whose dims are named below.
        ksize: Elements of the window along each dim.
        name: In messages.
        strides: From one window to the next; default ``ksize``, windows side by side.
        padding: "VALID": whole windows only, floor((size - ksize) / stride) + 1 of them; "SAME":
            ceil(size / stride); or (before, after).  Padding is never the largest.
        spatial_dims: The dims that slide; default the last ones but for the channels.
        channels: Default the last dim.

    Returns:
        x's dims with the sizes that sliding leaves.

    Raises:
        ShapeError: No window fits, or one would hold padding only.

    Gradient: elements that are equally large share it, first along the last dim that slides.

    Lowers: where a dim that slides is split, a `shift` for each element of the window along it,
    which sends what a block lacks; nothing where windows end with the blocks.
    """
    return _max_pool(2, x, ksize, strides, padding, name, spatial_dims, channels)


def max_pool3d(
    x: Tensor,
    ksize: Sizes = (2, 2, 2),
    name: str = "max_pool3d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The largest element of windows along three dims; see `max_pool2d`."""
    return _max_pool(3, x, ksize, strides, padding, name, spatial_dims, channels)


def _inside(g: Geometry, dtype: str) -> Tensor:
    """How many elements of each window along one dim are no padding: [dim]."""
    first = ew.subtract(ew.multiply(indices(g.dim._replace(size=g.size)), g.stride), g.before)
    end = ew.minimum(ew.add(first, g.taps), g.dim.size)
    return ew.cast(ew.subtract(end, ew.maximum(first, 0)), dtype)


def _avg_pool(
    count: int,
    x: Tensor,
    ksize: Sizes,
    strides: Sizes | None,
    padding: Padding,
    name: str,
    spatial_dims: Sequence[DimLike] | None,
    channels: DimLike | None,
) -> Tensor:
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name}: x is {x.dtype}.", "Convert with mm.cast(x, dtype).")
    found = _geometry(x, ksize, strides, padding, count, spatial_dims, channels, name)
    window = ones(Shape([g.filter_dim for g in found]), x.dtype)
    y = conv(x, window, [g.slide() for g in found], resized(x.shape, found))
    whole = 1
    for g in found:
        if g.before == 0 and (g.size - 1) * g.stride + g.taps <= g.dim.size:
            whole *= g.taps
        else:
            y = ew.divide(y, _inside(g, x.dtype), output_shape=y.shape)
    return y if whole == 1 else ew.multiply(y, 1 / whole)


def avg_pool1d(
    x: Tensor,
    ksize: Sizes = 2,
    name: str = "avg_pool1d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The mean of windows along one dim; see `avg_pool2d`."""
    return _avg_pool(1, x, ksize, strides, padding, name, spatial_dims, channels)


def avg_pool2d(
    x: Tensor,
    ksize: Sizes = (2, 2),
    name: str = "avg_pool2d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The mean of the elements of windows along two dims; padding does not count.

    Args: as `max_pool2d`.

    Lowers: where a dim that slides is split, halos by `shift`.
    """
    return _avg_pool(2, x, ksize, strides, padding, name, spatial_dims, channels)


def avg_pool3d(
    x: Tensor,
    ksize: Sizes = (2, 2, 2),
    name: str = "avg_pool3d",
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """The mean of windows along three dims; see `avg_pool2d`."""
    return _avg_pool(3, x, ksize, strides, padding, name, spatial_dims, channels)
