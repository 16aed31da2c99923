"""Adafactor: Adam's second moment kept as row and column means."""

from __future__ import annotations

from meshmpi.dims import Shape
from meshmpi.graph import Graph, Tensor, Update, Variable
from meshmpi.nn.optimize.base import LearningRate, Optimizer, Slots, StepValues, number
from meshmpi.ops import elementwise as ew
from meshmpi.ops.reductions import reduce_mean
from meshmpi.ops.sources import assign, read_stored


def default_learning_rate(step: Tensor) -> Tensor:
    """min(1 / sqrt(step + 1), 0.01): relative steps, for ``multiply_by_parameter_scale``."""
    return ew.minimum(ew.rsqrt(ew.add(ew.cast(step, "float32"), 1.0)), 0.01)


class Adafactor(Optimizer):
    """Adam-like steps with O(rows + columns) memory, relative to the size of the weights.

    d = 1 - t**-decay_exponent, t = 1, 2, ...;  s = g**2 + epsilon1
    factored: r <- d r + (1 - d) mean of s over columns, c likewise over rows,
    u = g / sqrt(r / mean(r)) / sqrt(c);  otherwise v <- d v + (1 - d) s, u = g / sqrt(v)
    u <- u / max(1, rms(u) / clipping_threshold) * rate * max(rms(w), epsilon2);  w <- w - u

    Args:
        learning_rate: See `Optimizer`; None: `default_learning_rate`.
        decay_exponent: 0.8 in the paper.
        beta1: With a value above 0 the steps u are averaged in a slot of the variable's shape.
        clipping_threshold: Largest root mean square of u; None: not clipped.
        multiply_by_parameter_scale: Whether steps are relative to rms(w).
        factored: Whether second moments are factored at all.
        min_dim_size_to_factor: Factored where the two largest dims have at least this size.
        epsilon1: Keeps squared gradients above 0.
        epsilon2: Keeps the scale of parameters above 0.
        clip_norm: See `Optimizer`.
        name: See `Optimizer`.

    Slots are small, so they have no storage rules of their own: they are kept as the variable is.

    Source: Shazeer and Stern 2018.
    """

    def __init__(
        self, learning_rate: LearningRate | None = None, *, decay_exponent: float = 0.8,
        beta1: float = 0.0, clipping_threshold: float | None = 1.0,
        multiply_by_parameter_scale: bool = True, factored: bool = True,
        min_dim_size_to_factor: int = 128, epsilon1: float = 1e-30, epsilon2: float = 1e-3,
        clip_norm: float | None = None, name: str = "adafactor",
    ):  # fmt: skip
        rate = default_learning_rate if learning_rate is None else learning_rate
        super().__init__(rate, clip_norm=clip_norm, name=name)
        self.decay_exponent, self.beta1 = decay_exponent, beta1
        self.clipping_threshold = clipping_threshold
        self.multiply_by_parameter_scale = multiply_by_parameter_scale
        self.factored, self.min_dim_size_to_factor = factored, min_dim_size_to_factor
        self.epsilon1, self.epsilon2 = epsilon1, epsilon2

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

    def update(
        self, w: Tensor, g: Tensor, variable: Variable, slots: Slots, step: StepValues
    ) -> tuple[Tensor, list[Update]]:
        # 1 - t**-0.8 in float64, as the other numbers of a step; the first step forgets everything.
        decay = ew.cast(ew.subtract(1.0, ew.pow(step.t, -self.decay_exponent)), w.dtype)
        squares = ew.add(ew.square(g), self.epsilon1)
        u, updates = self._normalised(g, squares, decay, variable.shape, slots)
        if self.clipping_threshold is not None:
            u = ew.divide(u, ew.maximum(ew.divide(_rms(u), self.clipping_threshold), 1.0))
        rate = number(step.rate, w)
        if self.multiply_by_parameter_scale:
            rate = ew.multiply(rate, ew.maximum(_rms(w), self.epsilon2))
        u = ew.multiply(u, rate)
        if self.beta1:
            old = read_stored(slots["m"])
            u = ew.add(ew.multiply(self.beta1, old), ew.multiply(1.0 - self.beta1, u))
            updates.append(assign(slots["m"], u))
        return ew.subtract(w, u), updates

    def _normalised(
        self, g: Tensor, squares: Tensor, decay: Tensor, shape: Shape, slots: Slots
    ) -> tuple[Tensor, list[Update]]:
        """g over the root of its second moment, and the updates of the second moment."""
        dims = self.factored_dims(shape)
        if dims is None:
            v = _decayed(decay, slots["v"], squares)
            return ew.multiply(g, ew.rsqrt(v)), [assign(slots["v"], v)]
        large, second = dims
        row = _decayed(decay, slots["row"], reduce_mean(squares, reduced_dim=large))
        col = _decayed(decay, slots["col"], reduce_mean(squares, reduced_dim=second))
        row_factor = ew.rsqrt(ew.divide(row, reduce_mean(row, reduced_dim=second), row.shape))
        u = ew.multiply(g, row_factor, output_shape=g.shape)
        u = ew.multiply(u, ew.rsqrt(col), output_shape=g.shape)
        return u, [assign(slots["row"], row), assign(slots["col"], col)]


def _decayed(decay: Tensor, slot: Variable, new: Tensor) -> Tensor:
    """decay * old + (1 - decay) * new."""
    return ew.add(ew.multiply(decay, read_stored(slot)), ew.multiply(ew.subtract(1.0, decay), new))


def _rms(x: Tensor) -> Tensor:
    """Root of the mean square of all elements."""
    return ew.sqrt(reduce_mean(ew.square(x)))
