"""Pooling: the maximum or mean over a sliding window.

Windows may overlap, leave gaps and extend over the border; any dimension may be split. To pool over a whole dimension
use `mm.reduce_max` or `mm.reduce_mean`.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import named
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.positions import range as indices
from meshmpi.graph.ops.reductions import reduce_max
from meshmpi.graph.ops.sources import ones
from meshmpi.graph.ops.structure import DimLike, pad, slice, stack
from meshmpi.ir.scalar import FLOATS
from meshmpi.nn.sliding import Geometry, Padding, Sizes, geometry, sliding_dims

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


def _largest(x: Tensor, found: Sequence[Geometry]) -> Tensor:
    for g in found:
        x = _max_along(x, g)
    return x


def _max_along(x: Tensor, g: Geometry) -> Tensor:
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


def _mean(x: Tensor, found: Sequence[Geometry]) -> Tensor:
    window = ones(Shape([g.filter_dim for g in found]), x.dtype)
    sizes = {g.dim.name: g.size for g in found}
    shape = Shape([d._replace(size=sizes.get(d.name, d.size)) for d in x.shape])
    y, whole = conv(x, window, [g.slide() for g in found], shape), 1
    for g in found:
        if g.before == 0 and (g.size - 1) * g.stride + g.taps <= g.dim.size:
            whole *= g.taps
        else:
            y = ew.divide(y, _inside(g, x.dtype), output_shape=y.shape)
    return y if whole == 1 else ew.multiply(y, 1 / whole)


def _inside(g: Geometry, dtype: str) -> Tensor:
    """The number of elements of each window along one dim that are not padding: [dim]."""
    first = ew.subtract(ew.multiply(indices(g.dim._replace(size=g.size)), g.stride), g.before)
    end = ew.minimum(ew.add(first, g.taps), g.dim.size)
    return ew.cast(ew.subtract(end, ew.maximum(first, 0)), dtype)


_KINDS = {"max": (_largest, (*FLOATS, *_SMALLEST)), "avg": (_mean, FLOATS)}
"""Kind of pooling -> what makes it, and the data types that have it."""


def _pooling(kind: str, count: int, doc: str):
    """A row of the table of pooling functions: ``max`` or ``avg`` over windows along ``count`` dims."""
    pooled, dtypes = _KINDS[kind]

    def pool(
        x: Tensor,
        ksize: Sizes = 2 if count == 1 else (2,) * count,
        name: str = f"{kind}_pool{count}d",
        strides: Sizes | None = None,
        padding: Padding = "VALID",
        *,
        spatial_dims: Sequence[DimLike] | None = None,
        channels: DimLike | None = None,
    ) -> Tensor:
        if x.dtype not in dtypes:
            raise ShapeError(f"{name}: x is {x.dtype}.", "Convert with mm.cast(x, dtype).")
        return pooled(x, _geometry(x, ksize, strides, padding, count, spatial_dims, channels, name))

    return named(pool, f"{kind}_pool{count}d", doc)


max_pool1d = _pooling("max", 1, "The largest element of windows along one dim; see `max_pool2d`.")
max_pool2d = _pooling(
    "max",
    2,
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
    """,
)
max_pool3d = _pooling("max", 3, "The largest element of windows along three dims; see `max_pool2d`.")
avg_pool1d = _pooling("avg", 1, "The mean of windows along one dim; see `avg_pool2d`.")
avg_pool2d = _pooling(
    "avg",
    2,
    """The mean of the elements of windows along two dims; padding does not count.

    The arguments are those of `max_pool2d`.

    Lowers: where a dim that slides is split, halos by `shift`.
    """,
)
avg_pool3d = _pooling("avg", 3, "The mean of windows along three dims; see `avg_pool2d`.")
