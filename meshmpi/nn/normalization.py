"""Batch normalisation: by the statistics of a batch in training, by their averages afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, Update, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import VariableDType, assign, get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.nn.functions import widened
from meshmpi.nn.initializers import ones_initializer, zeros_initializer


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
        is_training: Whether mean and variance are those of x over all other dims, or the moving
            averages.
        momentum: Share of the old value that a moving average keeps at each step.
        epsilon: Added to the variance (of the whole population, not n - 1).
        scale_initializer: Default ones; zeros for the last norm of a residual branch.
        name: Variables are ``name/scale``, ``name/bias``, and the averages ``name/moving_mean``
            (zeros) and ``name/moving_variance`` (ones), which optimizers leave alone; all [dims].
        dims: The dim, or dims, that keep statistics of their own; default the last.

    Returns:
        (a tensor of x's shape and type; in training the updates of the moving averages, to be
        given to `mm.compile` beside those of the optimizer, else none).

    Raises:
        ShapeError: Nothing is left to average over.

    Lowers: where a dim that is averaged over is split, in training an all_reduce of the mean and
    one of the variance.

    Source: Ioffe and Szegedy 2015.
    """
    name = layer_name(name, "batch_norm")
    kept = [x.at(-1, "batch_norm").name] if dims is None else _names(dims)
    shape = Shape([x.shape.dim(n) for n in kept])
    if len(shape) == len(x.shape):
        raise ShapeError(
            f"batch_norm '{name}': x {x.shape} has no dimension beside {kept} to average over.",
            "Keep fewer dims.",
            str(x.source),
        )
    wide = widened(x)
    dtype = VariableDType(wide.dtype, wide.dtype)
    updates: list[Update] = []
    with scope(name):
        first = ones_initializer() if scale_initializer is None else scale_initializer
        scale = get_variable("scale", shape, dtype, first, decays=False)
        bias = get_variable("bias", shape, dtype, zeros_initializer(), decays=False)
        moving = [
            get_variable("moving_mean", shape, dtype, zeros_initializer(), trainable=False),
            get_variable("moving_variance", shape, dtype, ones_initializer(), trainable=False),
        ]
        if is_training:
            mean = reduce_mean(wide, output_shape=shape)
            centred = ew.subtract(wide, mean, output_shape=x.shape)
            variance = reduce_mean(ew.square(centred), output_shape=shape)
            for average, now in zip(moving, (mean, variance), strict=True):
                moved = ew.multiply(momentum, average) + ew.multiply(1 - momentum, now)
                updates.append(assign(average, moved))
        else:
            mean, variance = moving
            centred = ew.subtract(wide, mean, output_shape=x.shape)
        factor = ew.multiply(scale, ew.rsqrt(ew.add(variance, epsilon)))
        y = ew.multiply(centred, factor, output_shape=x.shape)
        return ew.cast(ew.add(y, bias, output_shape=x.shape), x.dtype), updates


def _names(dims: DimLike | Sequence[DimLike]) -> list[str]:
    items = [dims] if isinstance(dims, (str, Dimension)) else list(dims)
    return [dim_name(d) for d in items]
