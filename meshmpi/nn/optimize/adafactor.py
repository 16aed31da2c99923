"""Adafactor: Adam's second moment kept as row and column means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from meshmpi.dims import Shape
from meshmpi.graph import Graph, Tensor, Variable
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import assign, read_stored
from meshmpi.nn.optimize.base import Item, LearningRate, Optimizer, Result, Slots, StepValues, number

Moments = dict[str, Tensor]
"""Slot name -> value: "v" alone, or "row" and "col"."""


def default_learning_rate(step: Tensor) -> Tensor:
    """min(1 / sqrt(step + 1), 0.01): relative steps, for ``multiply_by_parameter_scale``."""
    return ew.minimum(ew.rsqrt(ew.add(ew.cast(step, "float32"), 1.0)), 0.01)


@dataclass(eq=False, repr=False)
class Adafactor(Optimizer):
    """Adam-like steps with O(rows + columns) memory, relative to the size of the weights.

    d = 1 - t**-decay_exponent, t = 1, 2, ...;  s = g**2 + epsilon1
    factored: r <- d r + (1 - d) mean of s over columns, c likewise over rows,
    u = g / sqrt(r / mean(r)) / sqrt(c);  otherwise v <- d v + (1 - d) s, u = g / sqrt(v)
    u <- u / max(1, rms(u) / clipping_threshold) * rate * max(rms(w), epsilon2);  w <- w - u

    The other arguments are those of `Optimizer`.

    Args:
        learning_rate: None: `default_learning_rate`.
        decay_exponent: 0.8 in the paper.
        beta2: Instead, d is that of Adam with bias correction: beta2 (1 - beta2**(t - 1)) / (1 - beta2**t).
        beta1: With a value above 0 the steps u are averaged in a slot of the variable's shape.
        clipping_threshold: Largest root mean square of u; None: not clipped.
        multiply_by_parameter_scale: Whether steps are relative to rms(w).
        factored: Whether second moments are factored at all.
        min_dim_size_to_factor: Factored where the two largest dims have at least this size.
        epsilon1: Keeps squared gradients above 0.
        epsilon2: Keeps the scale of parameters above 0.
        storage: Row and column means are split as the update is, as far as they have the dims.

    Source: Shazeer and Stern 2018.
    """

    learning_rate: LearningRate | None = None
    _: KW_ONLY
    decay_exponent: float = 0.8
    beta2: float | None = None
    beta1: float = 0.0
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    factored: bool = True
    min_dim_size_to_factor: int = 128
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    name: str = "adafactor"

    def __post_init__(self) -> None:
        self.learning_rate = default_learning_rate if self.learning_rate is None else self.learning_rate

    def factored_dims(self, shape: Shape) -> tuple[str, str] | None:
        """Names of the two largest dims (in case of a tie the earlier), or None: not factored."""
        if not self.factored or len(shape) < 2:
            return None
        largest = sorted(shape, key=lambda d: -d.size)[:2]
        if largest[1].size < self.min_dim_size_to_factor:
            return None
        return largest[0].name, largest[1].name

    def make_slots(self, graph: Graph, variable: Variable) -> Slots:
        shape = variable.shape
        dims = self.factored_dims(shape)
        if dims is None:
            shapes = {"v": shape}
        else:
            shapes = {"row": shape.without([dims[0]]), "col": shape.without([dims[1]])}
        if self.beta1:
            shapes["m"] = shape
        return {n: self.slot(graph, variable, n, s) for n, s in shapes.items()}

    def update_all(self, items: Sequence[Item], step: StepValues) -> list[Result]:
        # Stage by stage over all variables, not variable by variable: what one stage sums over
        # split dims can then share a message.  Each stage uses the sums of the one before.
        decay = self._decay(step.t)
        means = [self._mean_squares(i) for i in items]
        moments = [_decayed(i, m, decay) for i, m in zip(items, means, strict=True)]
        dims = [self.factored_dims(i.variable.shape) for i in items]
        totals = [d and reduce_mean(m["row"], reduced_dim=d[1]) for d, m in zip(dims, moments, strict=True)]
        steps = list(map(_normalised, items, moments, totals))
        sizes = [(_mean_square(u), _mean_square(i.w)) for i, u in zip(items, steps, strict=True)]
        results = []
        for i, moment, u, (size_u, size_w) in zip(items, moments, steps, sizes, strict=True):
            u = self._scaled(u, size_u, size_w, number(i.rate, i.w))
            updates = [assign(i.slots[n], value) for n, value in moment.items()]
            if self.beta1:
                u = ew.add(ew.multiply(self.beta1, read_stored(i.slots["m"])), ew.multiply(1.0 - self.beta1, u))
                updates.append(assign(i.slots["m"], u))
            results.append((ew.subtract(i.w, u), updates))
        return results

    def _decay(self, t: Tensor) -> Tensor:
        """d, in float64: 0 at the first step."""
        if self.beta2 is None:
            return ew.subtract(1.0, ew.pow(t, -self.decay_exponent))
        power = ew.exp(ew.multiply(math.log(self.beta2), t))
        return ew.divide(ew.subtract(self.beta2, power), ew.subtract(1.0, power))

    def _mean_squares(self, item: Item) -> Moments:
        """What the slots average: squares of the gradient, or their means over a dim."""
        squares = ew.add(ew.square(item.g), self.epsilon1)
        dims = self.factored_dims(item.variable.shape)
        if dims is None:
            return {"v": squares}
        return {name: reduce_mean(squares, reduced_dim=d) for name, d in zip(("row", "col"), dims, strict=True)}

    def _scaled(self, u: Tensor, size_u: Tensor, size_w: Tensor, rate: Tensor | float) -> Tensor:
        """The clipped step times the learning rate, given mean squares of step and variable."""
        if self.clipping_threshold is not None:
            excess = ew.divide(ew.sqrt(size_u), self.clipping_threshold)
            u = ew.divide(u, ew.maximum(excess, 1.0))
        if self.multiply_by_parameter_scale:
            rate = ew.multiply(rate, ew.maximum(ew.sqrt(size_w), self.epsilon2))
        return ew.multiply(u, rate)


def _decayed(item: Item, means: Moments, decay: Tensor) -> Moments:
    """decay * old + (1 - decay) * new, for every slot of second moments."""
    decay = ew.cast(decay, item.w.dtype)
    kept = ew.subtract(1.0, decay)
    return {
        n: ew.add(ew.multiply(decay, read_stored(item.slots[n])), ew.multiply(kept, new)) for n, new in means.items()
    }


def _normalised(item: Item, moments: Moments, row_mean: Tensor | None) -> Tensor:
    """The gradient over the root of its second moment."""
    g = item.g
    if row_mean is None:
        return ew.multiply(g, ew.rsqrt(moments["v"]))
    row = moments["row"]
    row_factor = ew.rsqrt(ew.divide(row, row_mean, output_shape=row.shape))
    u = ew.multiply(g, row_factor, output_shape=g.shape)
    return ew.multiply(u, ew.rsqrt(moments["col"]), output_shape=g.shape)


def _mean_square(x: Tensor) -> Tensor:
    return reduce_mean(ew.square(x))
