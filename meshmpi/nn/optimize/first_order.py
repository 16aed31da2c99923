"""SGD, Momentum, Adam and AdamW."""

from __future__ import annotations

import math

from meshmpi.dims import LayoutLike
from meshmpi.graph import Tensor
from meshmpi.nn.optimize.base import (
    Decays,
    Item,
    LearningRate,
    Optimizer,
    Result,
    StepValues,
    number,
)
from meshmpi.ops import elementwise as ew
from meshmpi.ops.sources import assign, read_stored


class SGD(Optimizer):
    """w <- w - rate * g.  Args: see `Optimizer`."""

    def __init__(
        self, learning_rate: LearningRate, *, clip_norm: float | None = None, name: str = "sgd"
    ):
        super().__init__(learning_rate, clip_norm=clip_norm, name=name)

    def update(self, item: Item, step: StepValues) -> Result:
        return ew.subtract(item.w, ew.multiply(number(step.rate, item.w), item.g)), []


class Momentum(Optimizer):
    """v <- momentum * v + g;  w <- w - rate * v  (with ``nesterov``: rate * (g + momentum * v)).

    Args: see `Optimizer`.

    Source: Sutskever et al. 2013, in the form that PyTorch uses.
    """

    slot_names = ("v",)

    def __init__(
        self, learning_rate: LearningRate, momentum: float = 0.9, *, nesterov: bool = False,
        clip_norm: float | None = None, storage: LayoutLike = None, name: str = "momentum",
    ):  # fmt: skip
        super().__init__(learning_rate, clip_norm=clip_norm, storage=storage, name=name)
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, item: Item, step: StepValues) -> Result:
        _, w, g, slots = item
        v = ew.add(ew.multiply(self.momentum, read_stored(slots["v"])), g)
        direction = ew.add(g, ew.multiply(self.momentum, v)) if self.nesterov else v
        new = ew.subtract(w, ew.multiply(number(step.rate, w), direction))
        return new, [assign(slots["v"], v)]


class AdamW(Optimizer):
    """Adam with weight decay that is not part of the gradient.

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g**2
    w <- w - rate * weight_decay * w - rate * m1 / (sqrt(v1) + epsilon)
    where m1 = m / (1 - beta1**t), v1 = v / (1 - beta2**t)

    Args:
        learning_rate: See `Optimizer`.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        epsilon: Added to the root.
        weight_decay: Share of w taken off per unit of learning rate.
        decays: Variable -> whether its weights decay; default those with at least two dims
            (matrices and embeddings, not biases and norm scales).
        clip_norm: See `Optimizer`.
        storage: See `Optimizer`.
        name: See `Optimizer`.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """

    slot_names = ("m", "v")

    def __init__(
        self, learning_rate: LearningRate, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, weight_decay: float = 0.01, *, decays: Decays | None = None,
        clip_norm: float | None = None, storage: LayoutLike = None, name: str = "adamw",
    ):  # fmt: skip
        super().__init__(learning_rate, clip_norm=clip_norm, storage=storage, name=name)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.weight_decay = weight_decay
        self.decays = decays or (lambda variable: len(variable.shape) >= 2)

    def update(self, item: Item, step: StepValues) -> Result:
        variable, w, g, slots = item
        m = _moving_average(self.beta1, read_stored(slots["m"]), g)
        v = _moving_average(self.beta2, read_stored(slots["v"]), ew.square(g))
        rate = number(ew.divide(step.rate, _bias_correction(self.beta1, step.t)), w)
        root = number(ew.rsqrt(_bias_correction(self.beta2, step.t)), w)
        denominator = ew.add(ew.multiply(ew.sqrt(v), root), self.epsilon)
        if self.weight_decay and self.decays(variable):
            kept = 1.0 - step.rate * self.weight_decay  # pyright: ignore[reportOperatorIssue]
            w = ew.multiply(w, number(kept, w))
        new = ew.subtract(w, ew.multiply(rate, ew.divide(m, denominator)))
        return new, [assign(slots["m"], m), assign(slots["v"], v)]


class Adam(AdamW):
    """`AdamW` without weight decay.  Args: see `AdamW`."""

    def __init__(
        self, learning_rate: LearningRate, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, *, clip_norm: float | None = None, storage: LayoutLike = None,
        name: str = "adam",
    ):  # fmt: skip
        super().__init__(
            learning_rate, beta1, beta2, epsilon, 0.0, clip_norm=clip_norm, storage=storage,
            name=name,
        )  # fmt: skip


def _moving_average(beta: float, old: Tensor, new: Tensor) -> Tensor:
    return ew.add(ew.multiply(beta, old), ew.multiply(1.0 - beta, new))


def _bias_correction(beta: float, t: Tensor) -> Tensor:
    """1 - beta**t in float64."""
    if beta == 0.0:
        return ew.add(ew.multiply(0.0, t), 1.0)
    return ew.subtract(1.0, ew.exp(ew.multiply(math.log(beta), t)))
