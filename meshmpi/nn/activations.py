"""Activation functions, composed from elementwise primitives.

Nothing here reduces, draws random numbers or makes variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from meshmpi.errors import ConfigError, suggest
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import asked
from meshmpi.graph.ops import elementwise as ew

Activation = str | Callable[[Tensor], Tensor] | None
"""A name of `ACTIVATIONS`, a function of a tensor, or None for none."""

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
_SOFTPLUS_LINEAR = 40.0
"""log(1 + e**x) - x < 1e-17 from here on, and e**x is far from overflow below."""


def relu(x: Tensor) -> Tensor:
    """max(x, 0); gradient 0 at 0."""
    return ew.maximum(x, 0.0)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2.  Source: So et al. 2021 (Primer)."""
    return ew.square(relu(x))


def leaky_relu(x: Tensor, alpha: float = 0.2) -> Tensor:
    """x where positive, else ``alpha * x``; gradient ``alpha`` at 0."""
    return ew.where(ew.greater(x, 0.0), x, ew.multiply(alpha, x))


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where positive, else ``alpha * (e**x - 1)``; gradient 1 at 0.

    Source: Clevert et al. 2016.
    """
    positive = ew.greater_equal(x, 0.0)
    # Positive x never reaches exp: it could overflow, and inf * 0 in the gradient is NaN.
    below = ew.subtract(ew.exp(ew.where(positive, 0.0, x)), 1.0)
    return ew.where(positive, x, below if alpha == 1.0 else ew.multiply(alpha, below))


def selu(x: Tensor) -> Tensor:
    """Self-normalising elu; gradient 1.0507 at 0.  Source: Klambauer et al. 2017."""
    return ew.multiply(_SELU_SCALE, elu(x, _SELU_ALPHA))


def gelu(x: Tensor, exact: bool = False) -> Tensor:
    """x * P(standard normal < x); by default with the usual tanh approximation.

    Source: Hendrycks and Gimpel 2016.
    """
    if exact:
        cdf = ew.add(1.0, ew.erf(ew.multiply(x, math.sqrt(0.5))))
    else:
        inner = ew.add(x, ew.multiply(0.044715, ew.multiply(ew.square(x), x)))
        cdf = ew.add(1.0, ew.tanh(ew.multiply(math.sqrt(2 / math.pi), inner)))
    return ew.multiply(ew.multiply(0.5, x), cdf)


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called silu."""
    return ew.multiply(x, ew.sigmoid(x))


silu = swish


def softplus(x: Tensor) -> Tensor:
    """log(1 + e**x), without overflow."""
    linear = ew.greater_equal(x, _SOFTPLUS_LINEAR)
    return ew.where(linear, x, ew.log1p(ew.exp(ew.where(linear, 0.0, x))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "squared_relu": squared_relu,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "selu": selu,
    "gelu": gelu,
    "gelu_exact": lambda x: gelu(x, exact=True),
    "swish": swish,
    "silu": silu,
    "softplus": softplus,
    "sigmoid": ew.sigmoid,
    "tanh": ew.tanh,
    "linear": lambda x: x,
}


def activation_function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The function meant by a name, a function or None (the identity).

    Raises:
        ConfigError: There is no activation of that name.
    """
    if activation is None:
        return ACTIVATIONS["linear"]
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ConfigError(f"there is no activation '{activation}'.", suggest(activation, ACTIVATIONS))
        return ACTIVATIONS[activation]
    if hasattr(activation, "__checked__"):  # of ours: it reads its arguments itself
        return activation
    return lambda x: asked(activation, "activation", x)
