"""Norms over a dimension (layer, RMS and variants) or over a batch, and learned scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import DimsLike, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, Update, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import VariableDType, assign, get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.functions import widened
from meshmpi.nn.initializers import ones_initializer, zeros_initializer
from meshmpi.nn.layers import DTypeLike, as_list, variable_type


def wide_type(dtype: VariableDType) -> VariableDType:
    """The same with an activation type of at least float32."""
    return VariableDType(dtype.master, "float32") if dtype.activation == "bfloat16" else dtype


def layer_norm(
    x: Tensor,
    dim: DimLike,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    use_bias: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over ``dim``.

    Args:
        x: Any shape; bfloat16 is normalised in float32.
        dim: The dim (or its name) that is normalised.
        epsilon: Added to the variance (of the whole population, not n - 1).
        name: Variables are ``name/scale`` (ones) and ``name/bias`` (zeros), both [dim].
        use_scale: Whether there is a scale.
        use_bias: Whether there is a bias.
        variable_dtype: Types of the variables; default those that fit x.

    Source: Ba et al. 2016.
    """
    name = layer_name(name, "layer_norm")
    wide = widened(x)
    centred = ew.subtract(wide, reduce_mean(wide, reduced_dim=dim), output_shape=x.shape)
    shape = Shape([x.shape.dim(dim_name(dim))])
    return _normalised(x, centred, centred, dim, epsilon, name, variable_dtype, shape if use_scale else None, use_bias)


