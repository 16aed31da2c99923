"""Activation functions against NumPy formulas; derivatives against central differences."""

import math

import numpy as np
import pytest

from meshmpi import nn
from meshmpi.errors import ConfigError
from meshmpi.graph import Graph, ops
from meshmpi.graph.autodiff import gradients
from meshmpi.nn.activations import ACTIVATIONS, activation_function
from tests.nn.build import value

_erf = np.vectorize(math.erf)
SELU = (1.0507009873554805, 1.6732632423543772)
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.2 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "selu": lambda x: SELU[0] * np.where(x > 0, x, SELU[1] * np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "linear": lambda x: x,
}
POINTS = np.array([-30.0, -3.0, -0.7, -1e-3, 1e-3, 0.4, 2.5, 39.0])


def test_every_activation_has_a_formula():
    assert sorted(FORMULAS) == sorted(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_derivative(name):
    with Graph():
        x = ops.placeholder("x", [("n", len(POINTS))], "float64")
        y = activation_function(name)(x)
        (dx,) = gradients(ops.reduce_sum(y), [x])
    f, h = FORMULAS[name], 1e-5
    np.testing.assert_allclose(value(y, {"x": POINTS}), f(POINTS), rtol=1e-12, atol=1e-12)
    slope = (f(POINTS + h) - f(POINTS - h)) / (2 * h)
    np.testing.assert_allclose(value(dx, {"x": POINTS}), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "at_zero"),
    # TensorFlow's, which Mesh-TensorFlow takes: JAX has alpha * 1.05 for selu, 1 for leaky_relu
    [("relu", 0.0), ("elu", 1.0), ("softplus", 0.5), ("squared_relu", 0.0), ("selu", SELU[0]), ("leaky_relu", 0.2)],
)
def test_derivative_at_zero_and_far_out(name, at_zero):
    points = np.array([0.0, 800.0, -800.0, 40.0])
    with Graph():
        x = ops.placeholder("x", [("n", 4)], "float64")
        (dx,) = gradients(ops.reduce_sum(ACTIVATIONS[name](x)), [x])
    found = value(dx, {"x": points})
    assert np.all(np.isfinite(found))
    assert found[0] == at_zero
    if name != "squared_relu":
        assert found[1] == found[3] == (SELU[0] if name == "selu" else 1.0)


def test_unknown_activation():
    with pytest.raises(ConfigError, match="Did you mean 'relu'"):
        activation_function("rellu")
    assert activation_function(nn.gelu) is nn.gelu
