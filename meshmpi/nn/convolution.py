"""Convolution layers in one, two and three dimensions: ordinary, transposed, depthwise, separable.

The dims that slide are the last ones before the channels unless they are named; any of them, and
the channels and all others, may be split by the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.arguments import named
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.sources import get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.nn.activations import Activation, activation_function
from meshmpi.nn.initializers import variance_scaling_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, variable_type
from meshmpi.nn.sliding import Padding, Sizes, each, geometry, sliding_dims


class _Layer(NamedTuple):
    """A convolution layer: its input, how its filter slides, its variables and activation."""

    x: Tensor
    name: str
    taps: Sizes
    strides: Sizes
    dilations: Sizes | None
    padding: Padding
    use_bias: bool
    activation: Activation
    variable_dtype: DTypeLike
    filter_initializer: Any
    bias_initializer: Any
    spatial_dims: Sequence[DimLike] | None
    channels: DimLike | None

    def convolved(self, count: int, output_dim: Dimension) -> Tensor:
        """Along ``count`` dims, with ``output_dim`` as new channels."""
        return self._made(*self._dims(count), [self._new(output_dim)])

    def transposed(self, count: int, output_dim: Dimension) -> Tensor:
        """The gradient of the convolution that takes the result's size to that of x."""
        dims, channel = self._dims(count)
        taps, steps = each(self.taps, count, "filter_size"), each(self.strides, count, "strides")
        longer = [
            Dimension(d.name, d.size * s + (max(k - s, 0) if self.padding == "VALID" else 0))
            for d, k, s in zip(dims, taps, steps, strict=True)
        ]
        return self._made(longer, channel, [self._new(output_dim)], transposed=True)

    def depthwise(self, multiplier: Dimension | None = None) -> Tensor:
        """With filters of their own for every channel."""
        assert not isinstance(self.taps, int)
        dims, channel = self._dims(len(self.taps))
        return self._made(dims, channel, [channel] if multiplier is None else [channel, self._new(multiplier)])

    def separable(self, output_dim: Dimension, depthwise_initializer: Any) -> Tensor:
        """A depthwise convolution, then the layer as a matrix product of the channels."""
        each_alone = self._replace(
            name="depthwise", use_bias=False, activation=None, filter_initializer=depthwise_initializer
        )
        with scope(self.name):
            y = each_alone.depthwise()
            channel = self.x.shape[-1] if self.channels is None else self.x.shape.dim(dim_name(self.channels))
            product = self._replace(x=y, name="pointwise")
            return product._made([], channel, [product._new(output_dim)])

    def _dims(self, count: int) -> tuple[list[Dimension], Dimension]:
        return sliding_dims(self.x, count, self.spatial_dims, self.channels, self.name)

    def _new(self, dim: Dimension) -> Dimension:
        """``dim``, which must not be the name of a dim of x."""
        if self.x.shape.find(dim.name) >= 0:
            raise ShapeError(
                f"{self.name}: the new dimension '{dim.name}' is already in x {self.x.shape}.",
                "Rename one of them with mm.rename_dimension().",
                str(self.x.source),
            )
        return dim

    def _made(
        self, dims: Sequence[Dimension], channel: Dimension, new: Sequence[Dimension], transposed: bool = False
    ) -> Tensor:
        """The variables, the convolution along ``dims``, bias and activation; a channel that is new too is not summed.

        A transposed convolution gets the dims of its result.
        """
        found = geometry(dims, self.taps, self.strides, self.dilations, self.padding, self.name) if dims else []
        sizes = {g.dim.name: g.dim.size if transposed else g.size for g in found}
        shape = [e for d in self.x.shape for e in (new if d.name == channel.name else (d,))]
        shape = Shape([Dimension(d.name, sizes.get(d.name, d.size)) for d in shape])
        fans = [g.filter_dim for g in found] + ([] if channel in new else [channel])
        initializer, dtype = self.filter_initializer, variable_type(self.variable_dtype, self.x)
        if initializer is None:
            initializer = variance_scaling_initializer(fan_in=fans)
        with scope(self.name):
            kernel = get_variable("kernel", Shape([*fans, *new]), dtype, initializer)
            if dims:
                slides = [g.slide().of_input() if transposed else g.slide() for g in found]
                y = conv(self.x, kernel, slides, shape)
            else:
                y = einsum([self.x, kernel], shape)
            if self.use_bias:
                first = zeros_initializer() if self.bias_initializer is None else self.bias_initializer
                bias = get_variable("bias", Shape(new), dtype, first, decays=False)
                y = ew.add(y, bias, output_shape=y.shape)
            return activation_function(self.activation)(y)


