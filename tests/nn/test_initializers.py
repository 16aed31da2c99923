"""Initializers resolve to the right distribution."""

import math

import numpy as np
import pytest

from meshmpi import nn
from meshmpi.dims import Shape
from meshmpi.errors import ConfigError
from meshmpi.nn.initializers import Distribution

SHAPE = Shape("a:6;b:4;c:10")


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (nn.zeros_initializer(), ("constant", 0.0, 0.0)),
        (nn.ones_initializer(), ("constant", 0.0, 1.0)),
        (nn.constant_initializer(-2), ("constant", 0.0, -2.0)),
        (nn.random_normal_initializer(1.0, 0.5), ("normal", 0.5, 1.0)),
        (nn.random_uniform_initializer(-1.0, 3.0), ("uniform", 4.0, -1.0)),
        (nn.truncated_normal_initializer(0.5, 2.0), ("truncated_normal", 2.0, 0.5)),
    ],
)
def test_fixed(initializer, expected):
    assert initializer.resolve(SHAPE) == Distribution(*expected)


@pytest.mark.parametrize(
    ("options", "variance"),
    [
        ({}, 1 / 24),
        ({"scale": 2.0}, 2 / 24),
        ({"mode": "fan_out"}, 1 / 10),
        ({"mode": "fan_avg"}, 1 / 17),
        ({"fan_in": ["a"]}, 1 / 6),
        ({"fan_in": ["a"], "mode": "fan_out"}, 1 / 40),
        ({"fan_in": ["a"], "fan_out": ["c"], "mode": "fan_avg"}, 1 / 8),
    ],
)
def test_variance_scaling(options, variance):
    kind, scale, shift = nn.variance_scaling_initializer(**options).resolve(SHAPE)
    assert (kind, shift) == ("normal", 0.0)
    assert scale == pytest.approx(math.sqrt(variance), rel=1e-15)


def test_variance_of_uniform_and_truncated():
    uniform = nn.variance_scaling_initializer(distribution="uniform").resolve(SHAPE)
    assert uniform.kind == "uniform"
    assert uniform.scale**2 / 12 == pytest.approx(1 / 24, rel=1e-12)
    assert uniform.shift == pytest.approx(-uniform.scale / 2)
    kind, scale, _ = nn.variance_scaling_initializer(distribution="truncated_normal").resolve(SHAPE)
    z = np.linspace(-2, 2, 200_001)
    density = np.exp(-z * z / 2)
    variance_cut = np.sum(z * z * density) / np.sum(density)
    assert kind == "truncated_normal"
    assert scale**2 * variance_cut == pytest.approx(1 / 24, rel=1e-4)


def test_default():
    assert nn.default_initializer(SHAPE, "float32").resolve(SHAPE).kind == "normal"
    assert nn.default_initializer(SHAPE, "int32").resolve(SHAPE) == Distribution("constant", 0, 0)
    scalar = Shape()
    assert nn.default_initializer(scalar, "float32").resolve(scalar) == Distribution("normal", 1, 0)


def test_errors():
    with pytest.raises(ConfigError, match="Did you mean 'fan_in'"):
        nn.variance_scaling_initializer(mode="fanin")
    with pytest.raises(ConfigError, match="Did you mean 'uniform'"):
        nn.variance_scaling_initializer(distribution="unifrom")
