"""SGD, Momentum, Adam, AdamW and LAMB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.sources import assign, read_stored
from meshmpi.nn.optimize.base import Choice, Item, LearningRate, Optimizer, Rate, Result, StepValues, chosen, number


class SGD(Optimizer):
    """w <- w - rate * g.  Args: see `Optimizer`."""

    def __init__(self, learning_rate: LearningRate, *, clip_norm: float | None = None, name: str = "sgd"):
        super().__init__(learning_rate, clip_norm=clip_norm, name=name)

    def update(self, item: Item, step: StepValues) -> Result:
        return ew.subtract(item.w, ew.multiply(number(item.rate, item.w), item.g)), []


@dataclass(eq=False, repr=False)
class Momentum(Optimizer):
    """v <- momentum * v + g;  w <- w - rate * v  (with ``nesterov``: rate * (g + momentum * v)).

    The arguments are those of `Optimizer`.

    Source: Sutskever et al. 2013, in the form that PyTorch uses.
    """

    slot_names = ("v",)
    momentum: float = 0.9
    _: KW_ONLY
    nesterov: bool = False
    name: str = "momentum"

    def update(self, item: Item, step: StepValues) -> Result:
        w, g, slots = item.w, item.g, item.slots
        v = ew.add(ew.multiply(self.momentum, read_stored(slots["v"])), g)
        direction = ew.add(g, ew.multiply(self.momentum, v)) if self.nesterov else v
        new = ew.subtract(w, ew.multiply(number(item.rate, w), direction))
        return new, [assign(slots["v"], v)]


@dataclass(eq=False, repr=False)
class Adam(Optimizer):
    """`AdamW` without weight decay.  Args: see `AdamW`."""

    slot_names = ("m", "v")
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    _: KW_ONLY
    name: str = "adam"

    def update(self, item: Item, step: StepValues) -> Result:
        w, (m, v) = item.w, self.moments(item)
        rate = number(ew.divide(item.rate, _bias_correction(self.beta1, step.t)), w)
        if self.does_decay(item, step):
            kept = 1.0 - item.rate * step.decay  # pyright: ignore[reportOperatorIssue]
            w = ew.multiply(w, number(kept, w))
        new = ew.subtract(w, ew.multiply(rate, ew.divide(m, self.root(v, step))))
        return new, [assign(item.slots["m"], m), assign(item.slots["v"], v)]

    def moments(self, item: Item) -> tuple[Tensor, Tensor]:
        """The new means of gradients and of their squares."""
        m = _moving_average(self.beta1, read_stored(item.slots["m"]), item.g)
        return m, _moving_average(self.beta2, read_stored(item.slots["v"]), ew.square(item.g))

    def root(self, v: Tensor, step: StepValues) -> Tensor:
        """sqrt(v1) + epsilon."""
        factor = number(ew.rsqrt(_bias_correction(self.beta2, step.t)), v)
        return ew.add(ew.multiply(ew.sqrt(v), factor), self.epsilon)

    def does_decay(self, item: Item, step: StepValues) -> bool:
        """Whether weight decay applies to a variable."""
        return False


@dataclass(eq=False, repr=False)
class AdamW(Adam):
    """Adam with weight decay that is not part of the gradient.

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g**2
    w <- w - rate * weight_decay * w - rate * m1 / (sqrt(v1) + epsilon)
    where m1 = m / (1 - beta1**t), v1 = v / (1 - beta2**t)

    The other arguments are those of `Optimizer`.

    Args:
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        epsilon: Added to the root.
        weight_decay: Share of w taken off per unit of learning rate; a number or a schedule.
        decays: Which variables decay: a test of a variable, or regular expressions of the names
            that do not, as in ``["bias", "norm"]``.  Default: those made with ``decays=True``, as
            `mm.get_variable` does; the layers of meshmpi make their biases and norm scales with
            False.  The number of dims plays no part: an attention bias [heads, d_kv] has two.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """

    weight_decay: Rate = 0.01
    _: KW_ONLY
    decays: Choice | None = None
    name: str = "adamw"

    def __post_init__(self) -> None:
        if self.decays is None:
            self.decays = lambda variable: variable.decays

    def does_decay(self, item: Item, step: StepValues) -> bool:
        some = isinstance(step.decay, Tensor) or step.decay != 0.0
        return some and self.decays is not None and chosen(self.decays, item.variable)


@dataclass(eq=False, repr=False)
class LAMB(AdamW):
    """Adam's direction with steps whose length is relative to that of the weights.

    u = m1 / (sqrt(v1) + epsilon) + weight_decay * w, m1 and v1 as in `AdamW`
    w <- w - rate * |w| / |u| * u  (without the factor |w| / |u| where one of the norms is 0)
    where |x| is the square root of the sum of the squares over the whole variable

    The other arguments are those of `AdamW`.

    Args:
        adapts: Whose steps are relative to their weights, given as ``decays`` is; default all.

    Source: You et al. 2020, algorithm 2 with the identity as scaling function.
    """

    epsilon: float = 1e-6
    _: KW_ONLY
    adapts: Choice = ()
    name: str = "lamb"

    def update_all(self, items: Sequence[Item], step: StepValues) -> list[Result]:
        # All directions before all norms: norms of split variables can share a message.
        moments = [self.moments(i) for i in items]
        steps = [self._direction(i, m, v, step) for i, (m, v) in zip(items, moments, strict=True)]
        norms = [(_norm(i.w), _norm(u)) for i, u in zip(items, steps, strict=True)]
        results = []
        for i, (m, v), u, (size_w, size_u) in zip(items, moments, steps, norms, strict=True):
            rate = number(i.rate, i.w)
            if chosen(self.adapts, i.variable):
                both = ew.logical_and(ew.greater(size_w, 0.0), ew.greater(size_u, 0.0))
                trust = ew.where(both, ew.divide(size_w, ew.where(both, size_u, 1.0)), 1.0)
                rate = ew.multiply(trust, rate)
            new = ew.subtract(i.w, ew.multiply(u, rate))
            results.append((new, [assign(i.slots["m"], m), assign(i.slots["v"], v)]))
        return results

    def _direction(self, item: Item, m: Tensor, v: Tensor, step: StepValues) -> Tensor:
        factor = number(ew.reciprocal(_bias_correction(self.beta1, step.t)), m)
        u = ew.divide(ew.multiply(m, factor), self.root(v, step))
        if self.does_decay(item, step):
            u = ew.add(u, ew.multiply(item.w, number(step.decay, item.w)))
        return u


def _norm(x: Tensor) -> Tensor:
    return ew.sqrt(reduce_sum(ew.square(x)))


def _moving_average(beta: float, old: Tensor, new: Tensor) -> Tensor:
    return ew.add(ew.multiply(beta, old), ew.multiply(1.0 - beta, new))


def _bias_correction(beta: float, t: Tensor) -> Tensor:
    """1 - beta**t in float64."""
    if beta == 0.0:
        return ew.add(ew.multiply(0.0, t), 1.0)
    return ew.subtract(1.0, ew.exp(ew.multiply(math.log(beta), t)))
