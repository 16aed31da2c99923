"""Positions of tokens as model input: sinusoids, rotary embeddings, relative biases.

All are computed from global indices, so a split length makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, ShapeError, suggest
from meshmpi.graph import Tensor, layer_name
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import gather
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.sources import VariableDType, get_variable
from meshmpi.graph.ops.structure import DimLike, concat, dim_name
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.initializers import zeros_initializer

BUCKETS, MAX_DISTANCE = 32, 128
"""Source: T5 (Raffel et al. 2020)."""


def sinusoid_positions(length: Dimension, d_model: Dimension, base: float = 10000.0, dtype: str = "float32") -> Tensor:
    """sin(p f_i) in the first half of ``d_model``, cos(p f_i) in the second, p the position.

    f_i = base**(-2 i / d_model) for i = 0, 1, ..., d_model / 2 - 1.

    Args:
        length: Dim of positions.
        d_model: Dim of the result; of even size.
        base: The longest wave is 2 pi times this.
        dtype: Data type of the result.

    Returns:
        [length, d_model], without variables.

    Source: Vaswani et al. 2017, sines and cosines in halves as in their code.
    """
    _check("sinusoid_positions", d_model, base)
    half = d_model.size // 2
    number = ew.cast(index_range(d_model), dtype)
    is_sine = ew.less(number, float(half))
    step = ew.where(is_sine, number, ew.subtract(number, float(half)))
    position = ew.cast(index_range(length), dtype)
    angle = ew.multiply(
        position, ew.exp(ew.multiply(step, -math.log(base) / half)), output_shape=Shape([length, d_model])
    )
    return ew.where(is_sine, ew.sin(angle), ew.cos(angle), output_shape=angle.shape)


@dataclass(frozen=True)
class RotaryScaling:
    """How rotations are slowed down, so that longer texts than in training need no new angles.

    Attributes:
        kind: "linear": every rate is divided by ``factor``.  "llama3": only those of long waves are.
        factor: What rates are divided by.
        low: Rates with at most this many waves in ``length`` positions are divided.
        high: Rates with at least this many stay; between ``low`` and ``high`` they change linearly.
        length: Length of the texts that the model was first trained on, in tokens.

    Source: Chen et al. 2023 (linear); Llama 3.1 (Grattafiori et al. 2024).
    """

    kind: str
    factor: float
    low: float = 1.0
    high: float = 4.0
    length: float = 8192.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(
                f"rotary_scaling: there is no kind '{self.kind}'.", suggest(self.kind, ("linear", "llama3"))
            )
        if min(self.factor, self.low, self.length) <= 0 or self.high <= self.low:
            raise ConfigError(
                f"rotary_scaling {self}: the numbers do not fit.", "Give positive numbers, and high greater than low."
            )

    @classmethod
    def parse(cls, text: str) -> RotaryScaling | None:
        """Parses "linear:<factor>" or "llama3:<factor>,<low>,<high>,<length>"; empty: None."""
        if not text:
            return None
        kind, _, numbers = text.partition(":")
        try:
            values = [float(n) for n in numbers.split(",")]
        except ValueError:
            values = []
        if len(values) != {"linear": 1, "llama3": 4}.get(kind, len(values)) or not values:
            raise ConfigError(
                f"rotary_scaling is '{text}'.", "Give linear:<factor> or llama3:<factor>,<low>,<high>,<length>."
            )
        return cls(kind, *values)

    def __str__(self) -> str:
        if self.kind == "linear":
            return f"linear:{self.factor:.12g}"
        numbers = (self.factor, self.low, self.high, self.length)
        return f"{self.kind}:{','.join(f'{n:.12g}' for n in numbers)}"

    def rates(self, rate: Tensor) -> Tensor:
        """Radians per position, slowed down."""
        slow = ew.multiply(rate, 1.0 / self.factor)
        if self.kind == "linear":
            return slow
        waves = ew.multiply(rate, self.length / (2 * math.pi))  # waves in a text of that length
        share = ew.multiply(ew.subtract(waves, self.low), 1.0 / (self.high - self.low))
        share = ew.minimum(ew.maximum(share, 0.0), 1.0)
        return ew.add(slow, ew.multiply(share, ew.subtract(rate, slow)))


def rotary(
    x: Tensor,
    length_dim: DimLike,
    dim: DimLike,
    base: float = 10000.0,
    positions: Tensor | None = None,
    scaling: RotaryScaling | None = None,
) -> Tensor:
    """x with each pair (i, i + half) of ``dim`` rotated by the angle p base**(-i / half).

    Products of rotated queries and keys depend on the distance of their positions p only.

    Args:
        x: Queries or keys, with ``length_dim`` and ``dim``.
        length_dim: Dim (or name) of positions.
        dim: Dim (or name) that is rotated; of even size.
        base: Sets the slowest rotation.
        positions: Numbers p over dims of x; default 0, 1, 2, ... along ``length_dim``.
        scaling: How rotations are slowed down.

    Returns:
        A tensor of x's shape.

    Lowers: where ``dim`` is split, an exchange of halves.

    Source: Su et al. 2021, pairs as in GPT-NeoX.
    """
    name = dim_name(dim)
    whole = x.shape.dim(name)
    _check("rotary", whole, base)
    half = Dimension(name, whole.size // 2)
    wide = "float64" if x.dtype == "float64" else "float32"
    if positions is None:
        positions = index_range(x.shape.dim(dim_name(length_dim)))
    rate = ew.exp(ew.multiply(ew.cast(index_range(half), wide), -math.log(base) / half.size))
    rate = rate if scaling is None else scaling.rates(rate)
    angle = ew.multiply(ew.cast(positions, wide), rate)
    cos, sin = ew.cast(ew.cos(angle), x.dtype), ew.cast(ew.sin(angle), x.dtype)
    a, b = slice_dim(x, 0, half.size, name), slice_dim(x, half.size, half.size, name)
    turned = [
        ew.subtract(ew.multiply(a, cos), ew.multiply(b, sin), output_shape=a.shape),
        ew.add(ew.multiply(b, cos), ew.multiply(a, sin), output_shape=a.shape),
    ]
    return concat(turned, name)


def _check(what: str, dim: Dimension, base: float) -> None:
    if dim.size % 2:
        raise ShapeError(f"{what}: dimension {dim} has an odd size.", "Give an even one.")
    if not base > 0:
        raise ShapeError(f"{what}: the base is {base}.", "Give a positive number, usually 10000.")


def relative_position_bucket(
    distance: Tensor, bidirectional: bool = True, num_buckets: int = BUCKETS, max_distance: int = MAX_DISTANCE
) -> Tensor:
    """Buckets of distances: one each for small ones, then ever wider ones up to ``max_distance``.

    Args:
        distance: int32, memory minus query position.
        bidirectional: Half of the buckets are for later memories; else these are all in bucket 0.
        num_buckets: Number of buckets.
        max_distance: From here on all are in the last bucket of their side.

    Returns:
        int32 of the same shape, in 0..num_buckets-1.

    Source: T5 (Raffel et al. 2020).
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    if exact < 1 or max_distance <= exact:
        raise ShapeError(
            f"relative_position_bucket: {num_buckets} buckets up to distance {max_distance}.",
            f"Give at least {4 if bidirectional else 2} buckets and a distance above {exact}.",
        )
    if bidirectional:
        later = ew.multiply(ew.cast(ew.greater(distance, 0), "int32"), side)
        away = ew.abs(distance)
    else:
        later, away = None, ew.maximum(ew.negative(distance), 0)
    # The number of limits that are reached, found here in exact arithmetic instead of by float32
    # logarithms, which are off by one bucket at some distances.
    bucket = ew.minimum(away, exact)
    for k in range(1, side - exact):
        limit = exact * (max_distance / exact) ** (k / (side - exact))
        reached = ew.greater_equal(away, math.ceil(limit - 1e-9))
        bucket = ew.add(bucket, ew.cast(reached, "int32"))
    return bucket if later is None else ew.add(bucket, later)


