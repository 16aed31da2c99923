"""Convolution layers in one, two and three dimensions: ordinary, transposed, depthwise, separable.

The dims that slide are the last ones before the channels unless they are named; any of them, and
the channels and all others, may be split by the layout.  No layout is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.sources import get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.ir.convolutions import ConvDims
from meshmpi.nn.activations import Activation, activation_function
from meshmpi.nn.initializers import variance_scaling_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, variable_type
from meshmpi.nn.sliding import Geometry, Padding, Sizes, each, geometry, resized, sliding_dims


class _Layer(NamedTuple):
    """The variables and activation of a convolution layer, as its caller wants them."""

    use_bias: bool
    activation: Activation
    variable_dtype: DTypeLike
    filter_initializer: Any
    bias_initializer: Any
    name: str


def _convolved(
    x: Tensor,
    output_dims: Sequence[Dimension],
    found: Sequence[Geometry],
    slides: Sequence[ConvDims],
    channel: Dimension,
    output_shape: Shape,
    layer: _Layer,
) -> Tensor:
    """The layer's variables, the convolution, bias and activation.

    With ``output_dims`` that contain the channels the filter works on each channel alone.
    """
    dtype = variable_type(layer.variable_dtype, x)
    fans = [g.filter_dim for g in found] + ([] if channel in output_dims else [channel])
    initializer = layer.filter_initializer
    if initializer is None:
        initializer = variance_scaling_initializer(fan_in=fans)
    with scope(layer.name):
        kernel = get_variable("kernel", Shape([*fans, *output_dims]), dtype, initializer)
        if slides:
            y = conv(x, kernel, slides, output_shape)
        else:
            y = einsum([x, kernel], output_shape)
        if layer.use_bias:
            first = layer.bias_initializer
            first = zeros_initializer() if first is None else first
            bias = get_variable("bias", Shape(output_dims), dtype, first, decays=False)
            y = ew.add(y, bias, output_shape=y.shape)
        return activation_function(layer.activation)(y)


def _with_channels(shape: Shape, channel: Dimension, new: Sequence[Dimension]) -> Shape:
    return Shape([e for d in shape for e in (new if d.name == channel.name else (d,))])


def _new_dim(x: Tensor, output_dim: Dimension, what: str) -> Dimension:
    """``output_dim``, which must not be the name of a dim of x."""
    if x.shape.find(output_dim.name) >= 0:
        raise ShapeError(
            f"{what}: the new dimension '{output_dim.name}' is already in x {x.shape}.",
            "Rename one of them with mm.rename_dimension().",
            str(x.source),
        )
    return output_dim


def _conv(
    count: int,
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes,
    strides: Sizes,
    dilations: Sizes | None,
    padding: Padding,
    layer: _Layer,
    spatial_dims: Sequence[DimLike] | None,
    channels: DimLike | None,
) -> Tensor:
    dims, channel = sliding_dims(x, count, spatial_dims, channels, layer.name)
    new = [_new_dim(x, output_dim, layer.name)]
    found = geometry(dims, filter_size, strides, dilations, padding, layer.name)
    shape = resized(_with_channels(x.shape, channel, new), found)
    return _convolved(x, new, found, [g.slide() for g in found], channel, shape, layer)


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
    name = layer_name(name, "conv1d")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    return _conv(1, x, output_dim, filter_size, stride, dilations, padding, layer, spatial_dims, channels)


def conv2d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes = (3, 3),
    strides: Sizes = (1, 1),
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
    """
    name = layer_name(name, "conv2d")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    return _conv(2, x, output_dim, filter_size, strides, dilations, padding, layer, spatial_dims, channels)


