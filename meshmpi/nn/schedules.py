"""Learning-rate schedules: functions of the number of updates done so far.

A schedule maps an int32 scalar tensor to a float32 scalar tensor. It is part of the graph, so a resumed run continues
where it stopped. No optimizer is known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from meshmpi.errors import ConfigError, suggest
from meshmpi.errors import missing as _missing
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.sources import constant as constant_tensor

Schedule = Callable[[Tensor], Tensor]


def constant(value: float) -> Schedule:
    """``value`` at every step."""
    return lambda step: constant_tensor(float(value))


def linear_warmup(warmup_steps: int = 10000) -> Schedule:
    """step / warmup_steps, at most 1; so the first update has rate 0, as in Mesh-TensorFlow."""
    _positive("linear_warmup", warmup_steps)
    return lambda step: ew.minimum(ew.divide(_float(step), float(warmup_steps)), 1.0)


def rsqrt_decay(warmup_steps: int = 10000) -> Schedule:
    """1 / sqrt(step), and 1 / sqrt(warmup_steps) until then.  Source: the paper's T2T code."""
    _positive("rsqrt_decay", warmup_steps)
    return lambda step: ew.rsqrt(ew.maximum(_float(step), float(warmup_steps)))


truncated_rsqrt = rsqrt_decay
"""Mesh-TensorFlow's name."""


def noam(
    total_steps: int, warmup_steps: int = 10000, linear_decay_fraction: float = 0.1, multiplier: float = 1.0
) -> Schedule:
    """multiplier * rsqrt_decay, then falling to 0 over the last share of the steps.

    Args:
        total_steps: Step at which it is 0, if it falls at all.
        warmup_steps: See `rsqrt_decay`.
        linear_decay_fraction: The share of ``total_steps``; 0: it does not fall.
        multiplier: A factor.

    Source: Mesh-TensorFlow's learning_rate_schedule_noam.
    """
    if linear_decay_fraction == 0:
        return product(multiplier, rsqrt_decay(warmup_steps))
    _share("noam", linear_decay_fraction)
    falling = linear_decay(total_steps, total_steps * linear_decay_fraction)
    return product(multiplier, rsqrt_decay(warmup_steps), falling)


def slanted_triangular(
    total_steps: int, cut_fraction: float = 0.1, ratio: float = 32.0, max_rate: float = 0.01
) -> Schedule:
    """Rising from max_rate / ratio to ``max_rate`` and falling back, linearly; then constant.

    It rises over cut = floor(total_steps * cut_fraction) steps and falls over the next
    cut * (1 / cut_fraction - 1), which end at ``total_steps`` or, where cut was rounded, before it.

    Args:
        total_steps: Length of the schedule in steps.
        cut_fraction: Share of the steps in which it rises.
        ratio: Largest rate divided by the smallest.
        max_rate: The largest rate.

    Source: Howard and Ruder 2018, equation 3.
    """
    _share("slanted_triangular", cut_fraction)
    cut = math.floor(total_steps * cut_fraction)
    _positive("the rise of slanted_triangular", cut)
    fall = cut * (1 / cut_fraction - 1)

    def schedule(step: Tensor) -> Tensor:
        done = _float(step)
        height = ew.divide(done, float(cut))
        if fall > 0:
            falling = ew.subtract(1.0, ew.divide(ew.subtract(done, float(cut)), fall))
            height = ew.maximum(ew.minimum(height, falling), 0.0)
        return ew.multiply(ew.add(ew.multiply(height, ratio - 1.0), 1.0), max_rate / ratio)

    return schedule


def linear_decay_learning_rate(total_steps: int, initial_rate: float = 0.1, offset: int = 0) -> Schedule:
    """``initial_rate`` until step ``offset``, then falling linearly to 0 at ``total_steps``."""
    return product(initial_rate, linear_decay(total_steps, total_steps - offset))


def linear_decay(total_steps: int, decay_steps: float | None = None) -> Schedule:
    """1, then falling to 0 at ``total_steps`` over the last ``decay_steps`` (default all)."""
    decay = float(total_steps if decay_steps is None else decay_steps)
    _positive("linear_decay", total_steps if decay_steps is None else decay_steps)
    return lambda step: _clipped(ew.divide(ew.subtract(float(total_steps), _float(step)), decay))


def cosine_decay(total_steps: int, minimum: float = 0.0, warmup_steps: int = 0) -> Schedule:
    """1 until ``warmup_steps``, half a cosine down to ``minimum`` at ``total_steps``, then that."""
    _positive("cosine_decay", total_steps - warmup_steps)

    def schedule(step: Tensor) -> Tensor:
        done = ew.subtract(_float(step), float(warmup_steps))
        share = ew.divide(done, float(total_steps - warmup_steps))
        share = ew.minimum(ew.maximum(share, 0.0), 1.0)
        half = ew.multiply(0.5 * (1.0 - minimum), ew.add(1.0, ew.cos(ew.multiply(math.pi, share))))
        return ew.add(minimum, half)

    return schedule


