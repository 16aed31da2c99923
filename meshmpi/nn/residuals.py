"""Around sublayers: residual connections, and what keeps activations and gradients in bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshmpi.dims import ShapeLike
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.arguments import asked
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.regions import custom_gradient
from meshmpi.graph.ops.sources import get_variable, random_uniform, step_number
from meshmpi.nn.functions import widened
from meshmpi.nn.initializers import zeros_initializer
from meshmpi.nn.layers import DTypeLike, variable_type


def residual(x: Tensor, sublayers: Callable[[Tensor], Tensor]) -> Tensor:
    """x + sublayers(x)."""
    return ew.add(x, asked(sublayers, "residual", x), output_shape=x.shape)


def rezero(x: Tensor, variable_dtype: DTypeLike = None, name: str | None = None) -> Tensor:
    """x times a learned number that begins at 0, so that a deep network begins as the identity.

    Args:
        x: The output of a sublayer, before it is added to the residual stream.
        variable_dtype: Types of the variable; default see `variable_type`.
        name: The variable is ``name/scale``, without dims.

    Source: Bachlechner et al. 2020.
    """
    name = layer_name(name, "rezero")
    with scope(name):
        dtype = variable_type(variable_dtype, x)
        scale = get_variable("scale", (), dtype, zeros_initializer(), decays=False)
        return ew.multiply(x, scale, output_shape=x.shape)


def clip_activation_gradient(x: Tensor, clip_rms_norm: float) -> Tensor:
    """x, whose gradient is scaled down where its root mean square exceeds ``clip_rms_norm``.

    Args:
        x: Any floating-point tensor.
        clip_rms_norm: Largest root mean square of the gradient over all elements of x.

    Lowers: in the backward pass an all_reduce of one number over the axes x is split over.

    Source: Mesh-TensorFlow's clip_activation_gradient.
    """
    if clip_rms_norm <= 0:
        raise ShapeError(f"clip_activation_gradient: clip_rms_norm is {clip_rms_norm}.", "Give a positive one.")

    def clipped(xs: Sequence[Tensor], ys: Sequence[Tensor], dys: Sequence[Tensor]) -> list[Tensor]:
        (dy,) = dys
        rms = ew.sqrt(reduce_mean(ew.square(widened(dy))))
        # An infinite gradient becomes NaN instead of being hidden.
        factor = ew.divide(clip_rms_norm, ew.maximum(rms, clip_rms_norm))
        return [ew.multiply(dy, ew.cast(factor, dy.dtype), output_shape=dy.shape)]

    return custom_gradient(ew.identity, clipped, [x])


def annealed_dropout(
    x: Tensor,
    is_training: bool,
    rate: float,
    total_steps: int,
    noise_shape: ShapeLike | None = None,
    name: str = "dropout",
) -> Tensor:
    """`dropout` whose rate falls linearly from ``rate`` at step 0 to 0 at ``total_steps``.

    Args:
        x: Any floating-point tensor.
        is_training: Without it, x is returned unchanged.
        rate: Probability to drop an element at the first step.
        total_steps: Steps of the compiled program (see `mm.step_number`) until none is dropped.
        noise_shape: Dims of x along which elements are drawn independently; default all.
        name: Part of the key of the random numbers.

    Source: Rennie et al. 2014; Mesh-TensorFlow's annealed_dropout.
    """
    if not 0.0 <= rate < 1.0 or total_steps < 1:
        raise ShapeError(
            f"annealed_dropout: the rate is {rate}, for {total_steps} steps.",
            "Give a rate in [0, 1) and at least one step.",
        )
    if not is_training or rate == 0.0:
        return x
    done = ew.minimum(ew.divide(ew.cast(step_number(), "float32"), float(total_steps)), 1.0)
    keep = ew.add(1.0 - rate, ew.multiply(done, rate))
    uniform = random_uniform(x.shape if noise_shape is None else noise_shape, name=name)
    kept = ew.cast(ew.less(uniform, keep), "float32")
    scale = ew.divide(kept, keep, output_shape=kept.shape)
    return ew.multiply(x, ew.cast(scale, x.dtype), output_shape=x.shape)
