"""Sorting, ranking, first elements, shifts by a tensor.

Composed from primitives; each function documents its traffic if its dimension is split.
"""

from __future__ import annotations

from meshmpi.dims import Dimension
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import gather, top_k
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import reduce_any, reduce_max, reduce_min, reduce_sum
from meshmpi.graph.ops.structure import DimLike, dim_name, reshape, shift, slice, transpose
from meshmpi.ir.scalar import FLOATS, INTEGERS


def top_1(x: Tensor, reduced_dim: DimLike) -> tuple[Tensor, Tensor]:
    """(largest value, int32 index of its first occurrence) along ``reduced_dim``.

    Ties share the gradient.  Where there is a NaN it is the value, and the first one the index, as in NumPy.

    Lowers: where the dim is split, two all_reduces without it.
    """
    return _extreme(x, reduced_dim, largest=True)


def argmax(x: Tensor, reduced_dim: DimLike) -> Tensor:
    """int32 index of the first largest element along ``reduced_dim``; the rest as `top_1`."""
    return _extreme(x, reduced_dim, largest=True)[1]


def argmin(x: Tensor, reduced_dim: DimLike) -> Tensor:
    """int32 index of the first smallest element along ``reduced_dim``; the rest as `top_1`."""
    return _extreme(x, reduced_dim, largest=False)[1]


def _extreme(x: Tensor, reduced_dim: DimLike, largest: bool) -> tuple[Tensor, Tensor]:
    dim = x.shape.dim(dim_name(reduced_dim))
    best = (reduce_max if largest else reduce_min)(x, reduced_dim=dim)
    hit = ew.equal(x, best, output_shape=x.shape)
    if x.dtype in FLOATS:  # a NaN equals nothing, also where it is the best
        hit = ew.logical_or(hit, ew.not_equal(x, x))
    return best, reduce_min(ew.where(hit, index_range(dim), dim.size - 1), reduced_dim=dim)


def sort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """x with its elements along ``dim`` in rising order, NaN last; or falling, NaN first.

    Lowers: where the dim is split, an all_gather of it.
    """
    return transpose(_sorted(x, dim, descending)[0], x.shape)


def argsort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """int32 indices along ``dim`` in the order of `sort`; equal elements keep their order."""
    return transpose(_sorted(x, dim, descending)[1], x.shape)


def _sorted(x: Tensor, dim: DimLike, descending: bool) -> tuple[Tensor, Tensor]:
    whole = x.shape.dim(dim_name(dim))
    return top_k(x, whole, whole, smallest=not descending)


def nth_largest_element(x: Tensor, n: int, reduced_dim: DimLike) -> Tensor:
    """The element that n others precede in falling order along ``reduced_dim``; n = 0: the largest.

    Args:
        x: Any numbers; NaN counts as the largest.
        n: From 0 to size - 1.
        reduced_dim: The dim (or its name); gone in the result.

    Lowers: a `mm.top_k` of n + 1, which says what it sends.
    """
    return _nth(x, n, reduced_dim, smallest=False)


def nth_smallest_element(x: Tensor, n: int, reduced_dim: DimLike) -> Tensor:
    """The element that n others precede in rising order; n = 0: the smallest.  NaN comes last."""
    return _nth(x, n, reduced_dim, smallest=True)


def _nth(x: Tensor, n: int, reduced_dim: DimLike, smallest: bool) -> Tensor:
    dim = x.shape.dim(dim_name(reduced_dim))
    if not 0 <= n < dim.size:
        raise ShapeError(
            f"nth element: there is no element {n} among the {dim.size} of '{dim.name}'.",
            f"Count from 0 to {dim.size - 1}.",
            str(x.source),
        )
    k_dim = Dimension(f"_{dim.name}_ranked", n + 1)
    values, _ = top_k(x, dim, k_dim, smallest)
    return reshape(slice(values, n, 1, k_dim), values.shape.without([k_dim.name]))


def reduce_first(x: Tensor, reduced_dim: DimLike) -> Tensor:
    """The first element along ``reduced_dim``.

    Lowers: where the dim is split, an all_reduce of the result over its axes.
    """
    dim = x.shape.dim(dim_name(reduced_dim))
    is_first = ew.equal(index_range(dim), 0)
    if x.dtype == "bool":
        return reduce_any(ew.logical_and(x, is_first, output_shape=x.shape), reduced_dim=dim)
    return reduce_sum(ew.where(is_first, x, 0, output_shape=x.shape), reduced_dim=dim)


def dynamic_shift(x: Tensor, offset: Tensor | int, dim: DimLike, wrap: bool) -> Tensor:
    """y[i] = x[i - offset] along one dim, where the offset is computed.

    Args:
        x: Any tensor with ``dim``.
        offset: Integers over any other dims of x, so that rows may be shifted differently; a plain
            number is `mm.shift`.
        dim: The dim (or its name).
        wrap: Elements leave at one end and come in at the other; otherwise zeros come in.

    Lowers: a `gather`; where ``dim`` is split, an all_gather of it first.
    """
    if not isinstance(offset, Tensor):
        return shift(x, offset, dim, wrap)
    n = x.shape.dim(dim_name(dim))
    others = x.shape.without([n.name])
    if offset.dtype not in INTEGERS or any(d not in others for d in offset.shape):
        raise ShapeError(
            f"dynamic_shift: the offset {offset!r} is not an integer tensor over dimensions of {others}.",
            "Cast it, or reduce its other dimensions.",
            str(offset.source),
        )
    source = ew.subtract(index_range(n, offset.dtype), offset)
    source = ew.mod(source, n.size) if wrap else source
    return transpose(gather(x, source, n, may_miss=not wrap), x.shape)
