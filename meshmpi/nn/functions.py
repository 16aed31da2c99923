"""Softmax, one-hot, clipping: functions without variables and without random numbers.

Composed from primitives; none gathers a split dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshmpi.dims import Dimension
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, only
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.placement import CustomGradient, stop_gradient
from meshmpi.graph.ops.positions import inside_band
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import reduce_max, reduce_mean, reduce_sum
from meshmpi.graph.ops.regions import custom_gradient
from meshmpi.graph.ops.structure import DimLike, sum_to
from meshmpi.ir.bands import Band

TensorOrNumber = Tensor | float | int


def widened(x: Tensor) -> Tensor:
    """x in at least float32: norms, softmax and losses of bfloat16 are computed with it."""
    return ew.cast(x, "float32") if x.dtype == "bfloat16" else x


class _ShiftedExp(NamedTuple):
    """exp(x - max), that of an extra logit, their sum, whether it is above 0, and max, raw and made finite."""

    exps: Tensor
    extra: Tensor | None
    total: Tensor
    positive: Tensor
    raw_max: Tensor
    max: Tensor


def _shifted_exp(
    x: Tensor, reduced_dim: DimLike, extra_logit: TensorOrNumber | None, band: Band | None = None
) -> _ShiftedExp:
    """exp(x - max) and its sum, which is 1 and never 0 where every x of a row is -inf."""
    raw = stop_gradient(reduce_max(x, reduced_dim=reduced_dim, band=band))
    if extra_logit is not None:
        extra = stop_gradient(extra_logit) if isinstance(extra_logit, Tensor) else extra_logit
        raw = ew.maximum(raw, extra, output_shape=raw.shape)
    # -inf - (-inf) would be NaN in rows without any finite element.
    top = ew.where(ew.isfinite(raw), raw, 0.0)
    exps = ew.exp(ew.subtract(x, top, output_shape=x.shape))
    total, extra_exp = reduce_sum(exps, reduced_dim=reduced_dim, band=band), None
    if extra_logit is not None:
        extra_exp = ew.exp(ew.negative(ew.subtract(top, extra_logit)))
        total = ew.add(total, extra_exp)
    positive = ew.not_equal(total, 0.0)
    return _ShiftedExp(exps, extra_exp, ew.where(positive, total, 1.0), positive, raw, top)


def softmax(
    x: Tensor, reduced_dim: DimLike, extra_logit: TensorOrNumber | None = None, *, band: Band | None = None
) -> Tensor:
    """e**x / sum of e**x over ``reduced_dim``.

    Args:
        x: Logits; a row of nothing but -inf gives zeros.
        reduced_dim: The dim (or its name) to normalise over.
        extra_logit: A logit whose probability counts in the sum and is not returned.
        band: Pairs of indices that there are; outside, the result and the gradient are 0 whatever
            x is, and a row without any pair gives zeros.

    Returns:
        A tensor of x's shape.

    Lowers: where ``reduced_dim`` is split, two all_reduces (max, sum) without that dim; in the gradient one.
    """
    parts = _shifted_exp(x, reduced_dim, extra_logit, band)
    share = ew.reciprocal(parts.total)
    values = [inside_band(ew.multiply(parts.exps, share, output_shape=x.shape), band)]
    inputs = [x]
    if isinstance(extra_logit, Tensor) and parts.extra is not None:
        values.append(ew.multiply(parts.extra, share))
        inputs.append(extra_logit)

    def rule(given: Sequence[Tensor], outputs: Sequence[Tensor], dys: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Each dx is y (dy - sum of dy y over its row)."""
        y, dy = outputs[0], only(dys[:1])
        mean = reduce_sum(ew.multiply(dy, y), reduced_dim=reduced_dim, band=band)
        dx = ew.multiply(y, ew.subtract(dy, mean, output_shape=y.shape))
        of_extra = [
            sum_to(ew.negative(ew.multiply(mean, p)), e.shape) for p, e in zip(outputs[1:], given[1:], strict=True)
        ]
        return [inside_band(dx, band), *of_extra]

    return CustomGradient(values, inputs, rule, "softmax").outputs[0]


def reduce_logsumexp(x: Tensor, reduced_dim: DimLike, extra_logit: TensorOrNumber | None = None) -> Tensor:
    """log of the sum of e**x over ``reduced_dim``, without overflow; -inf where every x is -inf.

    Args and traffic: as `softmax`.
    """
    parts = _shifted_exp(x, reduced_dim, extra_logit)
    return ew.where(parts.positive, ew.add(ew.log(parts.total), parts.max), parts.raw_max)


def log_softmax(x: Tensor, reduced_dim: DimLike, extra_logit: TensorOrNumber | None = None) -> Tensor:
    """log(softmax(x)), accurate where softmax underflows.  Args and traffic: as `softmax`."""
    return ew.subtract(x, reduce_logsumexp(x, reduced_dim, extra_logit), output_shape=x.shape)


def one_hot(
    indices: Tensor, output_dim: Dimension, on_value: float = 1.0, off_value: float = 0.0, dtype: str = "float32"
) -> Tensor:
    """``on_value`` where the index along ``output_dim`` is that of ``indices``, else ``off_value``.

    Returns:
        [dims of indices, output_dim]; an index outside 0..size-1 gives a row of ``off_value``.
    """
    hit = ew.cast(ew.equal(indices, index_range(output_dim, indices.dtype)), dtype)
    if (on_value, off_value) == (1.0, 0.0):
        return hit
    return ew.add(ew.multiply(hit, on_value - off_value), off_value)


def clip_by_value(x: Tensor, minval: TensorOrNumber, maxval: TensorOrNumber) -> Tensor:
    """x brought into [minval, maxval]; the gradient is 0 outside."""
    return ew.minimum(ew.maximum(x, minval), maxval)


def global_norm(tensors: Sequence[Tensor | None]) -> Tensor:
    """Square root of the sum of the squares of all elements, without dims; None counts nothing."""
    squares = [reduce_sum(ew.square(widened(t))) for t in tensors if t is not None]
    return ew.sqrt(ew.add_n(squares))


def clip_by_global_norm(tensors: Sequence[Tensor | None], clip_norm: float) -> tuple[list[Tensor | None], Tensor]:
    """Scales all tensors by one factor so that their `global_norm` is at most ``clip_norm``.

    Returns:
        (scaled tensors, None where there was None; the norm before).

    Source: Pascanu et al. 2013.
    """
    norm = global_norm(tensors)
    factor = ew.divide(clip_norm, ew.maximum(norm, clip_norm))
    scaled = [None if t is None else ew.multiply(t, ew.cast(factor, t.dtype), output_shape=t.shape) for t in tensors]
    return scaled, norm


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
