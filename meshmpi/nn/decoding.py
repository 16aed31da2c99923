"""Selects the next token: by sampling, or by beam search.

A draw takes one uniform number per row as input: the token is where the cumulative probability passes it. The draw
therefore depends only on this number and the logits, and a split vocabulary is never gathered: its blocks exchange
their sums.
"""

from __future__ import annotations

from meshmpi.dims import Dimension
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import top_k as largest
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import cumsum, reduce_max, reduce_sum
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.nn.functions import reduce_logsumexp, widened

NEVER = -1e9
"""A logit that no other falls below; representable in every type."""
HALVINGS = 30
"""Halvings of the interval that contains the border of the nucleus: to 1e-7 in the logit."""
SPREAD = 80.0
"""Tokens whose logit is so far below the largest have probability 0 in float32."""
_BELOW_ONE = 1.0 - 2.0**-20


def known_only(logits: Tensor, dim: DimLike, known: int) -> Tensor:
    """The logits with those from index ``known`` on so low that nothing chooses them."""
    whole = logits.shape.dim(dim_name(dim))
    if known >= whole.size:
        return logits
    return ew.where(ew.less(index_range(whole), known), logits, NEVER, output_shape=logits.shape)


def draw(
    logits: Tensor, dim: DimLike, uniform: Tensor, temperature: Tensor, top_p: Tensor | None = None, top_k: int = 0
) -> Tensor:
    """Indices along ``dim`` drawn with probability softmax(logits / temperature), cut off.

    Args:
        logits: Any shape with ``dim``.
        dim: The dim (or its name) of the alternatives; may be split.
        uniform: float32, in [0, 1): one number for each row of the logits.
        temperature: Scalar above 0.
        top_p: Scalar; of the most probable alternatives only those count that are needed to reach
            this probability.  None: all.
        top_k: Only the ``top_k`` most probable are kept, before ``top_p`` is applied; 0: all.

    Returns:
        int32 of the shape of the logits without ``dim``.

    Lowers: where ``dim`` is split over R ranks: with ``top_k`` an all_gather of k values and
    indices of each; else an all_gather of R sums, and with ``top_p`` an all_reduce of a number per
    row for each of 30 halvings of the interval in which the cut lies.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (nucleus).
    """
    name = dim_name(dim)
    logits, uniform = widened(logits), ew.minimum(uniform, _BELOW_ONE)
    if top_k:
        few = Dimension("candidates", min(top_k, logits.shape.dim(name).size))
        values, index = largest(logits, name, few)
        weights = ew.exp(ew.negative(_distance(values, few.name, temperature)))
        if top_p is not None:
            before = cumsum(weights, few, exclusive=True)
            limit = ew.multiply(reduce_sum(weights, reduced_dim=few), ew.cast(top_p, weights.dtype))
            inside = ew.less(before, limit, output_shape=weights.shape)
            weights = ew.where(inside, weights, 0.0)
        place = _passed(weights, few.name, uniform)
        here = ew.equal(index_range(few), place, output_shape=index.shape)
        return reduce_sum(ew.where(here, index, 0), reduced_dim=few)
    weights = ew.exp(ew.negative(_distance(logits, name, temperature)))
    if top_p is not None:
        weights = _nucleus(logits, weights, name, temperature, top_p)
    return _passed(weights, name, uniform)


def _distance(logits: Tensor, dim: str, temperature: Tensor) -> Tensor:
    """How far each logit lies below the largest, in units of the temperature."""
    best = reduce_max(logits, reduced_dim=dim)
    below = ew.subtract(best, logits, output_shape=logits.shape)
    return ew.divide(below, ew.cast(temperature, logits.dtype), output_shape=logits.shape)


def _nucleus(logits: Tensor, weights: Tensor, dim: str, temperature: Tensor, top_p: Tensor) -> Tensor:
    """The weights with 0 where the more probable alternatives reach ``top_p`` already."""
    distance = _distance(logits, dim, temperature)
    limit = ew.multiply(reduce_sum(weights, reduced_dim=dim), ew.cast(top_p, weights.dtype))

    def within(border: Tensor) -> Tensor:
        inside = ew.less_equal(distance, border, output_shape=distance.shape)
        return ew.where(inside, weights, 0.0)

    def reached(border: Tensor) -> Tensor:
        return ew.greater_equal(reduce_sum(within(border), reduced_dim=dim), limit)

    low, high = ew.multiply(limit, 0.0), ew.add(ew.multiply(limit, 0.0), SPREAD)
    # `low` reaches too little, or is the largest logit itself; `high` reaches enough.
    high = ew.where(reached(low), low, high)
    for _ in range(HALVINGS):
        middle = ew.multiply(ew.add(low, high), 0.5)
        enough = reached(middle)
        low, high = ew.where(enough, low, middle), ew.where(enough, middle, high)
    return within(high)


def _passed(weights: Tensor, dim: str, uniform: Tensor) -> Tensor:
    """The first index at which the running sum passes ``uniform`` times the whole."""
    # float64: a sum of 50,000 float32 numbers is off by more than the next number is worth.
    sums = cumsum(ew.cast(weights, "float64"), dim)
    whole = reduce_max(sums, reduced_dim=dim)
    target = ew.multiply(whole, ew.cast(uniform, "float64"))
    passed = ew.less_equal(sums, target, output_shape=sums.shape)
    return reduce_sum(ew.cast(passed, "int32"), reduced_dim=dim)


def beam_candidates(logits: Tensor, dim: DimLike, count: int) -> tuple[Tensor, Tensor]:
    """Log probabilities and indices of the most probable ``count`` alternatives of each beam.

    Args:
        logits: [batch, beam, dim].
        dim: The dim (or its name) of the alternatives; may be split.
        count: How many, at most all.

    Returns:
        ([batch, beam, candidates], the same of int32), in falling order.

    Lowers: where ``dim`` is split, an all_gather of ``count`` values and indices of each block, and
    two all_reduces without ``dim`` for the normalization.
    """
    name, wide = dim_name(dim), widened(logits)
    values, index = largest(wide, name, Dimension("candidates", count))
    return ew.subtract(values, reduce_logsumexp(wide, reduced_dim=name), output_shape=values.shape), index