def rms_norm(
    x: Tensor,
    dim: DimsLike,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
    """x / sqrt(mean of x**2 over ``dim`` + epsilon) * scale.

    The other arguments are those of `layer_norm`.

    Args:
        dim: One dim or several; the scale has all of them.

    Source: Zhang and Sennrich 2019.
    """
    name, wide = layer_name(name, "rms_norm"), widened(x)
    shape = Shape([x.shape.dim(dim_name(d)) for d in as_list(dim)])
    return _normalised(x, wide, wide, shape.names, epsilon, name, variable_dtype, shape if use_scale else None)


def rms_norm_subsampled(
    x: Tensor,
    dim: DimLike,
    fraction: float = 0.25,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
    """`rms_norm` whose mean square is that of the first ``fraction`` of ``dim`` only.

    The other arguments are those of `layer_norm`.

    Args:
        fraction: In (0, 1]; at least one element is taken.

    Source: partial RMS norm of Zhang and Sennrich 2019.
    """
    name = layer_name(name, "rms_norm")
    if not 0.0 < fraction <= 1.0:
        raise ShapeError(f"rms_norm_subsampled: the fraction is {fraction}.", "Give a number in (0, 1].")
    wide, whole = widened(x), x.shape.dim(dim_name(dim))
    sample = slice_dim(wide, 0, max(1, int(fraction * whole.size)), whole)
    return _normalised(x, wide, sample, dim, epsilon, name, variable_dtype, Shape([whole]) if use_scale else None)


def scale_norm(
    x: Tensor, dim: DimLike, epsilon: float = 1e-6, name: str | None = None, variable_dtype: DTypeLike = None
) -> Tensor:
    """x / sqrt(mean of x**2 over ``dim`` + epsilon) times one learned number, first 1.

    The arguments are those of `layer_norm`.

    Source: Nguyen and Salazar 2019, with a mean in place of their sum.
    """
    name, wide = layer_name(name, "scale_norm"), widened(x)
    return _normalised(x, wide, wide, dim, epsilon, name, variable_dtype, Shape())


def _normalised(
    x: Tensor,
    centred: Tensor,
    sample: Tensor,
    dim: DimLike | Sequence[str],
    epsilon: float,
    name: str,
    variable_dtype: DTypeLike,
    scale_shape: Shape | None,
    use_bias: bool = False,
) -> Tensor:
    """centred / sqrt(mean square of the sample + epsilon), scaled and moved, in the type of x."""
    dtype = wide_type(variable_type(variable_dtype, x))
    names = [dim_name(d) for d in as_list(dim)]
    mean_square = reduce_mean(ew.square(sample), output_shape=x.shape.without(names))
    y = ew.multiply(centred, ew.rsqrt(ew.add(mean_square, epsilon)), output_shape=x.shape)
    with scope(name):
        if scale_shape is not None:
            scale = get_variable("scale", scale_shape, dtype, ones_initializer(), decays=False)
            y = ew.multiply(y, scale, output_shape=x.shape)
        if use_bias:
            shape = Shape([x.shape.dim(n) for n in names])
            bias = get_variable("bias", shape, dtype, zeros_initializer(), decays=False)
            y = ew.add(y, bias, output_shape=x.shape)
        return ew.cast(y, x.dtype)


def rezero(x: Tensor, variable_dtype: DTypeLike = None, name: str | None = None) -> Tensor:
    """x times a learned number that begins at 0, so that a deep network begins as the identity.

    Args:
        x: The output of a sublayer, before it is added to the residual stream.
        variable_dtype: Types of the variable; default those that fit x.
        name: The variable is ``name/scale``, without dims.

    Source: Bachlechner et al. 2020.
    """
    with scope(layer_name(name, "rezero")):
        scale = get_variable("scale", (), variable_type(variable_dtype, x), zeros_initializer(), decays=False)
        return ew.multiply(x, scale, output_shape=x.shape)


def batch_norm(
    x: Tensor,
    is_training: bool,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    scale_initializer: Any = None,
    name: str | None = None,
    *,
    dims: DimLike | Sequence[DimLike] | None = None,
) -> tuple[Tensor, list[Update]]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, for each channel.

    Args:
        x: [..., channels]; bfloat16 is normalised in float32.
        is_training: Whether mean and variance are those of x over all other dims, or the moving averages.
        momentum: Share of the old value that a moving average keeps at each step.
        epsilon: Added to the variance (of the whole population, not n - 1).
        scale_initializer: Default ones; zeros for the last norm of a residual branch.
        name: Variables are ``name/scale``, ``name/bias``, and the averages ``name/moving_mean``
            (zeros) and ``name/moving_variance`` (ones), which optimizers leave alone; all [dims].
        dims: The dim, or dims, that keep statistics of their own; default the last.

    Returns:
        (a tensor of x's shape and type; in training the updates of the moving averages, which
        `mm.compile` is given together with those of the optimizer, else none).

    Lowers: where a dim that is averaged over is split, in training an all_reduce of the mean and one of the variance.

    Source: Ioffe and Szegedy 2015.
    """
    name = layer_name(name, "batch_norm")
    kept = [x.at(-1, "batch_norm").name] if dims is None else [dim_name(d) for d in as_list(dims)]
    shape, wide = Shape([x.shape.dim(n) for n in kept]), widened(x)
    if len(shape) == len(x.shape):
        raise ShapeError(
            f"batch_norm '{name}': x {x.shape} has no dimension beside {kept} to average over.",
            "Keep fewer dims.",
            str(x.source),
        )
    with scope(name):
        first = ones_initializer() if scale_initializer is None else scale_initializer
        dtype = VariableDType(wide.dtype, wide.dtype)
        scale = get_variable("scale", shape, dtype, first, decays=False)
        bias = get_variable("bias", shape, dtype, zeros_initializer(), decays=False)
        moving = [
            get_variable("moving_mean", shape, dtype, zeros_initializer(), trainable=False),
            get_variable("moving_variance", shape, dtype, ones_initializer(), trainable=False),
        ]
        mean = reduce_mean(wide, output_shape=shape) if is_training else moving[0]
        centred = ew.subtract(wide, mean, output_shape=x.shape)
        variance = reduce_mean(ew.square(centred), output_shape=shape) if is_training else moving[1]
        updates = [
            assign(average, ew.multiply(momentum, average) + ew.multiply(1 - momentum, now))
            for average, now in zip(moving, (mean, variance), strict=True)
            if is_training
        ]
        factor = ew.multiply(scale, ew.rsqrt(ew.add(variance, epsilon)))
        y = ew.multiply(centred, factor, output_shape=x.shape)
        return ew.cast(ew.add(y, bias, output_shape=x.shape), x.dtype), updates
