"""Initializers: the distribution of a variable's initial values, as data.

An initializer resolves to a `Distribution` once the shape is known; the executor draws each block from it by global
index. Nothing here draws numbers or knows arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshmpi.dims import Shape
from meshmpi.errors import ConfigError, suggest
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.ir.scalar import FLOATS

KINDS = ("constant", "normal", "uniform", "truncated_normal")
_FAN_MODES = ("fan_in", "fan_out", "fan_avg")
_TRUNCATED_STDDEV = 0.87962566103423978
"""Standard deviation of a standard normal cut to |z| <= 2 (closed form)."""


class Distribution(NamedTuple):
    """The value of every element: ``scale * z + shift``, with z drawn independently.

    ``kind`` says what z is: "constant" (0, so the value is ``shift``), "normal" (standard normal),
    "uniform" (in [0, 1)) or "truncated_normal" (standard normal given |z| <= 2).
    """

    kind: str
    scale: float
    shift: float

    def resolve(self, shape: Shape) -> Distribution:
        """Itself: as an initializer, it does not depend on the shape."""
        return self


class Initializer(Protocol):
    """What ``mm.get_variable(initializer=...)`` takes besides an array of the global shape."""

    def resolve(self, shape: Shape) -> Distribution:
        """The distribution of the elements of a variable of this (global) shape."""
        ...


@dataclass(frozen=True)
class VarianceScaling:
    """Variance ``scale / fan``; see `variance_scaling_initializer`."""

    scale: float
    mode: str
    distribution: str
    fan_in: tuple[str, ...] | None
    fan_out: tuple[str, ...] | None

    def resolve(self, shape: Shape) -> Distribution:
        names_in = shape.names[:-1] if self.fan_in is None else self.fan_in
        names_out = [n for n in shape.names if n not in names_in] if self.fan_out is None else self.fan_out
        fan_in, fan_out = (math.prod(shape.dim(n).size for n in names) for names in (names_in, names_out))
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        stddev = math.sqrt(self.scale / fan)
        if self.distribution == "uniform":
            limit = math.sqrt(3.0) * stddev
            return Distribution("uniform", 2 * limit, -limit)
        if self.distribution == "truncated_normal":
            return Distribution("truncated_normal", stddev / _TRUNCATED_STDDEV, 0.0)
        return Distribution("normal", stddev, 0.0)


def zeros_initializer() -> Initializer:
    """Every element 0."""
    return constant_initializer(0.0)


def ones_initializer() -> Initializer:
    """Every element 1."""
    return constant_initializer(1.0)


def constant_initializer(value: float) -> Initializer:
    """Every element ``value``."""
    return Distribution("constant", 0.0, float(value))


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal with this mean and standard deviation."""
    return Distribution("normal", float(stddev), float(mean))


def random_uniform_initializer(minval: float = 0.0, maxval: float = 1.0) -> Initializer:
    """Uniform in [minval, maxval)."""
    return Distribution("uniform", float(maxval - minval), float(minval))


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal, redrawn beyond two ``stddev`` from ``mean`` (so its deviation is 0.88 ``stddev``)."""
    return Distribution("truncated_normal", float(stddev), float(mean))


def variance_scaling_initializer(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "normal",
    fan_in: Sequence[DimLike] | None = None,
    fan_out: Sequence[DimLike] | None = None,
) -> Initializer:
    """Variance ``scale / fan``, so that sums over the fan keep the variance of their inputs.

    Args:
        scale: 1 for linear layers, 2 for layers behind a relu (He et al. 2015).
        mode: "fan_in", "fan_out" or "fan_avg" (the mean of both; Glorot and Bengio 2010).
        distribution: "normal", "truncated_normal" or "uniform".
        fan_in: Dims summed over when the variable is used; default all but the last.
        fan_out: Dims that it produces; default all others.

    Raises:
        ConfigError: An unknown mode or distribution.
    """
    known = KINDS[1:]
    if mode not in _FAN_MODES:
        raise ConfigError(f"variance scaling has no mode '{mode}'.", suggest(mode, _FAN_MODES))
    if distribution not in known:
        raise ConfigError(f"variance scaling has no distribution '{distribution}'.", suggest(distribution, known))
    names = [None if fan is None else tuple(dim_name(d) for d in fan) for fan in (fan_in, fan_out)]
    return VarianceScaling(float(scale), mode, distribution, names[0], names[1])


def default_initializer(shape: Shape, dtype: str) -> Initializer:
    """What a variable without an initializer gets.

    Floats: normal with variance 1 / (product of all dims but the last); others: zeros.
    """
    return variance_scaling_initializer() if dtype in FLOATS else zeros_initializer()