def conv1d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes = 3,
    stride: Sizes = 1,
    dilations: Sizes | None = None,
    padding: Padding = "SAME",
    use_bias: bool = True,
    activation: Activation = None,
    variable_dtype: DTypeLike = None,
    filter_initializer: Any = None,
    bias_initializer: Any = None,
    name: str | None = None,
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """Convolution along one dim; see `conv2d`."""
    rest = (use_bias, activation, variable_dtype, filter_initializer, bias_initializer, spatial_dims, channels)
    name = layer_name(name, "conv1d")
    return _Layer(x, name, filter_size, stride, dilations, padding, *rest).convolved(1, output_dim)


def _convolution(count: int, doc: str):
    """``conv2d`` or ``conv3d``."""

    def layer(
        x: Tensor,
        output_dim: Dimension,
        filter_size: Sizes = (3,) * count,
        strides: Sizes = (1,) * count,
        dilations: Sizes | None = None,
        padding: Padding = "SAME",
        use_bias: bool = True,
        activation: Activation = None,
        variable_dtype: DTypeLike = None,
        filter_initializer: Any = None,
        bias_initializer: Any = None,
        name: str | None = None,
        *,
        spatial_dims: Sequence[DimLike] | None = None,
        channels: DimLike | None = None,
    ) -> Tensor:
        rest = (use_bias, activation, variable_dtype, filter_initializer, bias_initializer, spatial_dims, channels)
        name = layer_name(name, f"conv{count}d")
        return _Layer(x, name, filter_size, strides, dilations, padding, *rest).convolved(count, output_dim)

    return named(layer, f"conv{count}d", doc)


conv2d = _convolution(
    2,
    """activation(convolution of x with a filter, plus bias).

    Args:
        x: [..., height, width, channels], or any shape whose dims are named below.
        output_dim: New channels, in the place of those of x.
        filter_size: Elements of the filter along each dim that slides.
        strides: From one result to the next, in elements of x.
        dilations: From one element of the filter to the next; default 1.
        padding: "SAME" (ceil(size / stride) results), "VALID" (only where the filter lies inside:
            floor), or (before, after) for each dim that slides.
        use_bias: Whether there is a bias.
        activation: A name of `ACTIVATIONS`, a function, or None.
        variable_dtype: Types of the variables; default those that fit x.
        filter_initializer: Default normal with variance 1 / (elements that one result sums over).
        bias_initializer: Default zeros.
        name: Variables are ``name/kernel`` [filter_height, filter_width, channels, output_dim],
            the first two called after the dims of x, and ``name/bias`` [output_dim].
        spatial_dims: The dims that slide; default the last ones but for the channels.
        channels: The channels; default the last dim.

    Returns:
        x's dims with the sizes that sliding leaves, under the same names.

    Raises:
        ShapeError: ``output_dim`` is a dim of x, or the filter does not fit.

    Lowers: where a dim that slides is split, halos by `shift` with the neighbours; where the
    channels are split, an all_reduce of the result.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;height:28;width:28;channels:1")
        ...     mm.conv2d(x, mm.Dimension("features", 16), (5, 5), (2, 2)).shape
        [batch=8, height=14, width=14, features=16]
    """,
)
conv3d = _convolution(3, "Convolution along three dims; see `conv2d`.")


def _transposed(count: int, doc: str):
    """``conv2d_transpose`` or ``conv3d_transpose``."""

    def layer(
        x: Tensor,
        output_dim: Dimension,
        filter_size: Sizes = (2,) * count,
        strides: Sizes = (2,) * count,
        padding: str = "SAME",
        use_bias: bool = True,
        activation: Activation = None,
        variable_dtype: DTypeLike = None,
        filter_initializer: Any = None,
        bias_initializer: Any = None,
        name: str | None = None,
        *,
        spatial_dims: Sequence[DimLike] | None = None,
        channels: DimLike | None = None,
    ) -> Tensor:
        rest = (use_bias, activation, variable_dtype, filter_initializer, bias_initializer, spatial_dims, channels)
        name = layer_name(name, f"conv{count}d_transpose")
        return _Layer(x, name, filter_size, strides, None, padding, *rest).transposed(count, output_dim)

    return named(layer, f"conv{count}d_transpose", doc)