def relative_position_bias(
    heads: Dimension | Sequence[Dimension],
    query_length: Dimension,
    memory_length: Dimension,
    bidirectional: bool = True,
    num_buckets: int = BUCKETS,
    max_distance: int = MAX_DISTANCE,
    variable_dtype: str | VariableDType = "float32",
    initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """A learned number for each head and bucket of distances, to be added to attention logits.

    Compute it once and pass it to every layer to share it between layers, as T5 does.

    The other arguments are those of `relative_position_bucket`.

    Args:
        heads: Dim or dims of heads.
        query_length, memory_length: Dims of positions.
        initializer: Default zeros.
        name: The variable, [heads, buckets].

    Returns:
        [heads, query_length, memory_length].

    Source: T5 (Raffel et al. 2020).
    """
    name = layer_name(name, "relative_position_bias")
    shape = Shape([query_length, memory_length])
    distance = ew.subtract(index_range(memory_length), index_range(query_length), output_shape=shape)
    dims = [heads] if isinstance(heads, Dimension) else list(heads)
    return bias_of_distance(distance, dims, bidirectional, num_buckets, max_distance, variable_dtype, initializer, name)


def bias_of_distance(
    distance: Tensor,
    heads: Sequence[Dimension],
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
    variable_dtype: str | VariableDType,
    initializer: Any,
    name: str,
) -> Tensor:
    """The variable ``name`` [heads, buckets] at the buckets of ``distance``: [heads, distance]."""
    buckets = Dimension("buckets", num_buckets)
    first = zeros_initializer() if initializer is None else initializer
    weights = get_variable(name, Shape([*heads, buckets]), variable_dtype, first)
    index = relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    bias = gather(weights, index, buckets)
    return ew.broadcast(bias, Shape([*heads, *distance.shape]))
