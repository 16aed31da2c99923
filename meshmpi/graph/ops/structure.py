"""Operations that move elements: transpose, reshape, rename, slice, pad, concat and composites."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshmpi.dims import Dimension, DimLike, Shape, ShapeLike, block_sizes, dim_name
from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, call_of, only
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.sources import ones, zeros_like
from meshmpi.ir import kinds as ir
from meshmpi.ir.convolutions import ConvDims
from meshmpi.ir.program import Kind


def _lower_along(
    operation: Operation, lowering: Any, local: Kind, dim: str, offsets: Sequence[int], **how: Any
) -> None:
    """By ``local``; where ``dim`` is split, by a `shift` that sends each rank the elements of its block of y."""
    values = [lowering.computed(x) for x in operation.inputs]
    if lowering.is_split(values[0], dim):
        result = lowering.shift(values, operation.output, dim, offsets, **how)
    else:
        result = lowering.local(local, values, operation.output)
    lowering.define(operation.output, result)


class Transpose(Operation):
    """The same elements with dims in another order.  Lowers: local `transpose`."""

    follows = True

    def __init__(self, x: Tensor, new_shape: Shape):
        self.new_shape = new_shape
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        if sorted(x.shape) != sorted(self.new_shape):
            raise self.fail(
                f"{self.new_shape} is not a reordering of the dimensions of {x.shape}.",
                f"Give the dimensions of {x.shape} in any order; mm.reshape() and mm.rename_dimension() change them.",
            )
        return [(self.new_shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [transpose(only(dys), self.inputs[0].shape)]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.transpose(lowering.value(self.inputs[0]), self.new_shape))


def transpose(x: Tensor, new_shape: ShapeLike) -> Tensor:
    """x with its dims in the order of ``new_shape``."""
    shape = Shape(new_shape)
    return x if shape == x.shape else Transpose(x, shape).output


class Reshape(Operation):
    """The same elements in row-major order under other dims.

    Lowers: a local `view` where the splits of old and new dims agree; otherwise what takes one
    layout to the other first: all_to_all where a mesh axis moves between dims, all_gather where it
    is no longer used, take_shard where it is new (the paper's section 6.1).
    """

    def __init__(self, x: Tensor, new_shape: Shape, name: str = "reshape"):
        self.new_shape = new_shape
        super().__init__([x], name)

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        if x.shape.size != self.new_shape.size:
            raise self.fail(
                f"{x.shape} has {x.shape.size} elements, {self.new_shape} has {self.new_shape.size}.",
                f"Give sizes whose product is {x.shape.size}.",
            )
        return [(self.new_shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [reshape(only(dys), self.inputs[0].shape)]

    def lower(self, lowering: Any) -> None:
        (x,) = self.inputs
        lowering.define(self.output, lowering.reshape(lowering.computed(x), self.output))


def reshape(x: Tensor, new_shape: ShapeLike) -> Tensor:
    """x under other dims, elements in row-major order; any layout to any layout."""
    shape = Shape(new_shape)
    return x if shape == x.shape else Reshape(x, shape).output


def rename(x: Tensor, names: Mapping[str, str]) -> Tensor:
    """x with dims renamed, and with the names their layouts.

    Lowers: a local `view`; where a new name is split otherwise, as `reshape`.
    Source: Shazeer et al. 2018, section 6.1.

    Example:
        >>> memory = mm.rename(x, {"length": "memory_length"})
    """
    for old in names:
        x.dim(old, "rename")
    shape = Shape([Dimension(names.get(d.name, d.name), d.size) for d in x.shape])
    return x if shape == x.shape else Reshape(x, shape, "rename").output


def rename_dimension(x: Tensor, old_name: str, new_name: str) -> Tensor:
    """x with one dim renamed, and with the name its layout."""
    return rename(x, {old_name: new_name})


def replace_dimensions(
    x: Tensor, old_dims: DimLike | Sequence[DimLike], new_dims: Dimension | Sequence[Dimension]
) -> Tensor:
    """x with adjacent ``old_dims`` replaced by ``new_dims`` of the same number of elements."""
    old = [old_dims] if isinstance(old_dims, (str, Dimension)) else list(old_dims)
    new = [new_dims] if isinstance(new_dims, Dimension) else list(new_dims)
    if not old:
        raise ShapeError("replace_dimensions: there are no old_dims.", "Name at least one.")
    start = x.shape.position(x.dim(dim_name(old[0]), "replace_dimensions").name)
    if list(x.shape.names[start : start + len(old)]) != [dim_name(d) for d in old]:
        raise ShapeError(
            f"replace_dimensions: {[dim_name(d) for d in old]} are not adjacent in this order in {x.shape}.",
            "Use mm.transpose() first.",
            call_of("replace_dimensions", x),
        )
    return reshape(x, Shape([*x.shape[:start], *new, *x.shape[start + len(old) :]]))


class Slice(Operation):
    """y = x[start:stop:stride] along one dim, which keeps its name.

    Gradient: dy between zeros.  Lowers: local `slice`; where the dim is split, a `shift` that sends
    each rank the elements of its block of y.
    """

    def __init__(self, x: Tensor, dim: str, start: int, stop: int, stride: int = 1):
        self.dim, self.start, self.stop, self.stride = dim, start, stop, stride
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        n = x.shape.dim(self.dim).size
        if not (0 <= self.start < self.stop <= n and self.stride >= 1):
            raise self.fail(
                f"[{self.start}:{self.stop}:{self.stride}] is not inside dimension '{self.dim}' ({n}).",
                f"Take 1 to {n - self.start} elements from {self.start} on."
                if 0 <= self.start < n and self.stride == 1
                else f"Take at least one element, 0 <= start < stop <= {n}.",
            )
        size = -(-(self.stop - self.start) // self.stride)
        return [(_resized(x.shape, self.dim, size), x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (x,), dy = self.inputs, only(dys)
        n = x.shape.dim(self.dim).size
        if self.stride > 1:
            return [_spread(dy, x.shape, self.dim, self.start, self.stride)]
        return [pad(dy, [self.start, n - self.start - dy.shape.dim(self.dim).size], self.dim)]

    def lower(self, lowering: Any) -> None:
        cut = ir.Slice(self.dim, self.start, self.stop, self.stride)
        _lower_along(self, lowering, cut, self.dim, [self.start], stride=self.stride)


def _resized(shape: Shape, dim: str, size: int) -> Shape:
    return Shape([Dimension(d.name, size) if d.name == dim else d for d in shape])


def _spread(x: Tensor, shape: Shape, dim: str, start: int, stride: int) -> Tensor:
    """y[start + stride * o] = x[o] along one dim and 0 elsewhere.

    As a convolution with a filter of one element, which exchanges with neighbours what it must.
    """
    one = ones(Shape([Dimension("_one", 1)]), x.dtype)
    return conv(x, one, [ConvDims(dim, "_one", dim, before=start, base=stride)], shape)


def slice(x: Tensor, begin: int, size: int, slice_dim_name: DimLike, stride: int = 1) -> Tensor:
    """``size`` elements of one dim from ``begin``; with ``stride``, every stride-th of them."""
    name = dim_name(slice_dim_name)
    n = x.dim(name, "slice").size
    return x if (begin, size, stride) == (0, n, 1) else Slice(x, name, begin, begin + size, stride).output


class Pad(Operation):
    """y = x with ``before`` and ``after`` copies of a number around one dim.

    Gradient: the inner part of dy.  Lowers: local `pad`; where the dim is split, a `shift` that
    sends each rank the elements of its block of y.
    """

    def __init__(self, x: Tensor, dim: str, before: int, after: int, value: float):
        self.dim, self.before, self.after, self.value = dim, before, after, value
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        if self.before < 0 or self.after < 0:
            raise self.fail(
                f"widths of dimension '{self.dim}' are {self.before} and {self.after}.",
                "Give widths of at least 0; crop with mm.slice().",
            )
        n = x.shape.dim(self.dim).size + self.before + self.after
        return [(_resized(x.shape, self.dim, n), x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [slice(only(dys), self.before, self.inputs[0].shape.dim(self.dim).size, self.dim)]

    def lower(self, lowering: Any) -> None:
        padding = ir.Pad(self.dim, self.before, self.after, self.value)
        _lower_along(self, lowering, padding, self.dim, [-self.before], value=self.value)


def pad(x: Tensor, paddings: Sequence[int], dim_name: DimLike, value: float = 0) -> Tensor:
    """x with ``paddings`` = [before, after] copies of ``value`` around one dim."""
    name = dim_name if isinstance(dim_name, str) else dim_name.name  # the parameter has the function's name
    if len(paddings) != 2:
        raise ShapeError(f"pad: paddings {list(paddings)} are {len(paddings)} numbers.", "Give [before, after].")
    before, after = paddings
    return x if before == after == 0 else Pad(x, name, before, after, value).output


class Concat(Operation):
    """The inputs one behind the other along one dim.

    Gradient: the parts of dy.  Lowers: local `concat`; where the dim is split, a `shift` that sends
    each rank the elements of its block of y.
    """

    def __init__(self, xs: Sequence[Tensor], dim: str):
        self.dim = dim
        super().__init__(xs)

    def infer(self) -> Sequence[tuple[Shape, str]]:
        first = self.inputs[0]
        for x in self.inputs:
            if x.shape.without([self.dim]) != first.shape.without([self.dim]) or x.dtype != first.dtype:
                raise self.fail(
                    f"{x.dtype}{x.shape} and {first.dtype}{first.shape} differ outside '{self.dim}'.",
                    f"Make all dimensions but '{self.dim}', and the data types, equal, here to"
                    f" {first.dtype}{first.shape.without([self.dim])}.",
                )
        return [(_resized(first.shape, self.dim, sum(x.shape.dim(self.dim).size for x in self.inputs)), first.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return split(only(dys), self.dim, [x.shape.dim(self.dim).size for x in self.inputs])

    def lower(self, lowering: Any) -> None:
        starts = itertools.accumulate((x.shape.dim(self.dim).size for x in self.inputs[:-1]), initial=0)
        _lower_along(self, lowering, ir.Concat(self.dim), self.dim, [-start for start in starts])


def concat(xs: Sequence[Tensor], concat_dim_name: DimLike) -> Tensor:
    """Tensors one behind the other along a dim that all have."""
    xs = list(xs)
    if not xs:
        raise ShapeError("concat: there are no tensors.", "Give at least one.")
    name = dim_name(concat_dim_name)
    for x in xs:
        x.dim(name, "concat")
    return xs[0] if len(xs) == 1 else Concat([transpose(x, _order_like(x, xs[0])) for x in xs], name).output


def _order_like(x: Tensor, first: Tensor) -> Shape:
    """The dims of x in the order of first where both have the same names."""
    if sorted(x.shape.names) != sorted(first.shape.names):
        return x.shape
    return Shape([x.shape.dim(n) for n in first.shape.names])


def split(x: Tensor, split_dim: DimLike, num_or_size_splits: int | Sequence[int]) -> list[Tensor]:
    """x cut along one dim into equal parts (a number) or parts of the given sizes."""
    name = dim_name(split_dim)
    n = x.dim(name, "split").size
    if isinstance(num_or_size_splits, int):
        parts = num_or_size_splits
        if parts < 1 or n % parts:
            raise ShapeError(
                f"split: dimension '{name}' ({n}) cannot be cut into {parts} equal parts.",
                f"Give a divisor of {n}, or a list of sizes such as {block_sizes(n, min(max(parts, 1), n))}.",
                call_of("split", x),
            )
        sizes = [n // parts] * parts
    else:
        sizes = list(num_or_size_splits)
    if sum(sizes) != n:
        raise ShapeError(
            f"split: sizes {sizes} sum to {sum(sizes)}, dimension '{name}' has {n}.",
            f"Give sizes that sum to {n}.",
            call_of("split", x),
        )
    starts = itertools.accumulate(sizes, initial=0)
    return [slice(x, start, size, name) for start, size in zip(starts, sizes, strict=False)]


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0) -> Tensor:
    """Tensors of one shape along a new dim at position ``axis``."""
    one = Dimension(dim_name, 1)
    return concat([reshape(x, Shape([*x.shape[:axis], one, *x.shape[axis:]])) for x in xs], dim_name)


def unstack(x: Tensor, dim: DimLike) -> list[Tensor]:
    """The tensors along one dim, without it."""
    name = dim_name(dim)
    parts = split(x, name, x.dim(name, "unstack").size)
    return [reshape(p, p.shape.without([name])) for p in parts]


class Shift(Operation):
    """y[i] = x[i - offset] along one dim; from the other end with ``wrap``, else zeros.

    Gradient: dy shifted back.  Lowers: local `slice` with `concat` or `pad`; where the dim is
    split, a `shift`: ``offset`` elements at each border between ranks.
    """

    def __init__(self, x: Tensor, offset: int, dim: str, wrap: bool):
        self.offset, self.dim, self.wrap = offset, dim, wrap
        super().__init__([x])

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [shift(only(dys), -self.offset, self.dim, self.wrap)]

    def lower(self, lowering: Any) -> None:
        value = lowering.computed(self.inputs[0])
        if lowering.is_split(value, self.dim):
            result = lowering.shift([value], self.output, self.dim, [-self.offset], wrap=self.wrap)
        else:
            result = self._lower_whole(lowering, value)
        lowering.define(self.output, result)

    def _lower_whole(self, lowering: Any, value: int) -> int:
        n, dim = self.output.shape.dim(self.dim).size, self.dim
        start = -self.offset % n if self.wrap else builtins.max(-self.offset, 0)
        stop = n if self.wrap else builtins.min(n - self.offset, n)

        def part(start: int, stop: int) -> int:
            return lowering.resized(ir.Slice(dim, start, stop, 1), value, stop - start)

        parts = [part(start, stop)]
        if self.wrap:
            parts.append(part(0, start))
            return lowering.local(ir.Concat(dim), parts, self.output)
        before = builtins.max(self.offset, 0)
        return lowering.local(ir.Pad(dim, before, n - before - (stop - start), 0), parts, self.output)


def shift(x: Tensor, offset: int, dim: DimLike, wrap: bool) -> Tensor:
    """y[i] = x[i - offset] along one dim; from the other end with ``wrap``, else zeros.

    Along a split dim neighbours exchange ``offset`` elements: the halo of a stencil.
    """
    name = dim_name(dim)
    n = x.dim(name, "shift").size
    if wrap:
        offset %= n
    elif builtins.abs(offset) >= n:
        return zeros_like(x)
    return x if offset == 0 else Shift(x, offset, name, wrap).output


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """x summed down to the dims of ``shape``, in its order: the gradient of broadcasting."""
    if len(x.shape) > len(shape):
        return reduce_sum(x, output_shape=shape)
    return x if x.shape == shape else transpose(x, shape)