conv2d_transpose = _transposed(
    2,
    """Transposed convolution: the gradient of a `conv2d` with respect to its input.

    The other arguments are those of `conv2d`.

    Args:
        padding: "SAME": size * stride results; "VALID": size * stride + max(filter - stride, 0).
    """,
)
conv3d_transpose = _transposed(3, "Transposed convolution along three dims; see `conv2d_transpose`.")


def depthwise_conv(
    x: Tensor,
    filter_size: Sequence[int],
    strides: Sizes = 1,
    dilations: Sizes | None = None,
    padding: Padding = "SAME",
    multiplier_dim: Dimension | None = None,
    use_bias: bool = False,
    activation: Activation = None,
    variable_dtype: DTypeLike = None,
    filter_initializer: Any = None,
    bias_initializer: Any = None,
    name: str | None = None,
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """Convolution of each channel with a filter of its own, along ``len(filter_size)`` dims.

    The other arguments are those of `conv2d`.

    Args:
        multiplier_dim: Number of filters for each channel, as a dim that the result gets behind the channels;
            default one filter and no such dim.  ``name/kernel`` is [filter dims, channels, multiplier_dim].

    Lowers: where a dim that slides is split, halos by `shift`; split channels send nothing.
    """
    rest = (use_bias, activation, variable_dtype, filter_initializer, bias_initializer, spatial_dims, channels)
    name = layer_name(name, "depthwise_conv")
    return _Layer(x, name, filter_size, strides, dilations, padding, *rest).depthwise(multiplier_dim)


def separable_conv1d(
    x: Tensor,
    output_dim: Dimension,
    min_relative_pos: int = -1,
    max_relative_pos: int = 1,
    depthwise_filter_initializer: Any = None,
    pointwise_filter_initializer: Any = None,
    use_bias: bool = True,
    bias_initializer: Any = None,
    activation: Activation = None,
    variable_dtype: DTypeLike = None,
    name: str | None = None,
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """A depthwise convolution over relative positions, then a matrix product of the channels.

    The other arguments are those of `conv2d`.

    Args:
        x: [..., length, channels].
        min_relative_pos, max_relative_pos: Position p sees p + min to p + max; -2 and 0 see only what came before.
        depthwise_filter_initializer, pointwise_filter_initializer: For ``name/depthwise/kernel``
            [filter_length, channels] and ``name/pointwise/kernel`` [channels, output_dim].

    Raises:
        ShapeError: There is no position between the two.
    """
    name = layer_name(name, "separable_conv1d")
    taps = max_relative_pos - min_relative_pos + 1
    if taps < 1:
        raise ShapeError(
            f"{name}: there is no position from {min_relative_pos} to {max_relative_pos}.",
            "Make the first the smaller one.",
            str(x.source),
        )
    initializers = pointwise_filter_initializer, bias_initializer
    rest = (use_bias, activation, variable_dtype, *initializers, spatial_dims, channels)
    layer = _Layer(x, name, [taps], 1, None, [(-min_relative_pos, max_relative_pos)], *rest)
    return layer.separable(output_dim, depthwise_filter_initializer)


def separable_conv2d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sizes = 1,
    dilations: Sizes | None = None,
    padding: Padding = "SAME",
    depthwise_filter_initializer: Any = None,
    pointwise_filter_initializer: Any = None,
    use_bias: bool = True,
    bias_initializer: Any = None,
    activation: Activation = None,
    variable_dtype: DTypeLike = None,
    name: str | None = None,
    *,
    spatial_dims: Sequence[DimLike] | None = None,
    channels: DimLike | None = None,
) -> Tensor:
    """A depthwise convolution, then a matrix product of the channels; args as `conv2d`."""
    initializers = pointwise_filter_initializer, bias_initializer
    rest = (use_bias, activation, variable_dtype, *initializers, spatial_dims, channels)
    name = layer_name(name, "separable_conv2d")
    layer = _Layer(x, name, filter_size, strides, dilations, padding, *rest)
    return layer.separable(output_dim, depthwise_filter_initializer)