def conv3d(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes = (3, 3, 3),
    strides: Sizes = (1, 1, 1),
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
    """Convolution along three dims; see `conv2d`."""
    name = layer_name(name, "conv3d")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    return _conv(3, x, output_dim, filter_size, strides, dilations, padding, layer, spatial_dims, channels)


def _conv_transpose(
    count: int,
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes,
    strides: Sizes,
    padding: str,
    layer: _Layer,
    spatial_dims: Sequence[DimLike] | None,
    channels: DimLike | None,
) -> Tensor:
    """The gradient of the convolution that takes the result's size to that of x."""
    dims, channel = sliding_dims(x, count, spatial_dims, channels, layer.name)
    new = [_new_dim(x, output_dim, layer.name)]
    taps, steps = each(filter_size, count, "filter_size"), each(strides, count, "strides")
    longer = [
        Dimension(d.name, d.size * s + (max(k - s, 0) if padding == "VALID" else 0))
        for d, k, s in zip(dims, taps, steps, strict=True)
    ]
    found = geometry(longer, taps, steps, None, padding, layer.name)
    sizes = {d.name: d for d in longer}
    shape = Shape([sizes.get(d.name, d) for d in _with_channels(x.shape, channel, new)])
    slides = [g.slide().of_input() for g in found]
    return _convolved(x, new, found, slides, channel, shape, layer)


def conv2d_transpose(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes = (2, 2),
    strides: Sizes = (2, 2),
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
    """Transposed convolution: the gradient of a `conv2d` with respect to its input.

    Args:
        padding: "SAME": size * stride results; "VALID": size * stride + max(filter - stride, 0).
        x, output_dim, filter_size, strides, use_bias, activation, variable_dtype,
            filter_initializer, bias_initializer, name, spatial_dims, channels: As `conv2d`.
    """
    name = layer_name(name, "conv2d_transpose")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    return _conv_transpose(2, x, output_dim, filter_size, strides, padding, layer, spatial_dims, channels)


def conv3d_transpose(
    x: Tensor,
    output_dim: Dimension,
    filter_size: Sizes = (2, 2, 2),
    strides: Sizes = (2, 2, 2),
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
    """Transposed convolution along three dims; see `conv2d_transpose`."""
    name = layer_name(name, "conv3d_transpose")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    return _conv_transpose(3, x, output_dim, filter_size, strides, padding, layer, spatial_dims, channels)


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

    Args:
        multiplier_dim: Number of filters for each channel, as a dim that the result gets behind
            the channels; default one filter and no such dim.
        x, filter_size, strides, dilations, padding, use_bias, activation, variable_dtype,
            filter_initializer, bias_initializer, name, spatial_dims, channels: As `conv2d`;
            ``name/kernel`` is [filter dims, channels, multiplier_dim].

    Lowers: where a dim that slides is split, halos by `shift`; split channels send nothing.
    """
    name = layer_name(name, "depthwise_conv")
    layer = _Layer(use_bias, activation, variable_dtype, filter_initializer, bias_initializer, name)
    dims, channel = sliding_dims(x, len(filter_size), spatial_dims, channels, name)
    found = geometry(dims, filter_size, strides, dilations, padding, name)
    more = [] if multiplier_dim is None else [_new_dim(x, multiplier_dim, name)]
    shape = resized(_with_channels(x.shape, channel, [channel, *more]), found)
    slides = [g.slide() for g in found]
    return _convolved(x, [channel, *more], found, slides, channel, shape, layer)


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

    Args:
        x: [..., length, channels].
        output_dim: New channels.
        min_relative_pos, max_relative_pos: Position p sees p + min to p + max; -2 and 0 see only
            what came before.
        depthwise_filter_initializer, pointwise_filter_initializer: For ``name/depthwise/kernel``
            [filter_length, channels] and ``name/pointwise/kernel`` [channels, output_dim].
        use_bias, bias_initializer, activation, variable_dtype, spatial_dims, channels: As `conv2d`.
        name: Prefix of the variables.

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
    with scope(name):
        y = depthwise_conv(
            x,
            [taps],
            padding=[(-min_relative_pos, max_relative_pos)],
            variable_dtype=variable_dtype,
            filter_initializer=depthwise_filter_initializer,
            name="depthwise",
            spatial_dims=spatial_dims,
            channels=channels,
        )
        return _pointwise(
            y,
            x.shape[-1] if channels is None else x.shape.dim(dim_name(channels)),
            output_dim,
            _Layer(use_bias, activation, variable_dtype, pointwise_filter_initializer, bias_initializer, "pointwise"),
        )


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
    name = layer_name(name, "separable_conv2d")
    with scope(name):
        y = depthwise_conv(
            x,
            filter_size,
            strides,
            dilations,
            padding,
            variable_dtype=variable_dtype,
            filter_initializer=depthwise_filter_initializer,
            name="depthwise",
            spatial_dims=spatial_dims,
            channels=channels,
        )
        return _pointwise(
            y,
            x.shape[-1] if channels is None else x.shape.dim(dim_name(channels)),
            output_dim,
            _Layer(use_bias, activation, variable_dtype, pointwise_filter_initializer, bias_initializer, "pointwise"),
        )


def _pointwise(x: Tensor, channel: Dimension, output_dim: Dimension, layer: _Layer) -> Tensor:
    """A matrix product of the channels, in their place."""
    new = [_new_dim(x, output_dim, layer.name)]
    return _convolved(x, new, [], [], channel, _with_channels(x.shape, channel, new), layer)