def cosine(peak: float, warmup_steps: int, total_steps: int, minimum: float = 0.0) -> Schedule:
    """Linear warm-up to ``peak``, half a cosine down to ``minimum``, then that.

    Args:
        peak: Highest learning rate.
        warmup_steps: The rate is peak * (step + 1) / (warmup_steps + 1) before this step.
        total_steps: Step from which on it is ``minimum``.
        minimum: Lowest learning rate.

    Source: nanoGPT's train.py.
    """
    if not peak > 0:
        raise ConfigError(f"schedules.cosine: the peak is {peak}.", "Give a positive number.")
    decay = cosine_decay(total_steps, minimum / peak, warmup_steps)

    def schedule(step: Tensor) -> Tensor:
        rising = ew.divide(ew.add(_float(step), 1.0), float(warmup_steps + 1))
        warming = ew.less(_float(step), float(warmup_steps))
        return ew.multiply(peak, ew.where(warming, rising, decay(step)))

    return schedule


def product(*factors: float | Schedule) -> Schedule:
    """The product of numbers and schedules."""
    schedules = [f for f in factors if callable(f)]
    number = math.prod(float(f) for f in factors if not callable(f))

    def schedule(step: Tensor) -> Tensor:
        value = schedules[0](step) if schedules else constant_tensor(1.0)
        for s in schedules[1:]:
            value = ew.multiply(value, s(step))
        return ew.multiply(value, number) if number != 1.0 else value

    return schedule


def paper_schedule(total_steps: int, last_steps: int, warmup_steps: int = 10000, factor: float = 1.0) -> Schedule:
    """factor * linear_warmup * rsqrt_decay * linear_decay over the last steps.

    Source: Mesh-TensorFlow's Transformer configurations (136,000 steps, the last 13,600 decaying).
    """
    return product(
        factor, linear_warmup(warmup_steps), rsqrt_decay(warmup_steps), linear_decay(total_steps, last_steps)
    )


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "truncated_rsqrt": truncated_rsqrt,
    **{f.__name__: f for f in (constant, linear_warmup, rsqrt_decay, linear_decay, cosine_decay, cosine)},
    **{f.__name__: f for f in (paper_schedule, noam, slanted_triangular, linear_decay_learning_rate)},
}
_CALL = re.compile(r"^([a-z_]+)\s*(?:\(([^()]*)\))?$")


def parse_schedule(text: str | float) -> Schedule:
    """A product of numbers and schedules: ``"0.001*linear_warmup(100)*cosine_decay(2000, 0.1)"``.

    Raises:
        ConfigError: A factor is neither a number nor a known schedule with fitting arguments.

    Example:
        >>> rate = mm.schedules.parse_schedule("0.001*linear_warmup(100)*linear_decay(2000)")
        >>> with mm.Graph():
        ...     rate(mm.step_number()).dtype
        'float32'
    """
    return product(*(_parse_factor(f.strip(), str(text)) for f in str(text).split("*")))


def _parse_factor(factor: str, text: str) -> float | Schedule:
    number = _number(factor)
    if number is not None:
        return number
    match = _CALL.match(factor)
    if match is None or match[1] not in SCHEDULES:
        name = match[1] if match else factor
        raise ConfigError(
            f"'{factor}' in the schedule '{text}' is neither a number nor a schedule.", suggest(name, SCHEDULES)
        )
    numbers = [_number(a.strip()) for a in (match[2] or "").split(",") if a.strip()]
    try:
        return SCHEDULES[match[1]](*numbers)
    except TypeError as e:
        raise ConfigError(f"'{factor}' in the schedule '{text}': {e}.", "Give its arguments as numbers.") from None


def _number(text: str) -> int | float | None:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return None


def _float(step: Tensor) -> Tensor:
    return ew.cast(step, "float32")


def _clipped(share: Tensor) -> Tensor:
    return ew.maximum(ew.minimum(share, 1.0), 0.0)


def _positive(name: str, steps: float) -> None:
    if steps <= 0:
        raise ConfigError(f"{name} lasts {steps} steps.", "Give a positive number of steps.")


def _share(name: str, fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"{name}: the share of steps is {fraction}.", "Give a number in (0, 1].")


__all__ = sorted([*SCHEDULES, "parse_schedule", "product"])
_check_all(globals(), __all__, "schedules.")


def __getattr__(name: str) -> object:
    raise _missing("meshmpi.schedules", name, __all__)
