"""Dropout, jitter and sampling: functions that draw random numbers at every step.

Numbers depend on (seed, name, step, global index), so masks are the same in every layout.
"""

from __future__ import annotations

from meshmpi.dims import ShapeLike
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.sources import random_uniform, step_number
from meshmpi.graph.ops.structure import DimLike
from meshmpi.nn.functions import TensorOrNumber, widened
from meshmpi.nn.ordering import argmax

_LEAST_UNIFORM = 2.0**-25
"""Stands for a 0 among numbers of 24 bits, whose logarithm is infinite."""


def dropout(
    x: Tensor,
    is_training: bool,
    keep_prob: float | None = None,
    rate: float | None = None,
    noise_shape: ShapeLike | None = None,
    name: str = "dropout",
) -> Tensor:
    """In training keeps each element with probability ``keep_prob``, scaled by 1 / keep_prob.

    Args:
        x: Any floating-point tensor.
        is_training: Without it, x is returned unchanged.
        keep_prob: Probability to keep; or give ``rate`` = 1 - keep_prob.
        rate: Probability to drop.
        noise_shape: Dims of x along which elements are drawn independently; default all.
        name: Part of the key of the random numbers.

    Raises:
        ShapeError: Both or neither of keep_prob and rate are given, or a value is not in (0, 1].

    Source: Srivastava et al. 2014.
    """
    if (keep_prob is None) == (rate is None):
        raise ShapeError(f"dropout: keep_prob is {keep_prob} and rate is {rate}.", "Give exactly one of them.")
    keep = keep_prob if keep_prob is not None else 1.0 - rate  # type: ignore[operator]
    if not 0.0 < keep <= 1.0:
        raise ShapeError(f"dropout: {keep} is not a probability to keep an element.", "Give a number in (0, 1].")
    if not is_training or keep == 1.0:
        return x
    # float32 numbers even for bfloat16 tensors: 8 bits are too few to compare with a probability.
    uniform = random_uniform(x.shape if noise_shape is None else noise_shape, name=name)
    scale = ew.multiply(ew.cast(ew.less(uniform, keep), x.dtype), 1.0 / keep)
    return ew.multiply(x, scale, output_shape=x.shape)


def annealed_dropout(
    x: Tensor,
    is_training: bool,
    rate: float,
    total_steps: int,
    noise_shape: ShapeLike | None = None,
    name: str = "dropout",
) -> Tensor:
    """`dropout` whose rate falls linearly from ``rate`` at step 0 to 0 at ``total_steps``.

    The other arguments are those of `dropout`.

    Args:
        total_steps: Steps of the compiled program (see `mm.step_number`) until none is dropped.

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


def multiplicative_jitter(x: Tensor, is_training: bool, epsilon: float = 1e-2, name: str = "jitter") -> Tensor:
    """In training x times independent uniform numbers in [1 - epsilon, 1 + epsilon)."""
    if not is_training or epsilon == 0.0:
        return x
    noise = random_uniform(x.shape, 1.0 - epsilon, 1.0 + epsilon, name=name)
    return ew.multiply(x, ew.cast(noise, x.dtype))


def sample_with_temperature(
    logits: Tensor, dim: DimLike, temperature: TensorOrNumber = 1.0, name: str = "sample"
) -> Tensor:
    """Indices along ``dim`` drawn with probability softmax(logits / temperature).

    Args:
        logits: Any shape with ``dim``.
        dim: The dim (or its name) of the alternatives; may be split.
        temperature: 0 takes the most probable.  A tensor may have any dims of logits but ``dim``,
            so that every row has its own; it must not be negative.
        name: Part of the key of the random numbers.

    Returns:
        int32 of the shape of logits without ``dim``.

    Raises:
        ShapeError: The temperature is a negative number.

    Lowers: where ``dim`` is split, two all_reduces without it.
    Source: the Gumbel-max trick (Gumbel 1954).
    """
    logits = widened(logits)
    if not isinstance(temperature, Tensor):
        if temperature < 0:
            raise ShapeError(
                f"sample_with_temperature: the temperature is {temperature}.",
                "Give a number >= 0; 0 takes the most probable.",
            )
        if temperature == 0:
            return argmax(logits, dim)
    uniform = ew.maximum(random_uniform(logits.shape, name=name), _LEAST_UNIFORM)
    gumbel = ew.negative(ew.log(ew.negative(ew.log(ew.cast(uniform, logits.dtype)))))
    # Of logits / temperature + gumbel the same element is the largest, but for temperature 0.
    return argmax(ew.add(logits, ew.multiply(temperature, gumbel), logits.shape), dim)
